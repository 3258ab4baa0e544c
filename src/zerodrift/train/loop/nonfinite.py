"""Find where a loss or gradient that is not finite comes from, and say what helps against a lack of memory.

A skipped step leaves the parameters as they were, so it can be examined. A loss that is not finite names its
micro-batch. If only a gradient is not, the micro-batches run once more, one by one, until one leaves such a
gradient. Every rank comes to the same result, and the place in the data stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zerodrift.engine.engine import Engine
from zerodrift.engine.progress import StepResult
from zerodrift.errors import ZerodriftError
from zerodrift.plan.cost import cost
from zerodrift.plan.table import Plan
from zerodrift.report.figures import size
from zerodrift.train.data.batches import MicroBatch
from zerodrift.train.loop.step import has_finite_gradient


@dataclass(frozen=True, slots=True)
class BadMicroBatch:
    """A micro-batch whose loss or gradient is not finite."""

    rank: int
    micro_batch: int
    loss: float


@dataclass(frozen=True, slots=True)
class NonFiniteStep:
    """A step whose loss or gradient is not finite."""

    step: int
    parameters: tuple[str, ...]
    """The first parameters whose gradient is not finite."""
    places: tuple[BadMicroBatch, ...]
    """Origins; empty if no single micro-batch shows it."""

    def __str__(self) -> str:
        what = f"the gradient of {self.parameters[0]} is" if self.parameters else "the gradient norm is"
        if not self.parameters and any(not math.isfinite(place.loss) for place in self.places):
            what = "the loss is"
        text = f"step {self.step} skipped: {what} not finite"
        if self.places:
            first, more = self.places[0], len(self.places) - 1
            text += f"; loss {first.loss:.6g} in micro-batch {first.micro_batch} of rank {first.rank}"
            text += f" and {more} more" if more else ""
        return text


def examine(
    engine: Engine, step: int, batches: Sequence[MicroBatch], losses: Sequence[float], result: StepResult
) -> NonFiniteStep:
    """Find where a skipped step comes from. Collective."""
    rank = engine.mesh.rank("data")

    def gathered(mine: list[BadMicroBatch]) -> list[BadMicroBatch]:
        return [place for places in engine.comm.all_gather_object(mine, "data") for place in places]

    bad = [BadMicroBatch(rank, n, loss) for n, loss in enumerate(losses) if not math.isfinite(loss)]
    everywhere = gathered(bad)
    if not everywhere and result.bad:
        for number, batch in enumerate(batches):
            if not has_finite_gradient(engine, batch, result.bad[0]):
                everywhere = gathered([BadMicroBatch(rank, number, losses[number])])
                break
    return NonFiniteStep(step, result.bad, tuple(everywhere))


def save(folder: Path, trouble: NonFiniteStep, batches: Sequence[MicroBatch], rank: int) -> list[Path]:
    """Write this rank's bad batches, or all of its batches if none is to blame."""
    bad = {place.micro_batch for place in trouble.places if place.rank == rank}
    written = []
    for number in sorted(bad if trouble.places else range(len(batches))):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{trouble.step:06d}-micro-{number}-rank-{rank}.pt"
        batch = batches[number]
        content = {
            "tokens": batch.tokens.cpu(),
            "labels": batch.labels.cpu(),
            "blocks": batch.blocks.tolist(),
            "parameters": list(trouble.parameters),
        }
        with path.open("wb") as stream:  # torch's own stream does not report a full disk
            torch.save(content, stream)
        written.append(path)
    return written


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of memory; torch has no class for it on a CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    texts = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def out_of_memory(plan: Plan, micro: int, checkpointing: bool) -> ZerodriftError:
    """Return an error with the memory of the plan, and the keys that help, the most helpful first."""
    bill, stage = cost(plan), plan.policy.sharding.stage
    is_large_state = bill.rest.state > bill.rest.storage and str(plan.policy.mode) != "fp32"
    recompute = "`model.activation_checkpointing: true`, which keeps no activations inside blocks"
    below = f"`config.train_micro_batch_size_per_gpu` below {micro}, with as many more"
    keys = (
        (not checkpointing, recompute),
        (micro > 1, f"{below} `gradient_accumulation_steps`: activations grow with it"),
        (True, "a smaller `data.block`: activations grow with it"),
        (stage < 3 and plan.mesh.world > 1, f"`config.zero_optimization.stage: 3` instead of {stage}"),
        (is_large_state, "`config.precision.state: bf16-stochastic`, half of the optimizer's moments"),
        (bool(bill.rest.accumulate), "`config.sharding.accumulator: free`"),
        (plan.mesh.world < 64, "more ranks: what is sharded is divided by them"),
    )
    planned = f"{size(bill.peak.total)} per rank ({size(bill.rest.total)} of it at rest)"
    must = f"must hold the plan's {planned} and the model's activations"
    todo = f"What helps, most first: {'; '.join(text for helps, text in keys if helps)}."
    return ZerodriftError("memory", must, got="less", do=todo)
