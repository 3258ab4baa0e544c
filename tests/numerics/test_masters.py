"""A run with `split` masters has the bits of one with fp32 copies and the same rounding.

The weights start on ties between two bf16 values, where rounding to even and away from zero differ, so any
other rounding shows at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT
from tests.numerics.runs import Run, config, make, masters_and_states, same, train
from tests.ranks.harness import run_ranks
from zerodrift.engine.engine import Engine
from zerodrift.engine.habits.storage_writes import mark_storage_changed
from zerodrift.optim.flat import FlatUpdater
from zerodrift.optim.fused import update
from zerodrift.optim.rounding import round_away
from zerodrift.optim.schemes import Scheme, SliceTensors

STAGES = (0, 1, 2, 3)
STATES = ("fp32", "bf16-stochastic", "8bit")


def on_ties() -> GPT:
    """Return a model with every weight half-way between two bf16 values."""
    model = GPT(layers=1, width=16)
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(torch.int32)
            bits.copy_(bits & ~0xFFFF | 0x8000)
    return model


def engine_of(stage: int, master: str, state: str) -> Engine:
    return make(config(stage, "bf16", precision={"master": master, "state": state}), on_ties())


def show_away(of: SliceTensors) -> None:
    """Round the fp32 masters of a slice to visible weights, as `split` does."""
    assert of.master is not None
    of.storage.copy_(round_away(of.master))


def update_away(scheme: Scheme, of: SliceTensors, *rest: Any) -> None:
    update(scheme, of, *rest)
    show_away(of)


def with_copies(stage: int, state: str, away: bool, steps: int) -> Run:
    """Train with fp32 copies as masters, whose visible weights are rounded to even or away from zero."""
    engine = engine_of(stage, "fp32", state)
    if away:
        assert isinstance(engine.updater, FlatUpdater)
        engine.updater._update_slice = update_away
        for of in engine.updater._slices.values():
            show_away(of)
        for segment in engine.executor.segments:
            segment.sync_storage(engine.updater).wait()
            mark_storage_changed(segment)
    run = train(engine, steps)
    engine.destroy()
    return run


def with_split(stage: int, state: str, steps: int) -> Run:
    engine = engine_of(stage, "split", state)
    assert {row.columns.update.master.value for row in engine.plan.rows if row.columns.update} == {"split"}
    run = train(engine, steps)
    engine.destroy()
    return run


def both(state: str, steps: int, copies: tuple[int, ...]) -> tuple[list[str], list[str], float]:
    """Return (differences over all stages and both masters, differences of rounding to even, decrease of
    the loss). `copies` are the stages of runs with fp32 copies."""
    runs = [with_split(stage, state, steps) for stage in STAGES]
    runs += [with_copies(stage, state, True, steps) for stage in copies]
    even = with_copies(3, state, False, steps)
    return same(runs), runs[0].differs(even), runs[0].losses[0] - runs[0].losses[-1]


@pytest.mark.long
@pytest.mark.parametrize("state", STATES)
def test_split_equals_fp32_copies_at_every_stage(state: str) -> None:
    for differs, otherwise, _ in run_ranks(both, 2, state, 4, (0, 3)):
        assert differs == []
        assert "losses" in otherwise, "a rounding that differs must be seen"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("world", "steps"), [(1, 1000), (2, 60), (2, 1000), (4, 1000)])
def test_split_equals_fp32_copies_in_a_run_that_learns(world: int, steps: int, state: str) -> None:
    for differs, otherwise, learned in run_ranks(both, world, state, steps, STAGES, timeout=1400):
        assert differs == []
        assert "losses" in otherwise, "a rounding that differs must be seen"
        assert learned > 0.3, f"learned {learned}: too little moved to mean anything"


# --- values that lie on ties ----------------------------------------------------------------------------


def read_weights() -> list[tuple[dict[str, torch.Tensor], list[str]]]:
    """Return each stage's visible weights before the first step, and masters that reading changed."""
    found = []
    for stage in STAGES:
        engine = engine_of(stage, "split", "fp32")
        before = masters_and_states(engine)[0]
        with engine.gathered(write=True) as values:
            visible = {name: value.detach().clone() for name, value in values.items()}
        after = masters_and_states(engine)[0]
        found.append((visible, [name for name in before if not torch.equal(after[name], before[name])]))
        engine.destroy()
    return found


def test_every_rank_sees_the_same_weights_before_the_first_step_and_looking_changes_none() -> None:
    """Below stage 3 a rank also stores weights of other owners, with the same rounding."""
    found = [entry for rank in run_ranks(read_weights, 2) for entry in rank]
    for visible, changed in found:
        assert changed == []
        assert all(torch.equal(visible[name], value) for name, value in found[0][0].items())
