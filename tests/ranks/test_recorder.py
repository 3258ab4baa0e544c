"""The collectives of a step are the plan's, in order, with dtype, size and sum, and with the computations
between them. A simulation plays this list."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, make
from tests.numerics.test_frozen import adapted
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.comm.collectives import Recorded
from zerodrift.plan.schedule import Collective, Computation, Event, collectives, events

STAGES = (0, 1, 2, 3)


class Recomputing(GPT):
    """A GPT with activation checkpointing around every block, or around a block's parts."""

    def __init__(self, reentrant: bool, inside: bool = False, **rest: Any) -> None:
        super().__init__(**rest)
        self.reentrant = reentrant
        if inside:
            for layer in self.layers:
                layer.mlp = Inside(layer.mlp, reentrant)
        self.outside = not inside

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.outside else layer(x)
        return self.head(self.norm(x))


class Inside(nn.Module):
    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


Step = Recorded | tuple[str, str, bool]
"""A collective, or a computation: its kind, its unit, whether in a backward."""


def words(planned: Collective) -> Recorded:
    return Recorded(planned.op, planned.dtype, planned.numel, planned.axis, planned.sum)


def steps_of(engine: Any) -> list[Step]:
    """Return the plan's computations and collectives, in order."""

    def told(event: Event) -> Step:
        if isinstance(event, Computation):
            return event.work, engine.plan.units[event.unit].name if event.unit >= 0 else "", event.back
        return words(event)

    return [told(event) for event in events(engine.plan)]


class CurrentRecord:
    """A reference to the record of the current step."""

    into: list[Any]


def watch_computing(engine: Any, log: CurrentRecord) -> None:
    """Record in the same list when a unit begins to compute, or has computed a gradient in a backward."""
    model, update = engine.module, engine.updater.update

    def note(work: str, unit: str, back: bool = False) -> Any:
        def noted(*_: Any) -> None:
            log.into.append((work, unit, back))

        return noted

    model.embed.register_forward_pre_hook(note("enter", ""))
    model.norm.register_forward_pre_hook(note("leave", ""))
    model.norm.weight.register_hook(note("leave", "", True))
    model.embed.weight.register_hook(note("enter", "", True))
    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(note("forward", f"layers.{number}"))
        layer.mlp.down.weight.register_hook(note("backward", f"layers.{number}", True))

    def updated(*given: Any) -> None:
        log.into.append(("update", "", False))
        update(*given)

    engine.updater.update = updated


def difference(written: dict[str, Any], model: nn.Module, computing: bool) -> str:
    """Return the first difference between a step's record and the plan's list on this rank; empty if there
    is none. `computing` includes computations."""
    engine = make(written, model)
    try:
        expected: list[Step] = steps_of(engine) if computing else list(map(words, collectives(engine.plan)))
        noted = CurrentRecord()
        if computing:
            watch_computing(engine, noted)
        for step in range(2):
            with engine.comm.record() as log:
                noted.into = log
                for number in range(written["gradient_accumulation_steps"]):
                    engine.backward(engine(batch(step, engine.mesh.rank("data"), number)))
                    engine.step()
            for place, (got, want) in enumerate(zip(log, expected, strict=False)):
                if got != want:
                    return f"step {step}, {place} of {len(expected)}: got {got}, planned {want}"
            if len(log) != len(expected):
                return f"step {step}: {len(log)} events, planned {len(expected)}"
        return ""
    finally:
        engine.destroy()


def report(cases: dict[str, tuple[dict[str, Any], Any]], computing: bool = False) -> dict[str, str]:
    """Return the differences of cases on this rank."""
    found = {name: difference(written, build(), computing) for name, (written, build) in cases.items()}
    return {name: text for name, text in found.items() if text}


Cell = tuple[int, int, str]
"""(stage, micro-batches, mode)."""

