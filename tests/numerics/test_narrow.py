"""Narrow columns: parts of sums, and what is rounded away.

That a model computes with decoded masters: `test_plain_loops.py`; stages: `test_stages.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, finish, make, masters, require_alike, train
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift import ZerodriftError, cost, describe, export, load_weights, make_plan
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.comm import Collectives, Sum
from zerodrift.dtypes import ADMITTED, DType, parse_among
from zerodrift.engine.narrow_wire import start_narrow_sum
from zerodrift.engine.trained_segment import TrainedSegment, trained_of
from zerodrift.errors import ModelError
from zerodrift.kernels import narrow
from zerodrift.optim import keys_of_blocks

WIRES = ("fp8", "mxfp8", "int8", "int4", "e5m2-128", "int4-64-bf16")


def format_of(word: str) -> DType:
    return parse_among(word, ADMITTED["reduce.wire"])


@pytest.mark.parametrize("wire", WIRES)
@on_ranks(3)
def test_every_part_is_encoded_once_and_added_in_fp32(wire: str) -> None:
    comm, numel, dtype = _comm(), 512, format_of(wire)
    rank, world = comm.mesh.rank("shard"), comm.mesh.size("shard")
    parts = [torch.randn(world * numel, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    out = torch.full((numel,), 0.5)
    packed = narrow.encode_runs(dtype, parts[rank], world)
    how = Sum(torch.float32, add=True)
    start_narrow_sum(comm, out, packed, dtype, "shard", how, "a test").wait()
    total = torch.zeros(numel)
    for number, part in enumerate(parts):
        arrived = narrow.round_trip(dtype, part[rank * numel : (rank + 1) * numel])
        total = arrived if number == 0 else total + arrived
    assert torch.equal(out, 0.5 + total)


LOSSY = {"reduce": {"wire": "int4", "feedback": True}}
DRAWN = {"reduce": {"wire": "int4", "feedback": True, "rounding": "stochastic"}}
FEEDBACK = {"precision": DRAWN}


def sent_by(segment: TrainedSegment, flat: torch.Tensor, drawn: bool, step: int, rank: int) -> torch.Tensor:
    """Return a rank's gradient after its transfer, with the draws computed again."""
    keys = keys_of_blocks(segment.rows, 0, segment.spec.padded)
    draws = narrow.Draws(keys, (step * 2**20) * 2**24 + rank) if drawn else None
    out = torch.empty_like(flat)
    narrow.decode_runs(DType.INT4_128, narrow.encode_runs(DType.INT4_128, flat, 1, draws), out, 1)
    return out


@pytest.mark.parametrize("precision", [LOSSY, DRAWN], ids=["nearest", "stochastic"])
@on_ranks(2)
def test_what_the_wire_rounds_away_is_added_to_the_next_gradient(precision: dict[str, Any]) -> None:
    """The reference is a loop that keeps the encoding error of each rank's gradients itself."""
    wire, lost = DType.INT4_128, {}
    rests = ({}, {"precision": precision})
    plain, kept = (make(config(2, "fp32", **rest), GPT(layers=1)) for rest in rests)
    rank, world = plain.mesh.rank("shard"), plain.mesh.size("shard")
    for step in range(3):
        with torch.no_grad():
            alone = GPT(layers=1)
            for name, master in masters(kept).items():
                alone.get_parameter(name).copy_(master)
        alone(batch(step, rank)).backward()
        kept.backward(kept(batch(step, rank)))
        for segment in kept.executor.segments:
            row = kept.plan.rows[segment.spec.rows[0]]
            if row.columns.update.reduce.wire is not wire:
                continue
            flat = torch.zeros(segment.spec.padded)
            for row in segment.rows:
                grad = alone.get_parameter(row.name).grad
                flat[row.offset : row.offset + row.numel] = grad.reshape(-1)
            flat += lost.get(segment.number, 0.0)
            sent = sent_by(segment, flat, precision == DRAWN, step, rank)
            lost[segment.number] = flat - sent
            assert torch.equal(segment.wire.feedback, lost[segment.number])
            parts = kept.comm.all_gather_object(sent, "shard")
            total = parts[0] + parts[1]
            count = len(total) // world
            assert torch.equal(segment.reduced, total[rank * count : (rank + 1) * count])
        kept.step()
    assert lost and cost(kept.plan).rest.feedback == 4 * sum(flat.numel() for flat in lost.values())


