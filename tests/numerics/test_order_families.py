"""`reduce.order: tree` has the same bits on 1, 2 and 4 ranks for unusual models and loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.networks import GPT, VOCABULARY, WIDTH, batch
from tests.numerics.runs import config, make
from tests.numerics.test_order import Cell, train_cell, usual
from tests.numerics.test_products import stacked
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.engine.engine import Engine
from zerodrift.errors import UnsupportedError

TOTAL = 8


class Sometimes(GPT):
    """A GPT with parameters that some micro-batches, or all, do not use, and a gradient of negative zero."""

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
    """A GPT with a frozen part below, and one above."""

    def __init__(self) -> None:
        super().__init__(layers=2, tied=False)
        self.layers[0].requires_grad_(False)
        self.norm.requires_grad_(False)


class Normed(GPT):
    """A GPT with running statistics."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.statistics = nn.BatchNorm1d(WIDTH)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.statistics(self.embed(tokens).flatten(0, 1)).view(*tokens.shape, WIDTH)
        return self.head(self.norm(self.layers[0](x)))


def other_totals(engine: Engine, step: int, numbers: Iterable[int]) -> float | None:
    """Train with another number of micro-batches in every step."""
    ranks = engine.mesh.size("data")
    engine.progress.accumulation = (2 * TOTAL, TOTAL // 2)[step] // ranks
    return usual(engine, step, engine.micro_batches_of_this_rank())


def weighted(engine: Engine, step: int, numbers: Iterable[int]) -> float | None:
    """Weight every micro-batch, and drop the forward of another one."""
    first, *_ = numbers
    engine.seed_micro_batch(first)
    engine.backward(engine(batch(9, first)))
    engine.zero_grad()
    weights = [0.5 + number / TOTAL for number in numbers]
    return engine.train_batch([{"tokens": batch(step, number)} for number in numbers], weights).step.grad_norm


def evaluate_between(engine: Engine, step: int, numbers: Iterable[int]) -> float | None:
    """Evaluate held-out data between steps and micro-batches, and change a gradient."""
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


def family(**what: Any) -> Cell:
    """Return the cell of a model, a loop and config keys; its mesh sets the stage."""
    return Cell(0, "last", **{"mode": "bf16", "total": TOTAL if "loop" in what else 4, **what})


def one_layer() -> nn.Module:
    return GPT(layers=1, dropout=0.2, recompute=False)


def narrow(**what: Any) -> Cell:
    return family(precision={"compute": "fp8"}, **what)


NESTEROV = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-3}}}
WARMUP = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}}
STOCHASTIC = {"master": "same", "state": "bf16-stochastic"}

FAMILIES = {
    "experts": family(model="moe"),
    "fp16": family(mode="fp16"),
    "dropout and drawn moments": family(model="dropout", state="bf16-stochastic"),
    "8-bit moments under autocast": family(mode="autocast-bf16", model="moe", state="8bit"),
    "blocks that run twice": family(model="twice"),
    "replicas": family(replicate=2),
    "narrow gathers": family(model="moe", precision={"gather": "fp8"}),
    "fp8 products, recomputed": narrow(model="recomputed"),
    "fp8 products of stacked experts": narrow(model=stacked),
    "fp8 products under autocast": narrow(model="dropout", mode="autocast-bf16"),
    "dropout under checkpoints": family(model=lambda: GPT(dropout=0.2, recompute=False)),
    "dropout under reentrant checkpoints": family(model=lambda: GPT(dropout=0.2, recompute=True)),
    "sometimes without gradient": family(model=Sometimes, mode="fp32", rest=NESTEROV),
    "frozen parts": family(model=Frozen),
    "other totals": family(loop=other_totals),
    "weights": family(model=one_layer, loop=weighted),
    "looked at": family(loop=evaluate_between, rest=WARMUP),
    "Muon": family(model=lambda: GPT(layers=2), rest=MUON),
    "one bf16 copy": family(precision=STOCHASTIC, rest=WARMUP),
    "an optimizer of torch": family(optimizer=lambda p: torch.optim.NAdam(p, lr=1e-3)),
}