CELLS: list[Cell] = list(itertools.product(STAGES, (1, 3), ("fp32", "bf16", "autocast-bf16")))
EVEN, ODD = (
    [cell for number, cell in enumerate(CELLS) if (number // 6 + number) % 2 == half] for half in (0, 1)
)
"""Cells that hold every two values of even and of odd world sizes."""


def plain(cells: list[Cell]) -> dict[str, str]:
    cases = {str(cell): (config(cell[0], cell[2], cell[1]), GPT) for cell in cells}
    return report(cases, computing=True)


def recomputing() -> dict[str, str]:
    cells = itertools.product((0, 3), (False, True), (False, True))
    return report(
        {
            f"stage {stage}, reentrant {reentrant}, inside {inside}": (
                config(stage, "bf16", 2),
                partial(Recomputing, reentrant, inside),
            )
            for stage, reentrant, inside in cells
        }
    )


def shaped() -> dict[str, str]:
    """Record pins (two segments per unit), nested units, frozen units, every way to keep and gather ahead."""
    pins = {"precision": {"rules": [{"match": "*norm*", "pin": "fp32"}]}}
    nested = {"sharding": {"units": ["layers.*", "layers.*.mlp"]}}
    cases: dict[str, tuple[dict[str, Any], Any]] = {}
    for stage in (0, 3):
        cases[f"pins, stage {stage}"] = config(stage, "bf16", 2, **pins), GPT
        cases[f"nested, stage {stage}"] = config(stage, "bf16", 2, **nested), GPT
        cases[f"frozen block, stage {stage}"] = config(stage, "bf16", 2), frozen_block
    for room in (1, 1 << 15):
        near_and_far = {"sharding": {"prefetch": room, **nested["sharding"]}}
        cases[f"{room} bytes"] = config(3, "bf16", 2, **near_and_far), partial(GPT, 4)
    for keep in ("never", "micro-batch", "step"):
        pinned = {**pins, "sharding": {"keep_gathered": keep, "units": ["layers.*", "layers.*.attention"]}}
        cases[f"keep {keep}, pinned and nested"] = config(3, "bf16", 2, **pinned), GPT
    return report(cases)


def frozen_block() -> GPT:
    model = GPT(layers=3)
    model.layers[1].requires_grad_(False)
    return model


def replicated(cells: list[tuple[int, int]]) -> dict[str, str]:
    mesh = {"sharding": {"replicate": 2}}
    return report({str(cell): (config(cell[0], "bf16", cell[1], **mesh), GPT) for cell in cells})


def copied(names: list[str]) -> dict[str, str]:
    """Record a second copy of the blocks on pairs of ranks, also with recomputed forwards."""
    pairs = {"sharding": {"secondary": 2}}
    narrow, wide = ({"precision": {"gather": word}, **pairs} for word in ("fp8", "fp32"))
    nested = {"sharding": {"units": ["layers.*", "layers.*.mlp"], "secondary": 2}}
    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "plain": (config(3, "bf16", 2, **pairs), GPT),
        "gathered in fp8": (config(3, "bf16", **narrow), GPT),
        "frozen in nf4": (config(3, "bf16", 2, precision={"frozen": "nf4"}, **pairs), adapted),
        "gathered in fp32": (config(3, "autocast-bf16", **wide), GPT),
        "nested, recomputed": (config(3, "bf16", 2, **nested), partial(Recomputing, False)),
        "recomputed inside": (config(3, "bf16", 2, **pairs), partial(Recomputing, True, True)),
        "a frozen block": (config(3, "autocast-bf16", 2, **pairs), frozen_block),
    }
    return report({name: cases[name] for name in names})


SOME = ["gathered in fp8", "frozen in nf4", "nested, recomputed", "a frozen block"]
REST = ["plain", "gathered in fp32", "recomputed inside"]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("body", "world", "cells"),
    [
        pytest.param(plain, 1, [ODD[1::3]], id="one rank"),
        pytest.param(plain, 1, [CELLS], id="one rank, all cells", marks=slow),
        pytest.param(plain, 2, [EVEN], id="two ranks"),
        pytest.param(plain, 2, [ODD], id="two ranks, other cells", marks=slow),
        pytest.param(recomputing, 2, [], id="checkpointing"),
        pytest.param(shaped, 2, [], id="pins, nesting, keeping"),
        pytest.param(copied, 4, [SOME], id="a second copy on pairs of ranks"),
        pytest.param(copied, 4, [REST], id="other second copies", marks=slow),
        pytest.param(replicated, 4, [[(0, 1), (1, 2), (2, 1), (3, 2)]], id="2 replicas of 2 shards"),
        pytest.param(
            replicated, 4, [[(0, 2), (1, 1), (2, 2), (3, 1)]], id="the other cells of these", marks=slow
        ),
    ],
)
def test_the_record_is_the_plans_list(body: Any, world: int, cells: list[Any]) -> None:
    for found in run_ranks(body, world, *cells):
        assert found == {}


@on_ranks(2)
def test_a_gather_too_many_would_be_seen() -> bool:
    engine = make(config(3, "bf16"), GPT())
    expected = [words(entry) for entry in collectives(engine.plan)]
    with engine.comm.record() as log:
        engine.backward(engine(batch(0)))
        engine.executor.units[1].gather()
        engine.step()
    engine.destroy()
    return log == expected
