"""A look at the rounding of a run that is training: one more forward and backward of a step's micro-batches.

What is estimated is what the shortlist of an audit estimates; there is no reference and no replay.

Invariant: the run goes on with the bits that it has without a look: its generators, its buffers and its
place in a step are what they were.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zerodrift.engine.engine import Engine
from zerodrift.engine.habits.microbatch_state import generators_kept
from zerodrift.errors import UnsupportedError
from zerodrift.numerics import signals
from zerodrift.numerics.measure import ThreePasses, ToTargets, estimate, gathered, signed
from zerodrift.numerics.operations import Roundings
from zerodrift.numerics.runs import Batch
from zerodrift.plan.table import Plan

SHOWN = 12
"""Cells, and places, that are kept of each look."""


@dataclass(frozen=True, slots=True)
class Look:
    """Estimates at one step."""

    rms: float
    """Of all together, if they are independent of each other."""
    cells: tuple[tuple[str, str, float], ...]
    """(parameter, cell, rms), what is worth most first."""
    places: tuple[tuple[str, str, str, float], ...]
    """(module, line, operation, rms) of what no parameter is charged with."""


def require_lookable(plan: Plan) -> None:
    """An error for a run that cannot be looked at, before it begins."""
    policy = plan.policy
    for what, there in (
        ("a pipeline", policy.pipeline is not None),
        (f"backend {policy.backend}", policy.backend != "native"),
        ("`reduce.order: tree`", policy.tree),
    ):
        if there:
            must = "must be left out: it looks at whole micro-batches on the native backend"
            raise UnsupportedError("audit.at", must, got=what, do="Audit a checkpoint: `zerodrift audit`.")


def look(engine: Engine, batches: Sequence[Batch]) -> Look:
    """Between steps, with as many micro-batches as a step has. A call of all ranks."""
    plan, found = engine.plan, Roundings()
    with _kept(engine):
        seen = gathered(engine, signed(engine, batches, found, {}))
        passes = ThreePasses(seen, signals.drift(seen, seen), seen, signals.drift(seen, seen), frozenset())
        scale = ToTargets(len(batches), plan.mesh.data, len(seen.values), engine.scaler.scale)
        estimate(passes, engine, lambda name: engine.parameter(name).master, found, scale)
    # Storage is part of what `compute` is worth, where both are narrow.
    computed = [each for each in passes.estimates if each.choice.cell == "compute"]
    counted = computed or passes.estimates
    square = sum(each.square for each in counted) + sum(place.rms**2 for place in passes.places)
    cells = tuple((each.choice.names[0], each.choice.cell, each.rms) for each in passes.estimates[:SHOWN])
    places = tuple((p.module, p.line, p.operation, p.rms) for p in passes.places[:SHOWN])
    return Look(math.sqrt(square) if math.isfinite(square) else math.inf, cells, places)


@contextlib.contextmanager
def _kept(engine: Engine) -> Iterator[None]:
    before = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    with generators_kept(engine.mesh.device):
        try:
            yield
        finally:
            engine.zero_grad()
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            if not torch.equal(buffer, before[name]):
                buffer.copy_(before[name])
