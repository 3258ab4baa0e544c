"""Units are found in containers of called modules, and their order is learned.

The native backend gathers a parameter wherever it is used, and needs no names: `tests/habits/modules.py`.
`fully_shard` lays parameters out by itself, so what it cannot find is an error that names the units.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tests.numerics.runs import config, make
from tests.ranks.harness import on_ranks
from zerodrift import make_plan
from zerodrift.engine.step.traversal import sort_by_pairs
from zerodrift.errors import ModelError

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.w = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(x)) * self.w


class Parts(nn.Module):
    """A block that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), nn.Linear(WIDTH, WIDTH)
        self.w = nn.Parameter(torch.ones(WIDTH))


class Net(nn.Module):
    def __init__(self, make_block: Callable[[], nn.Module], call: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make_block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self._call(block, x)
        return self.head(x).square().mean()


FOUND: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], Any], str]] = {
    "lists": (lambda: nn.ModuleList([Block(), Block()]), lambda b, x: b[1](b[0](x)), "blocks.0.1"),
    "leaves": (
        lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]),
        lambda b, x: b[1](b[0](x)),
        "blocks.0.1",
    ),
    "dicts": (
        lambda: nn.ModuleDict({"attn": Block(), "ff": Block()}),
        lambda b, x: b["ff"](b["attn"](x)),
        "blocks.1.ff",
    ),
    "no forward": (Parts, lambda b, x: b.other(b.one(x)) * b.w, "blocks.1.one"),
    "deep": (
        lambda: nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleDict({"x": Block()})]),
        lambda b, x: b[1]["x"](b[0][0](x)),
        "blocks.0.1.x",
    ),
}
NAMED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], list[str]]] = {
    "its forward": (lambda b, x: b.forward(x), ["blocks.*.*"]),
    "its parts": (lambda b, x: b.b(b.a(x)), ["blocks.*.*"]),
    "a part of a part": (lambda b, x: b.b[0](b(x)), ["blocks.*.*", "blocks.*.*.*"]),
}


FSDP2 = {"backend": "fsdp2"}


@pytest.mark.parametrize("rest", [{}, FSDP2], ids=["native", "fsdp2"])
@pytest.mark.parametrize("name", FOUND)
def test_units_are_found(name: str, rest: dict[str, Any]) -> None:
    block, call, unit = FOUND[name]
    plan = make_plan(config(3, "fp32", **rest), Net(block, call), 2)
    assert unit in [found.name for found in plan.units]


def norm(model: nn.Module, written: dict[str, Any]) -> float | str:
    """Return the norm of a step, or the error of the model."""
    engine = make(written, model)
    try:
        torch.manual_seed(engine.mesh.rank())
        engine.backward(engine(torch.randn(4, WIDTH)))
        return engine.step().grad_norm or 0.0
    except ModelError as error:
        return str(error)
    finally:
        engine.destroy()


def with_other_values(b: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a block with other values, which torch's hooks of `fully_shard` would drop silently."""
    return torch.func.functional_call(b, {name: value * 2 for name, value in b.named_parameters()}, (x,))


@on_ranks(2, timeout=120.0)
def test_fully_shard_has_the_norm_of_stage_0_or_names_what_it_cannot_find() -> list[str]:
    cases: list[tuple[str, Callable[[], nn.Module], Any, list[str], str]] = [
        *((name, block, call, [], "") for name, (block, call, _) in FOUND.items()),
        *((name, Block, call, [], json.dumps(units)) for name, (call, units) in NAMED.items()),
        *((f"{name}, named", Block, call, units, "") for name, (call, units) in NAMED.items()),
        ("outside", Block, lambda b, x: linear(b(x), b.a.weight), [], "linear(b(x), b.a.weight)"),
        ("other values", Block, with_other_values, [], "`blocks.0."),
    ]
    problems = []
    for name, block, call, units, word in cases:
        found = norm(Net(block, call), config(3, "fp32", sharding={"units": units} if units else {}, **FSDP2))
        if word:
            good = isinstance(found, str) and word in found
        else:
            good = found == pytest.approx(norm(Net(block, call), config(0, "fp32")), rel=1e-12)
        problems += [] if good else [f"{name}: {found}"]
    return problems


def test_an_order_keeps_what_it_may_and_is_none_where_there_is_none() -> None:
    assert sort_by_pairs([3, 1, 2], []) == [3, 1, 2]
    assert sort_by_pairs([0, 1, 2, 3], [(2, 0), (3, 2)]) == [1, 3, 2, 0]
    assert sort_by_pairs([0, 1, 2], [(0, 1), (1, 2), (2, 0)]) is None
