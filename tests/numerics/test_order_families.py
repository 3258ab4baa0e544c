"""`reduce.order: tree` with what people do to a model and a loop: the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.numerics.networks import GPT, VOCABULARY, WIDTH, batch
from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.engine.engine import Engine
from zerodrift.errors import UnsupportedError

STEPS, TOTAL = 2, 8


# --- models -----------------------------------------------------------------------------------------------


class Dropping(GPT):
    """Drops out inside of what is recomputed, and behind it."""

    reentrant = False

    def logits(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), 0.2, self.training)
        for layer in self.layers:
            x = checkpoint(self._dropped, layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(F.dropout(x, 0.1, self.training)))

    def _dropped(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(layer(x), 0.2, self.training)


class Reentrant(Dropping):
    reentrant = True


class Sometimes(GPT):
    """Has parameters that some micro-batches have no use for, one that none has, and one whose gradient is a
    negative zero in some."""

    def __init__(self) -> None:
        super().__init__(layers=1, tied=False)
        self.odd, self.even, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.signed = nn.Parameter(torch.ones(5))

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        odd = bool(tokens[0, 0] % 2)
        x = x + (self.odd if odd else self.even)(x)
        logits = self.head(self.norm(self.layers[0](x)))
        return logits + (self.signed * (-0.0 if odd else 1e-4)).sum()


class Frozen(GPT):
    """A frozen part below, and one above."""

    def __init__(self) -> None:
        super().__init__(layers=2, tied=False)
        self.layers[0].requires_grad_(False)
        self.norm.requires_grad_(False)


class Normed(GPT):
    """Keeps running statistics."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.statistics = nn.BatchNorm1d(WIDTH)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.statistics(self.embed(tokens).flatten(0, 1)).view(*tokens.shape, WIDTH)
        return self.head(self.norm(self.layers[0](x)))


# --- loops ------------------------------------------------------------------------------------------------


def usual(engine: Engine, step: int, numbers: Iterable[int]) -> float | None:
    norm = None
    for number in numbers:
        engine.seed_micro_batch(number)
        engine.backward(engine(batch(step, number)))
        norm = engine.step().grad_norm
    return norm


def other_totals(engine: Engine, step: int, numbers: Iterable[int]) -> float | None:
    """Another number of micro-batches in every step."""
    ranks = engine.mesh.size("data")
    engine.progress.accumulation = (2 * TOTAL, TOTAL // 2)[step] // ranks
    return usual(engine, step, engine.micro_batches_of_this_rank())


def weighted(engine: Engine, step: int, numbers: Iterable[int]) -> float | None:
    """Every micro-batch with its own weight, and what was computed of another one thrown away."""
    first, *_ = numbers
    engine.seed_micro_batch(first)
    engine.backward(engine(batch(9, first)))
    engine.zero_grad()
    weights = [0.5 + number / TOTAL for number in numbers]
    return engine.train_batch([{"tokens": batch(step, number)} for number in numbers], weights).step.grad_norm


def looked_at(engine: Engine, step: int, numbers: Iterable[int]) -> float | None:
    """Held-out data between steps and between micro-batches, and a gradient that is changed."""
    held = [{"tokens": batch(7, number)} for number in range(3)]
    engine.evaluate(held)
    for number in numbers:
        engine.seed_micro_batch(number)
        engine.backward(engine(batch(step, number)))
        with torch.no_grad():
            engine(batch(8, number))
        if engine.is_boundary:
            handle = engine.parameter("layers.0.mlp.up.weight")
            handle.gradient = handle.gradient.clamp(-1e-3, 1e-3)
        norm = engine.step().grad_norm
    engine.eval()
    engine.losses(held)
    engine.train()
    return norm


def failing(engine: Engine, step: int, numbers: Iterable[int]) -> float | None:
    """A forward that raises in the middle of a step, which is then begun anew."""
    engine.seed_micro_batch(0)
    engine.backward(engine(batch(step, 5)))
    with pytest.raises(IndexError):
        engine(torch.full((2, 12), VOCABULARY))
    engine.zero_grad()
    return usual(engine, step, numbers)


# --- families ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A model, a loop, and what is written in the config."""

    model: Callable[[], nn.Module] = lambda: GPT(layers=1)
    loop: Callable[[Engine, int, Iterable[int]], float | None] = usual
    mode: str = "bf16"
    total: int = TOTAL
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    precision: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)


def sgd(rest: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, **rest}}}


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-3}}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
WARMUP = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}}
STOCHASTIC = {"master": "same", "state": "bf16-stochastic"}

