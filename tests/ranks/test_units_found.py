"""Units are found in containers of called modules; undetected uses are an error that names the units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tests.numerics.runs import config, make
from tests.ranks.harness import on_ranks
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


def norm(
    model: nn.Module, units: list[str], stage: int = 3, backend: str = "native"
) -> tuple[float | str, list[str]]:
    written = config(stage, "fp32", backend=backend, sharding={"units": units} if units else {})
    engine = make(written, model)
    try:
        torch.manual_seed(engine.mesh.rank())
        engine.backward(engine(torch.randn(4, WIDTH)))
        value: float | str | None = engine.step().grad_norm
    except ModelError as error:
        value = str(error)
    names = [unit.name for unit in engine.plan.units]
    engine.destroy()
    assert value is not None
    return value, names


def with_other_values(b: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a block with other values, which torch's hooks of `fully_shard` would drop silently."""
    return torch.func.functional_call(b, {name: value * 2 for name, value in b.named_parameters()}, (x,))


@pytest.mark.parametrize("backend", ["native", "fsdp2"])
@on_ranks(2, timeout=120.0)
def test_units_are_found_or_named(backend: str) -> list[str]:
    """The native backend gathers a parameter wherever it is used outside of its block, and needs no names.

    It has the bits of stage 0. `fully_shard` lays parameters out by itself, and on some processors the
    last bit of a product depends on the place of its matrices."""
    native = backend == "native"
    problems = []

    def compare(
        what: str,
        block: Callable[[], nn.Module],
        call: Any,
        units: list[str],
        word: str = "",
        near: float = 0.0,
    ) -> list[str]:
        """Compare with stage 0; with a word, backend fsdp2 must refuse with it."""
        whole, _ = norm(Net(block, call), [], stage=0)
        value, names = norm(Net(block, call), units, backend=backend)
        if word and not native:
            good = isinstance(value, str) and word in value
        else:
            good = value == pytest.approx(whole, rel=near if native else 1e-12, abs=0.0)
        if not good:
            problems.append(f"{what}: {value} for {whole}, {names}")
        return names

    for name, (block, call, unit) in FOUND.items():
        if unit not in compare(name, block, call, []):
            problems.append(f"{name}: no unit {unit}")
    for name, (call, globs) in NAMED.items():
        compare(name, Block, call, [], f"`sharding.units: {globs}`".replace("'", '"'))
        compare(f"{name}, named", Block, call, globs)
    outside = "linear(b(x), b.a.weight)"
    compare("a weight used outside", Block, lambda b, x: linear(b(x), b.a.weight), [], outside, 1e-6)
    compare("called with other values", Block, with_other_values, [], "`blocks.0.", 1e-6)
    return problems
