"""The interface of a habit: a loop, a trainer of a model, and a record of values.

Nothing here depends on zerodrift. The trainers are in `plain.py` and `driven.py`.

Invariant: a habit does the same on every rank, on its own data.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NORM = 1e-6
"""Tolerance of gradient norms, because plain torch sums squares in another order."""

SHOWN = 4
"""Differences in a message; later ones follow from the first."""


Trainer = Any
"""The trainer of one model: `plain.Plain`, `driven.Driven`, or `driven.OnDeepSpeed` with the names of an
engine of DeepSpeed's."""


@dataclass
class Loop:
    """One run of a habit on one rank."""

    stage: int
    mode: str
    rank: int
    plain: bool
    """Whether the trainer is plain torch."""
    make: Callable[[Loop, nn.Module, int, dict[str, Any]], Trainer]
    deepspeed: Any = None
    """Scripts of DeepSpeed only: the package, which is DeepSpeed, the drop-in, or plain torch."""
    folder: Path = Path()
    """Scripts only: a folder of all ranks."""
    trainers: list[Trainer] = field(default_factory=list)
    seen: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's computations."""
        return torch.bfloat16 if self.mode == "bf16" else torch.float32

    def train(self, model: nn.Module, micro: int = 1, **config: Any) -> Trainer:
        """Begin to train a model, with `micro` micro-batches per step; `config` is for the engine."""
        self.trainers.append(self.make(self, model, micro, config))
        return self.trainers[-1]

    def config(self, **rest: Any) -> dict[str, Any]:
        """Return a script's config, of SGD; keys of `zero_optimization` are added to the stage's."""
        # DeepSpeed's persistent parameters race on gloo.
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
        base = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        return {**base, **rest, "zero_optimization": {**zero, **rest.get("zero_optimization", {})}}

    def see(self, name: str, value: Any) -> None:
        """Record a value that must be equal under both trainers."""
        self.seen.append((name, snapshot(value)))

    def data(self, seed: int, *shape: int, same: bool = False) -> Tensor:
        """Return normal numbers in the mode's dtype, different on every rank unless `same`."""
        source = torch.Generator().manual_seed(1000 * seed + (0 if same else self.rank))
        return torch.randn(shape or (4, 8), generator=source).to(self.dtype)

    def integers(self, seed: int, high: int, *shape: int) -> Tensor:
        source = torch.Generator().manual_seed(1000 * seed + self.rank)
        return torch.randint(high, shape, generator=source)

    def see_norm(self, norm: float) -> None:
        """Record the norm of a step, with one name for all that are not finite."""
        self.see("norm", norm if math.isfinite(norm) else math.inf)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return copies of a script's parameters, whole."""
        named = dict(model.named_parameters())
        with self.deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: parameter.detach().clone() for name, parameter in named.items()}

    def finish(self) -> None:
        """Record the final state and end the trainers."""
        for number, trainer in enumerate(self.trainers):
            for name, master in trainer.masters().items():
                self.see(f"master {number} {name}", master)
            for name, buffer in trainer.module.named_buffers():
                self.see(f"buffer {number} {name}", buffer)
        if self.deepspeed is None:
            self.see("random state", torch.get_rng_state())
        self.close()

    def end(self, trainer: Trainer) -> None:
        """End one trainer before the others."""
        self.trainers.remove(trainer)
        trainer.close()

    def close(self) -> None:
        while self.trainers:
            self.trainers.pop().close()


@dataclass(frozen=True)
class Habit:
    """A habit with its expected result."""

    run: Callable[[Loop], None]
    refused: str = ""
    """Words of the engine's error; "" if the engine agrees with plain torch."""
    at: tuple[int, ...] = (0, 3)
    """Stages at which it is refused."""
    modes: tuple[str, ...] = ("fp32", "bf16")
    """Modes in which it is refused."""
    split: str = ""
    """Words of the error at stage 0 in bf16, where the other half of a split master cannot follow a write."""
    why: str = ""
    """Reason of a refusal or a tolerance, or what DeepSpeed does at other stages."""
    close: float = 0.0
    """Tolerance of a tensor, as a share of its largest value; 0 is bit for bit."""
    called: str = ""
    """Name of a row of a table."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """Stages at which it runs."""
    alike: tuple[int, ...] = (0, 1, 2, 3)
    """Scripts only: the stages at which DeepSpeed does as plain torch does."""
    own: bool = False
    """Whether a script asserts its results itself, because plain torch lacks a name that it uses."""

    @property
    def name(self) -> str:
        return self.called or self.run.__name__

    def refusal(self, stage: int, mode: str) -> str:
        """Return words of the error at a stage, in a mode; "" if there is none."""
        if self.split and (stage, mode) == (0, "bf16"):
            return self.split
        return self.refused if stage in self.at and mode in self.modes else ""


def habits_of(room: dict[str, Any], *rare: Habit) -> tuple[Habit, ...]:
    """Return every function of a file that takes a loop alone; `rare` ones replace theirs."""
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
    """Return habits that an engine refuses for one reason, each with words of its error."""
    return [Habit(run, refused=said, at=at, split=split, why=why) for run, said in words.items()]


def refused_cases(
    why: str, run: Callable[[Loop, Any], None], cases: dict[str, tuple[Any, str]], **rest: Any
) -> list[Habit]:
    """Return habits of a table that are refused for one reason: name -> (value, words of the error)."""
    return [
        Habit(lambda loop, case=case: run(loop, case), said, why=why, called=name, **rest)
        for name, (case, said) in cases.items()
    ]


def each(run: Callable[[Loop, Any], None], cases: dict[str, Any], **rest: Any) -> list[Habit]:
    """Return a habit for each name of a table: the same script with other values."""
    return [
        Habit(lambda loop, case=case: run(loop, case), called=name, **rest) for name, case in cases.items()
    ]


def snapshot(value: Any) -> Any:
    """Return a copy of the value."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [snapshot(item) for item in value]
    return value


Seen = list[tuple[str, Any]]


def differences(expected: Seen, seen: Seen, close: float) -> list[str]:
    """List the differences between two records, of plain torch and of an engine."""
    names, others = [name for name, _ in expected], [name for name, _ in seen]
    if names != others:
        both = itertools.zip_longest(names, others)
        at, (name, instead) = next((n, pair) for n, pair in enumerate(both) if pair[0] != pair[1])
        return [f"after {names[:at][-5:]} plain torch showed {name}, the engine {instead}"]
    found = [
        f"{name}: {problem}"
        for (name, value), (_, value2) in zip(expected, seen, strict=True)
        if (problem := differs(value, value2, max(NORM, close) if name == "norm" else close))
    ]
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more"]


def differs(value: Any, found: Any, close: float) -> str:
    """Describe the difference between two values; "" if there is none."""
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
    return repr(value).replace("\n", " ")[:100]


def _few(tensor: Tensor) -> list[Any]:
    return tensor.flatten()[:3].tolist()