FAMILIES = {
    "dropout under checkpoints": Family(lambda: Dropping(layers=2)),
    "dropout under reentrant checkpoints": Family(lambda: Reentrant(layers=2)),
    "autocast and dropout": Family(lambda: Dropping(layers=1), mode="autocast-bf16"),
    "sometimes without gradient": Family(Sometimes, mode="fp32", rest=sgd({"weight_decay": 0.1})),
    "sometimes, Nesterov": Family(Sometimes, mode="fp32", rest=sgd({"nesterov": True})),
    "frozen parts": Family(Frozen),
    "other totals": Family(loop=other_totals),
    "weights": Family(lambda: Dropping(layers=1), weighted),
    "looked at": Family(loop=looked_at, rest=WARMUP),
    "failing": Family(lambda: Dropping(layers=1), failing),
    "Muon": Family(lambda: GPT(layers=2), rest=MUON),
    "Lion": Family(rest=LION),
    "split master": Family(precision={"master": "split"}),
    "narrow": Family(precision=STOCHASTIC, rest=WARMUP),
    "statistics": Family(precision={"statistics": True, "state": "8bit"}),
    "an optimizer of torch": Family(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "another of torch": Family(optimizer=lambda p: torch.optim.NAdam(p, lr=1e-3), mode="fp32"),
}

MESHES = {1: (0, "last"), 2: (3, "last"), 4: (2, "every")}
"""Ranks -> stage and time; others where a family is run again."""
OTHERS = {1: (3, "every"), 2: (1, "every"), 4: (0, "last")}
FEW = {1: slice(None), 2: slice(0, None, 2), 4: slice(1, None, 2)}
ALL = dict.fromkeys(FEW, slice(None))
"""Ranks -> which families: each on one rank, and beside it on two or on four, or on both."""


def trained(family: Family, stage: int, when: str) -> tuple[str, list[Any]]:
    """A digest of what a run leaves, and the norms on its way."""
    count = family.total // torch.distributed.get_world_size()
    precision = {"reduce": {"order": "tree", "when": when}, **family.precision}
    written = config(stage, family.mode, count, precision=precision, **family.rest)
    model, given = family.model(), {}
    if family.optimizer is not None:
        del written["optimizer"]
        given["optimizer"] = family.optimizer(model.parameters())
    engine = make(written, model, **given)
    engine.seed = 5
    norms = [family.loop(engine, step, engine.micro_batches_of_this_rank()) for step in range(STEPS)]
    left = str(engine.digest())
    engine.destroy()
    return left, norms


def trained_all(names: list[str], meshes: dict[int, tuple[int, str]]) -> list[Any]:
    told: list[Any] = []
    for name in names:
        try:
            told.append(trained(FAMILIES[name], *meshes[torch.distributed.get_world_size()]))
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return told


@pytest.mark.long
@pytest.mark.parametrize(
    ("meshes", "families"),
    [
        pytest.param(MESHES, FEW, id="few"),
        pytest.param(MESHES, ALL, id="sliced", marks=pytest.mark.slow),
        pytest.param(OTHERS, ALL, id="whole", marks=pytest.mark.slow),
    ],
)
def test_what_people_do_has_the_same_bits_on_any_number_of_ranks(
    meshes: dict[int, tuple[int, str]], families: dict[int, slice]
) -> None:
    names = list(FAMILIES)
    alone: dict[str, Any] = {}
    for ranks, chosen in families.items():
        told = run_ranks(trained_all, ranks, names[chosen], meshes, timeout=200)[0]
        found = dict(zip(names[chosen], told, strict=True))
        alone = alone or found
        assert [name for name in found if found[name] != alone[name]] == [], f"{ranks} ranks differ from 1"
    assert all(norm for _, norms in alone.values() for norm in norms)


# --- what goes on -----------------------------------------------------------------------------------------


def going_on(folder: str, first: int, last: int, seed: int) -> str:
    """Steps of a run in a process that begins with another seed than the one that saved."""
    torch.manual_seed(seed)
    written = config(2, "bf16", TOTAL // torch.distributed.get_world_size())
    written["precision"]["reduce"] = {"order": "tree", "when": "every" if first else "last"}
    engine = make(written, Dropping(layers=1))
    if not first:
        engine.seed = seed
    checkpoints = Checkpoints(engine, folder, quiet=True)
    checkpoints.resume()
    for step in range(first, last):
        usual(engine, step, engine.micro_batches_of_this_rank())
    checkpoints.save()
    left = str(engine.digest())
    engine.destroy()
    return left


def test_a_run_goes_on_with_its_seed(tmp_path: Path) -> None:
    (whole,) = run_ranks(going_on, 1, str(tmp_path / "whole"), 0, 3, 11)
    run_ranks(going_on, 2, str(tmp_path / "parts"), 0, 1, 11)
    run_ranks(going_on, 4, str(tmp_path / "parts"), 1, 2, 12)
    assert run_ranks(going_on, 1, str(tmp_path / "parts"), 2, 3, 13) == [whole]


# --- what is refused while it runs ------------------------------------------------------------------------


def told(model: nn.Module, act: Callable[[Engine], Any]) -> str:
    engine = make(config(1, "fp32", 2, precision={"reduce": {"order": "tree"}}), model)
    try:
        act(engine)
    except UnsupportedError as error:
        engine.seed_micro_batch(0)
        return str(error)
    finally:
        engine.destroy()
    return ""


def plainly(engine: Engine) -> None:
    for step in range(2):
        for number in engine.micro_batches_of_this_rank():
            engine.backward(engine(batch(step, number)))
            engine.step()


def seeded_by_hand(engine: Engine) -> None:
    """Two forwards of a micro-batch draw one after the other."""
    for number in engine.micro_batches_of_this_rank():
        torch.manual_seed(number)
        loss = engine(batch(0, number)) + engine(batch(1, number))
        engine.backward(loss)
        engine.step()


def seeded_before_data(engine: Engine) -> None:
    for number in engine.micro_batches_of_this_rank():
        engine.seed_micro_batch(number)
        engine.backward(engine(torch.randint(VOCABULARY, (2, 12))))
        engine.step()


def refusals() -> list[str]:
    return [
        told(Dropping(layers=1), plainly),
        told(Dropping(layers=1).eval(), plainly),
        told(Dropping(layers=1), seeded_by_hand),
        told(Dropping(layers=1), seeded_before_data),
        told(GPT(layers=1), plainly),
        told(Normed(), plainly),
        told(Normed().eval(), plainly),
    ]


def test_what_depends_on_the_micro_batches_of_a_rank_is_refused_by_name() -> None:
    for said in run_ranks(refusals, 2):
        assert "must draw random numbers by the number of its micro-batch" in said[0]
        assert "`engine.seed_micro_batch(number)`" in said[0]
        assert said[1:5] == [""] * 4
        assert "statistics.running_mean" in said[5] and "must not be written by a forward" in said[5]
        assert said[6] == ""