def saved_with_feedback(folder: str, stage: int, load: bool) -> Any:
    engine = make(config(stage, "fp32", **FEEDBACK), GPT(layers=1))
    checkpoints = Checkpoints(engine, folder, quiet=True)
    if load:
        checkpoints.load()
    else:
        train(engine, 2)
        checkpoints.save()
    narrow_ones = [segment for segment in trained_of(engine.executor.segments) if segment.wire is not None]
    held = {segment.number: segment.wire.feedback.clone() for segment in narrow_ones}
    rank = engine.mesh.rank("data")
    for step in range(2, 4):
        engine.backward(engine(batch(step, rank)))
        engine.step()
    return held, finish(engine)


@pytest.mark.second
def test_what_was_rounded_away_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    first = run_ranks(saved_with_feedback, 2, str(tmp_path), 2, False)
    for stage in (0, 3):
        again = run_ranks(saved_with_feedback, 2, str(tmp_path), stage, True)
        for (_, here), (_, there) in zip(first, again, strict=True):
            require_alike(here, there)
    four = run_ranks(saved_with_feedback, 4, str(tmp_path), 2, True)
    for number, values in four[0][0].items():
        total = first[0][0][number] + first[1][0][number]
        assert torch.equal(values[: len(total)], total[: len(values)])
    assert all(not values.any() for held, _ in four[1:] for values in held.values())


@on_ranks(2)
def test_other_weights_begin_without_what_was_rounded_away(tmp_path: Path) -> None:
    engine = make(config(2, "fp32", **FEEDBACK), GPT(layers=1))
    checkpoints = Checkpoints(engine, str(tmp_path / "checkpoints"), quiet=True)
    export(engine, tmp_path / "export")
    wires = [segment.wire for segment in trained_of(engine.executor.segments) if segment.wire is not None]
    for load in (
        lambda: checkpoints.load(parts="weights"),
        lambda: load_weights(engine, tmp_path / "export", quiet=True),
    ):
        train(engine, 1)
        assert all(wire.feedback.any() for wire in wires)
        checkpoints.save()
        load()
        assert wires and all(wire.feedback is None for wire in wires)


@pytest.mark.parametrize(
    ("stage", "precision", "rest", "told"),
    [
        (2, {"mode": "fp16", **LOSSY}, {}, "loss scale"),
        (2, {**LOSSY, "accumulate": "bf16"}, {}, "have an fp32 `accumulate`"),
        (2, LOSSY, {"sharding": {"replicate": 2}}, "replicas"),
        (2, {"reduce": {"wire": "int8", "order": "tree"}}, {}, "order"),
        (2, {"reduce": {"wire": "int8", "sum": "bf16"}}, {}, "`reduce.sum` must be fp32"),
        (2, {"reduce": {"rounding": "stochastic"}}, {}, "`reduce.rounding` must have a narrow wire"),
        (3, {"gather": "fp8", "storage": "bf16"}, {}, "`storage` must be fp32"),
        (2, {"gather": "fp8", "master": "split"}, {}, "`master` must be fp32"),
        (3, {"gather": "fp8"}, {"backend": "fsdp2"}, "`gather` must not be narrow on backend fsdp2"),
        (2, {"reduce": "int8"}, {"backend": "fsdp2"}, "`reduce.wire` must not be narrow on backend fsdp2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    stage: int, precision: dict[str, Any], rest: dict[str, Any], told: str
) -> None:
    written = {**config(stage, "bf16", precision=precision), **rest}
    with pytest.raises(ZerodriftError, match=re.escape(told)):
        make_plan(written, describe(GPT()), world_size=4)


def _comm() -> Collectives:
    return make(config(1, "fp32"), GPT()).comm


@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_seen_through_a_narrow_wire() -> None:
    written = config(2, "fp16", precision={"reduce": {"wire": "int4"}})
    engine = make(written, GPT())
    loss = engine(torch.arange(16).view(2, 8)) * (float("inf") if engine.mesh.rank("shard") else 1.0)
    engine.backward(loss)
    engine.step()
    assert engine.skipped_steps == 1


@on_ranks(2)
def test_writes_go_through_the_masters_or_are_refused_by_name() -> None:
    engine = make(config(2, "bf16", precision={"gather": "fp8"}), GPT())
    weight = engine.module.embed.weight
    with engine.gathered(write=True) as values:
        values["embed.weight"].fill_(0.3)
    master = engine.parameter("embed.weight").master
    assert torch.equal(master, torch.full_like(master, 0.3).bfloat16().float())
    assert torch.equal(weight, narrow.round_trip(DType.FP8_128, master, torch.bfloat16))
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(ModelError, match=r"`embed\.weight`.*rounded to fp8-128"):
        engine(torch.arange(16).view(2, 8))
