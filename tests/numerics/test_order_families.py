"""`reduce.order: tree` has the same bits on 1, 2 and 4 ranks for unusual models and loops."""

from __future__ import annotations

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


def failing(engine: Engine, step: int, numbers: Iterable[int]) -> float | None:
    """Raise in a forward in the middle of a step, and begin the step anew."""
    engine.seed_micro_batch(0)
    engine.backward(engine(batch(step, 5)))
    with pytest.raises(RuntimeError, match="indices"):
        engine(torch.full((2, 12), 0.5))
    engine.zero_grad()
    return usual(engine, step, numbers)


def family(**what: Any) -> Cell:
    """Return the cell of a model, a loop and config keys; its mesh sets the stage."""
    return Cell(0, "last", **{"mode": "bf16", "total": TOTAL if "loop" in what else 4, **what})


def one_layer() -> nn.Module:
    return GPT(layers=1, dropout=0.2, recompute=False)


def sgd(rest: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, **rest}}}


def narrow(compute: Any = "fp8", **what: Any) -> Cell:
    return family(precision={"compute": compute}, **what)


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-3}}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
WARMUP = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}}
STOCHASTIC = {"master": "same", "state": "bf16-stochastic"}

FAMILIES = {
    "experts": family(model="moe"),
    "fp16": family(mode="fp16"),
    "dropout and drawn moments": family(model="dropout", state="bf16-stochastic"),
    "8-bit moments under autocast": family(mode="autocast-bf16", model="moe", state="8bit"),
    "blocks that run twice": family(model="twice"),
    "replicas": family(replicate=2),
    "recomputed replicas": family(model="recomputed", replicate=2),
    "narrow gathers": family(model="moe", precision={"gather": "fp8"}),
    "fp8 products, recomputed": narrow(model="recomputed"),
    "fp8 products of experts": narrow(model="moe"),
    "fp8 products of stacked experts": narrow(model=stacked),
    "fp8 products under autocast": narrow(model="dropout", mode="autocast-bf16"),
    "fp8 products, but for weights": narrow("fp8-hp-grad-weight", mode="fp16"),
    "fp8 products in fp32": narrow({"forward": "fp8", "grad_weight": "fp8"}, mode="fp32"),
    "dropout under checkpoints": family(model=lambda: GPT(dropout=0.2, recompute=False)),
    "dropout under reentrant checkpoints": family(model=lambda: GPT(dropout=0.2, recompute=True)),
    "autocast and dropout": family(model=one_layer, mode="autocast-bf16"),
    "sometimes without gradient": family(model=Sometimes, mode="fp32", rest=sgd({"weight_decay": 0.1})),
    "sometimes, Nesterov": family(model=Sometimes, mode="fp32", rest=sgd({"nesterov": True})),
    "frozen parts": family(model=Frozen),
    "other totals": family(loop=other_totals),
    "weights": family(model=one_layer, loop=weighted),
    "looked at": family(loop=evaluate_between, rest=WARMUP),
    "failing": family(model=one_layer, loop=failing),
    "Muon": family(model=lambda: GPT(layers=2), rest=MUON),
    "Lion": family(rest=LION),
    "split master": family(precision={"master": "split"}),
    "one bf16 copy": family(precision=STOCHASTIC, rest=WARMUP),
    "statistics": family(precision={"statistics": True, "state": "8bit"}),
    "an optimizer of torch": family(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "another of torch": family(optimizer=lambda p: torch.optim.NAdam(p, lr=1e-3), mode="fp32"),
}

MESHES = {1: (0, "last"), 2: (3, "last"), 4: (2, "every")}
"""Ranks -> stage and time; others for a second run of a family."""
OTHERS = {1: (3, "every"), 2: (1, "every"), 4: (0, "last")}
FEW = {1: slice(None), 2: slice(0, None, 2), 4: slice(1, None, 2)}
ALL = dict.fromkeys(FEW, slice(None))
"""Ranks -> families: each runs on one rank, and on two or on four, or on both."""


def trained_all(names: list[str], meshes: dict[int, tuple[int, str]]) -> list[Any]:
    told: list[Any] = []
    for name in names:
        try:
            stage, when = meshes[torch.distributed.get_world_size()]
            told.append(train_cell(replace(FAMILIES[name], stage=stage, when=when)))
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
    (one_layer, plainly, "must draw random numbers by the number of its micro-batch"),
    (one_layer, plainly, r"`engine\.seed_micro_batch\(number\)`"),
    (Normed, plainly, r"statistics\.running_mean.*must not be written by a forward"),
    (lambda: one_layer().eval(), plainly, ""),
    (one_layer, seeded_by_hand, ""),
    (one_layer, seeded_before_data, ""),
    (lambda: GPT(layers=1), plainly, ""),
    (lambda: Normed().eval(), plainly, ""),
]
"""(model, action, words of the error)"""


@pytest.mark.parametrize("number", range(len(REFUSALS)))
@on_ranks(2)
def test_what_depends_on_the_micro_batches_of_a_rank_is_refused_by_name(number: int) -> None:
    model, act, told = REFUSALS[number]
    engine = make(config(1, "fp32", 2, precision={"reduce": {"order": "tree"}}), model())
    if told:
        with pytest.raises(UnsupportedError, match=f"(?s){told}"):
            act(engine)
        engine.seed_micro_batch(0)
    else:
        act(engine)
