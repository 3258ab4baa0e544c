"""Counts of a step on a device: launches, copies, waits of the host, allocations and bytes on the wire.

The engine runs dry (`dry.py`) on rank 0 of 2, 8 or 64. The model's own launches are not counted.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.device.build import needs_device
from tests.device.caching import CachingAllocator
from tests.device.dry import dry_world, recorded
from tests.device.ranks import on_devices
from tests.device.standin import NAME
from tests.numerics.runs import config
from zerodrift.api import initialize
from zerodrift.engine.trained_segment import TrainedSegment
from zerodrift.kernels import device as programs
from zerodrift.plan import cost

pytestmark = needs_device
PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
OTHERS = (0, 3)
"""Stages with more counts: 0 to 2 launch the same."""
WIDTH, WARM = 64, 5
"""Width of the network, and the number of first steps that are not counted."""


class Network(nn.Module):
    """A network in which each block is a segment with two parameters for each of its layers, and two more."""

    def __init__(self, blocks: int, layers: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH)) for _ in range(blocks))
        for block in self.blocks:
            block.extend(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x).mean()


def _count(
    ranks: int,
    stage: int,
    blocks: int = 2,
    layers: int = 2,
    mode: str = "bf16",
    micro_batches: int = 1,
    has_triton: bool = True,
    **rest: Any,
) -> dict[str, Any]:
    """Return the counts of one step of rank 0."""
    memory = CachingAllocator()
    with dry_world(ranks) as device, contextlib.ExitStack() as stack:
        if not has_triton:
            stack.enter_context(mock.patch.object(programs, "works", lambda where: False))
            stack.enter_context(mock.patch.object(programs, "obstacle", lambda where: "not there"))
        with recorded() as before:
            batch = torch.ones(2, WIDTH, device=device)
            written = config(stage, mode, micro_batches, **rest)
            engine = initialize(Network(blocks, layers), config=written, device=NAME, quiet=True)
            for _ in range(WARM):
                _step(engine, batch, micro_batches)
        memory.play(before.entries)
        memory.begin()
        with recorded() as step:
            _step(engine, batch, micro_batches)
        memory.play(step.entries)
        memory.require_whole()
        wire = cost(engine.plan, micro_batches).wire
        engine.destroy()
    launches = step.of("launch")
    ours = [entry for entry in launches if entry.origin and "communicator" not in entry.name]
    return {
        "launches": len(ours),
        "places": Counter(f"{entry.name} in {entry.origin}" for entry in ours),
        "collectives": len(step.of("collective")),
        "waits": [entry.origin for entry in step.of("wait")],
        "copies": Counter(f"{entry.name} in {entry.origin}" for entry in step.of("copy")),
        "allocations": Counter(entry.origin for entry in step.of("allocation") if entry.origin),
        "kept": len(step.of("allocation")) - len(step.of("free")),
        "segments": memory.usage.segments,
        "sent": sum(entry.size for what in ("collective", "message") for entry in step.of(what)),
        "planned": wire,
    }


def _step(engine: Any, batch: torch.Tensor, micro_batches: int) -> None:
    for _ in range(micro_batches):
        engine.backward(engine(batch))
        engine.step()


def _counts(device: torch.device, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_count(**cell) for cell in cells]


def counts(*cells: dict[str, Any]) -> list[dict[str, Any]]:
    return on_devices(_counts, 1, list(cells), timeout=280)[0]


@pytest.fixture(scope="module")
def table() -> dict[str, list[dict[str, Any]]]:
    """Return the counts of each stage on 8 ranks, with two and with four blocks; and of the stages whose
    launches differ, with more parameters on 128 ranks."""
    kinds: dict[str, tuple[dict[str, Any], Sequence[int]]] = {
        "two blocks": ({"ranks": 8}, range(4)),
        "four blocks": ({"ranks": 8, "blocks": 4}, range(4)),
        "more of all": ({"ranks": 128, "layers": 7}, OTHERS),
    }
    cells = [{"stage": stage, **kind} for kind, stages in kinds.values() for stage in stages]
    found = iter(counts(*cells))
    return {name: [next(found) for _ in stages] for name, (_, stages) in kinds.items()}


def test_the_host_waits_once(table: dict[str, list[dict[str, Any]]]) -> None:
    for cells in table.values():
        for cell in cells:
            assert cell["waits"] == ["collectives.read"]
            assert cell["copies"] == {
                "to the host, pageable in collectives.read": 1,
                "from the host, pinned in fused.coefficient_table": 1,
            }


WHOLE = Counter({"program tree_sums in device.sums": 3})
HALVES = Counter(
    {
        "copy_ in fold.halving_exchanges": 18,
        "aten.add_.Tensor in fold.halving_exchanges": 18,
        "aten.add.out in fold._add_in_turn": 3,
    }
)
"""Launches of three sums whose parts arrive at once, and of three by halves on 128 ranks."""


def test_launches_do_not_grow_with_parameters(table: dict[str, list[dict[str, Any]]]) -> None:
    """Launches grow with neither parameters nor ranks, unless sums travel by halves."""
    few = [table["two blocks"][stage] for stage in OTHERS]
    for one, other in zip(few, table["more of all"], strict=True):
        assert other["places"] == one["places"] - WHOLE + HALVES
        # Segments of one size take turns in the buffers of gradients.
        taken = Counter({"accumulation.take": 99})
        rooms = (Counter({"native.sum": 3}), Counter({"native.halve": 3}))
        rest = [cell["allocations"] - room - taken for cell, room in zip((one, other), rooms, strict=True)]
        assert rest[0] == rest[1]
        assert one["collectives"] - other["collectives"] == 3


def test_memory_is_used_again_and_bytes_are_the_plans(table: dict[str, list[dict[str, Any]]]) -> None:
    for cells in table.values():
        for cell in cells:
            assert (cell["kept"], cell["segments"]) == (0, 0)
            assert cell["sent"] == cell["planned"] > 0


def _row(stage: int, two: dict[str, Any], four: dict[str, Any]) -> list[int]:
    """Return the page's line: (per segment, per step besides) of each count."""
    cells = [stage]
    for count in (
        lambda cell: cell["launches"],
        lambda cell: cell["collectives"],
        lambda cell: cell["allocations"].total(),
    ):
        each, rest = divmod(count(four) - count(two), 2)
        assert rest == 0
        cells += [each, count(two) - 3 * each]
    return [*cells, len(two["waits"]), two["copies"].total()]