MESHES = {1: (0, "last"), 2: (3, "last"), 4: (2, "every")}
"""Ranks -> stage and time."""
FEW = {1: slice(None), 2: slice(0, None, 2), 4: slice(1, None, 2)}
ALL = dict.fromkeys(FEW, slice(None))
"""Ranks -> families: each runs on one rank, and on two or on four, or on both."""


def trained_all(names: list[str]) -> list[Any]:
    told: list[Any] = []
    for name in names:
        try:
            stage, when = MESHES[torch.distributed.get_world_size()]
            told.append(train_cell(replace(FAMILIES[name], stage=stage, when=when)))
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return told


@pytest.mark.long
@pytest.mark.parametrize(
    "families", [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.slow)]
)
def test_what_people_do_has_the_same_bits_on_any_number_of_ranks(families: dict[int, slice]) -> None:
    names = list(FAMILIES)
    alone: dict[str, Any] = {}
    for ranks, chosen in families.items():
        told = run_ranks(trained_all, ranks, names[chosen], timeout=200)[0]
        found = dict(zip(names[chosen], told, strict=True))
        alone = alone or found
        assert [name for name in found if found[name] != alone[name]] == [], f"{ranks} ranks differ from 1"
    assert all(float(norm) for _, told in alone.values() for norm, _ in told)
    # Ways to recompute, and replicas of one rank, change nothing.
    assert len({left for left, _ in alone.values()}) >= len(names) - 3, "two families are one"


def going_on(folder: str, first: int, last: int, seed: int) -> str:
    """Train steps of a run in a process with another seed than the one that saved."""
    torch.manual_seed(seed)
    written = config(2, "bf16", TOTAL // torch.distributed.get_world_size())
    written["precision"]["reduce"] = {"order": "tree", "when": "every" if first else "last"}
    engine = make(written, one_layer())
    if not first:
        engine.seed = seed
    checkpoints = Checkpoints(engine, folder, quiet=True)
    checkpoints.resume()
    for step in range(first, last):
        usual(engine, step, engine.micro_batches_of_this_rank())
    checkpoints.save()
    return str(engine.digest())


@pytest.mark.second
def test_a_run_goes_on_with_its_seed(tmp_path: Path) -> None:
    (whole,) = run_ranks(going_on, 1, str(tmp_path / "whole"), 0, 3, 11)
    run_ranks(going_on, 2, str(tmp_path / "parts"), 0, 1, 11)
    run_ranks(going_on, 4, str(tmp_path / "parts"), 1, 2, 12)
    assert run_ranks(going_on, 1, str(tmp_path / "parts"), 2, 3, 13) == [whole]


def plainly(engine: Engine) -> None:
    for step in range(2):
        for number in engine.micro_batches_of_this_rank():
            engine.backward(engine(batch(step, number)))
            engine.step()


def seeded_by_hand(engine: Engine) -> None:
    """Draw in two forwards of a micro-batch, one after the other."""
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


REFUSALS: list[tuple[Callable[[], nn.Module], Callable[[Engine], None], str]] = [
    (
        one_layer,
        plainly,
        r"by the number of its micro-batch.*`engine\.seed_micro_batch\(number\)`",
    ),
    (Normed, plainly, r"statistics\.running_mean.*must not be written by a forward"),
    (one_layer, seeded_by_hand, ""),
    (one_layer, seeded_before_data, ""),
    (lambda: Normed().eval(), plainly, ""),
]
"""(model, action, words of the error)"""


@on_ranks(2)
def test_what_depends_on_the_micro_batches_of_a_rank_is_refused_by_name() -> None:
    for model, act, told in REFUSALS:
        engine = make(config(1, "fp32", 2, precision={"reduce": {"order": "tree"}}), model())
        refused = pytest.raises(UnsupportedError, match=f"(?s){told}") if told else contextlib.nullcontext()
        with refused:
            act(engine)
        engine.seed_micro_batch(0)
        engine.destroy()
