"""What a habit is written against: a loop, what trains a model in it, and what was seen.

Nothing here knows of zerodrift. `plain.py` and `driven.py` are the two who train.

Invariant: a habit does the same on every rank, on its own data.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

NORM = 1e-6
"""How close the norms of gradients are: plain torch sums squares in another order."""

SHOWN = 4
"""Differences that are told; the first ones lead to the others."""


class Trainer(Protocol):
    """Who trains one model."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None: ...

    def step(self) -> bool:
        """End a micro-batch; whether the weights were updated."""

    def zero_grad(self) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def gathered(
        self, names: Iterable[str] | None = None, write: bool = False
    ) -> AbstractContextManager[dict[str, Tensor]]: ...

    def gradient(self, name: str) -> Tensor:
        """Of this step so far, averaged."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def masters(self) -> dict[str, Tensor]:
        """By the names of the model."""

    def close(self) -> None: ...


MakeTrainer = Callable[["Loop", nn.Module, int, dict[str, Any]], Trainer]


@dataclass
class Loop:
    """One run of a habit on one rank."""

    stage: int
    mode: str
    rank: int
    plain: bool
    """Whether plain torch trains."""
    make: MakeTrainer
    trainers: list[Trainer] = field(default_factory=list)
    seen: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return torch.bfloat16 if self.mode == "bf16" else torch.float32

    def train(self, model: nn.Module, micro: int = 1, **config: Any) -> Trainer:
        """Begin to train a model, with `micro` micro-batches per step; `config` is for the engine."""
        self.trainers.append(self.make(self, model, micro, config))
        return self.trainers[-1]

    def see(self, name: str, value: Any) -> None:
        """Something that must be the same whoever trains."""
        self.seen.append((name, kept(value)))

    def data(self, seed: int, *shape: int, same: bool = False) -> Tensor:
        """Normal numbers in the mode's dtype, other ones on every rank unless `same`."""
        source = torch.Generator().manual_seed(1000 * seed + (0 if same else self.rank))
        return torch.randn(shape or (4, 8), generator=source).to(self.dtype)

    def integers(self, seed: int, high: int, *shape: int) -> Tensor:
        source = torch.Generator().manual_seed(1000 * seed + self.rank)
        return torch.randint(high, shape, generator=source)

    def see_norm(self, norm: float) -> None:
        """Of a step; how one that is not finite is written is nobody's promise."""
        self.see("norm", norm if math.isfinite(norm) else math.inf)

    def finish(self) -> None:
        """See what the habit has left behind, and end."""
        for number, trainer in enumerate(self.trainers):
            for name, master in trainer.masters().items():
                self.see(f"master {number} {name}", master)
            for name, buffer in trainer.module.named_buffers():
                self.see(f"buffer {number} {name}", buffer)
        self.see("random state", torch.get_rng_state())
        self.close()

    def close(self) -> None:
        while self.trainers:
            self.trainers.pop().close()


@dataclass(frozen=True)
class Habit:
    """A habit and what must come of it."""

    run: Callable[[Loop], None]
    refused: str = ""
    """Words of the error that the engine raises instead; "" where it does as plain torch."""
    at: tuple[int, ...] = (0, 3)
    """The stages at which it is refused."""
    modes: tuple[str, ...] = ("fp32", "bf16")
    """The modes in which it is refused."""
    split: str = ""
    """Words of the error at stage 0 in bf16, where the other half of a split master cannot follow a write."""
    why: str = ""
    """Why it is refused, or only close."""
    close: float = 0.0
    """How far a tensor may be off, as a share of its largest value; 0 is bit for bit."""
    called: str = ""
    """Its name, where it is one of a table."""

    @property
    def name(self) -> str:
        return self.called or self.run.__name__

    def refusal(self, stage: int, mode: str) -> str:
        """Words of the error at a stage, in a mode; "" where there is none."""
        if self.split and (stage, mode) == (0, "bf16"):
            return self.split
        return self.refused if stage in self.at and mode in self.modes else ""