def test_the_page_has_these_counts(table: dict[str, list[dict[str, Any]]]) -> None:
    pairs = zip(table["two blocks"], table["four blocks"], strict=True)
    rows = [_row(stage, *pair) for stage, pair in enumerate(pairs)]
    text = PAGE.read_text(encoding="utf-8").partition("| stage | launches")[2].partition("\n\n")[0]
    shown = [[int(cell) for cell in re.findall(r"\d+", line)] for line in text.splitlines()[2:]]
    wanted = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
    assert shown == rows, f"docs/engine.md must show\n{wanted}"


MODES: dict[str, dict[str, Any]] = {
    "fp16": {"mode": "fp16"},
    "8bit": {"precision": {"state": "8bit"}},
    "native": {"precision": {"reduce": {"order": "native"}}},
    "narrow": {"precision": {"gather": "fp8", "reduce": {"wire": "int4", "feedback": True}}},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}}},
    "no Triton": {"has_triton": False},
    "micro-batches": {"ranks": 2, "micro_batches": 3},
}
"""Name -> what differs from a step of two micro-batches in bf16 at stage 3 on 8 ranks."""


def test_no_mode_waits_more() -> None:
    usual = {"ranks": 8, "stage": 3, "micro_batches": 2}
    found = dict(zip(MODES, counts(*({**usual, **mode} for mode in MODES.values())), strict=True))
    for name, cell in found.items():
        sent = [place for place in cell["copies"] if place.startswith("from the host")]
        table = [] if name == "no Triton" else ["from the host, pinned in fused.coefficient_table"]
        assert (cell["waits"], sent) == (["collectives.read"], table), name
        assert cell["sent"] == cell["planned"], name
    assert found["micro-batches"]["segments"] == 0


def _sets_an_item(segment: Any) -> None:
    """Set an item to a number, which the host's memory holds."""
    torch.zeros(2, device=NAME)[-1] = 0.5


PLANTED: dict[str, Callable[[Any], object]] = {
    "an item that is set to a number": _sets_an_item,
    "a tensor made of a list": lambda segment: torch.tensor([0.5], device=NAME),
}


def _with_waits(device: torch.device, planted: str) -> list[str]:
    """Return the recorded waits of a step, with one planted in each reduction of the engine."""
    finish = TrainedSegment.finish_reduce

    def waits(segment: Any) -> None:
        finish(segment)
        PLANTED[planted](segment)

    with mock.patch.object(TrainedSegment, "finish_reduce", waits):
        return list(_count(ranks=2, stage=3)["waits"])


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wait_too_many_is_seen(planted: str) -> None:
    assert on_devices(_with_waits, 1, planted)[0] == ["", "", "", "collectives.read"]