def habits_of(room: dict[str, Any], *rare: Habit) -> tuple[Habit, ...]:
    """Every function of a file that takes nothing but a loop, in their order; of `rare` ones more is said."""
    said = {habit.name: habit for habit in rare}
    runs = [
        run
        for run in room.values()
        if inspect.isfunction(run)
        and run.__module__ == room["__name__"]
        and list(inspect.signature(run).parameters) == ["loop"]
    ]
    return tuple(said.pop(run.__name__, None) or Habit(run) for run in runs) + tuple(said.values())


def refused(
    why: str, words: dict[Callable[[Loop], None], str], at: tuple[int, ...] = (0, 3), split: str = ""
) -> list[Habit]:
    """Habits that an engine refuses for one reason, each with words of its error."""
    return [Habit(run, refused=said, at=at, split=split, why=why) for run, said in words.items()]


def refused_cases(
    why: str, run: Callable[[Loop, Any], None], cases: dict[str, tuple[Any, str]]
) -> list[Habit]:
    """The same for a table of one script: name -> (its value, words of the error)."""
    return [
        Habit(lambda loop, case=case: run(loop, case), said, why=why, called=name)
        for name, (case, said) in cases.items()
    ]


def each(run: Callable[[Loop, Any], None], cases: dict[str, Any]) -> list[Habit]:
    """One habit for each name of a table, which are the same script with other values."""
    return [Habit(lambda loop, case=case: run(loop, case), called=name) for name, case in cases.items()]


def kept(value: Any) -> Any:
    """The value as it is now."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(item) for item in value]
    return value


def differences(plain: Loop, other: Loop, close: float) -> list[str]:
    """What was seen in one loop and not in the other."""
    names, others = [name for name, _ in plain.seen], [name for name, _ in other.seen]
    if names != others:
        both = itertools.zip_longest(names, others)
        at, (name, instead) = next((n, pair) for n, pair in enumerate(both) if pair[0] != pair[1])
        return [f"after {names[:at][-5:]} plain torch showed {name}, the engine {instead}"]
    found = [
        f"{name}: {problem}"
        for (name, value), (_, value2) in zip(plain.seen, other.seen, strict=True)
        if (problem := differs(value, value2, max(NORM, close) if name == "norm" else close))
    ]
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more"]


def differs(value: Any, found: Any, close: float) -> str:
    """What differs; "" where nothing does."""
    if isinstance(value, float):
        value, found = torch.tensor(value, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    if isinstance(value, Tensor) and isinstance(found, Tensor):
        return tensor_differs(value, found, close)
    if isinstance(value, (list, dict)) and type(value) is type(found) and len(value) == len(found):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        if isinstance(found, dict) and set(keys) != set(found):
            return f"plain torch {keys}, engine {list(found)}"
        problems = [
            f"[{key!r}] {problem}" for key in keys if (problem := differs(value[key], found[key], close))
        ]
        return "; ".join(problems)
    both_same = type(value) is type(found) and not isinstance(value, (list, dict)) and value == found
    return "" if both_same else f"plain torch {_short(value)}, engine {_short(found)}"


def tensor_differs(value: Tensor, found: Tensor, close: float) -> str:
    if value.dtype is not found.dtype or value.shape != found.shape:
        return f"plain torch {value.dtype} {list(value.shape)}, engine {found.dtype} {list(found.shape)}"
    if torch.equal(value, found):
        return ""
    if not (value.is_floating_point() or value.is_complex()):
        return f"plain torch {value.flatten()[:4].tolist()}, engine {found.flatten()[:4].tolist()}"
    wide = torch.complex128 if value.is_complex() else torch.float64
    one, two = value.to(wide), found.to(wide)
    if not torch.equal(one.isnan(), two.isnan()):
        return f"NaN in {int(one.isnan().sum())} and {int(two.isnan().sum())} of {one.numel()} values"
    one, two = one.nan_to_num(), two.nan_to_num()
    off, largest = float((one - two).abs().max()), float(one.abs().max())
    if off <= close * largest:
        return ""
    return f"off by {off:.3g} of {largest:.3g}: plain torch {_few(value)}, engine {_few(found)}"


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) < 100 else f"{text[:100]}... ({len(text)} letters)"


def _few(tensor: Tensor) -> list[Any]:
    return tensor.flatten()[:3].tolist()
