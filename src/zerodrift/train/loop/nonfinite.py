"""What went wrong, found out while it can still be seen: a loss or gradient that is not finite, no memory.

After a skipped step the parameters are what they were, so the step can be looked at again. A loss that is
not finite names its micro-batch by itself. Where only a gradient is, the micro-batches are run once more,
one by one, until one leaves a gradient that is not finite.

Invariant: every rank comes to the same verdict, and looking changes neither parameters nor the place in
the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zerodrift.engine.progress import StepResult
from zerodrift.errors import ZerodriftError
from zerodrift.plan.cost import cost
from zerodrift.plan.table import Plan
from zerodrift.report.figures import size
from zerodrift.train.data.batches import MicroBatch
from zerodrift.train.loop.drivers import Driver


@dataclass(frozen=True, slots=True)
class BadMicroBatch:
    """A micro-batch of a rank."""

    rank: int
    micro_batch: int
    loss: float


@dataclass(frozen=True, slots=True)
class NonFiniteStep:
    """A step whose loss or gradient is not finite."""

    step: int
    parameters: tuple[str, ...]
    """The first whose gradient is not finite."""
    places: tuple[BadMicroBatch, ...]
    """Where it comes from; empty where no single micro-batch shows it."""

    def __str__(self) -> str:
        what = f"the gradient of {self.parameters[0]} is" if self.parameters else "the gradient norm is"
        if not self.parameters and any(not math.isfinite(place.loss) for place in self.places):
            what = "the loss is"
        text = f"step {self.step} skipped: {what} not finite"
        if self.places:
            first = self.places[0]
            text += f"; loss {first.loss:.6g} in micro-batch {first.micro_batch} of rank {first.rank}"
            more = len(self.places) - 1
            text += f" and {more} more" if more else ""
        return text


def examine(
    driver: Driver, step: int, batches: Sequence[MicroBatch], losses: Sequence[float], result: StepResult
) -> NonFiniteStep:
    """Where a skipped step comes from. Collective."""
    engine = driver.engine
    rank = engine.mesh.rank("data")
    mine = [BadMicroBatch(rank, n, loss) for n, loss in enumerate(losses) if not math.isfinite(loss)]
    everywhere = [
        place for places_of_rank in engine.comm.all_gather_object(mine, "data") for place in places_of_rank
    ]
    if not everywhere and result.bad:
        suspect = _first_bad(driver, batches, result.bad[0])
        if suspect is not None:
            mine = [BadMicroBatch(rank, suspect, losses[suspect])]
            everywhere = [
                place
                for places_of_rank in engine.comm.all_gather_object(mine, "data")
                for place in places_of_rank
            ]
    return NonFiniteStep(step, result.bad, tuple(everywhere))


def _first_bad(driver: Driver, batches: Sequence[MicroBatch], name: str) -> int | None:
    """Run the micro-batches again, each as a step of its own that does not end."""
    for number, batch in enumerate(batches):
        if not driver.has_finite_gradient(batch, name):
            return number
    return None


def save(folder: Path, trouble: NonFiniteStep, batches: Sequence[MicroBatch], rank: int) -> list[Path]:
    """Write this rank's part of the batches that are to blame, all of them where none is."""
    blamed = {place.micro_batch for place in trouble.places if place.rank == rank}
    wanted = blamed if trouble.places else set(range(len(batches)))
    written = []
    for number in sorted(wanted):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{trouble.step:06d}-micro-{number}-rank-{rank}.pt"
        batch = batches[number]
        content = {
            "tokens": batch.tokens.cpu(),
            "labels": batch.labels.cpu(),
            "blocks": batch.blocks.tolist(),
            "parameters": list(trouble.parameters),
        }
        with path.open("wb") as stream:  # torch's own stream does not say that a disk is full
            torch.save(content, stream)
        written.append(path)
    return written


# --- memory -------------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is at an end; on a CPU torch has no class for it."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "not enough memory" in text
    )


def out_of_memory(plan: Plan, micro: int, checkpointing: bool) -> ZerodriftError:
    """What the plan expected, and what can be turned, what helps most first."""
    bill = cost(plan)
    stage = plan.policy.sharding.stage
    knobs = []
    if not checkpointing:
        knobs.append("`model.activation_checkpointing: true`, which keeps no activations inside blocks")
    if micro > 1:
        knobs.append(
            f"`config.train_micro_batch_size_per_gpu` below {micro}, with as many more "
            f"`gradient_accumulation_steps`: activations grow with it"
        )
    knobs.append("a smaller `data.block`: activations grow with it")
    if stage < 3 and plan.mesh.world > 1:
        knobs.append(f"`config.zero_optimization.stage: 3` instead of {stage}")
    if bill.rest.state > bill.rest.storage and str(plan.policy.mode) != "fp32":
        knobs.append("`config.precision.state: bf16-stochastic`, half of the optimizer's moments")
    if bill.rest.accumulate:
        knobs.append("`config.sharding.accumulator: free`")
    if plan.mesh.world < 64:
        knobs.append("more ranks: what is sharded is divided by them")
    return ZerodriftError(
        "memory",
        f"must hold the plan's {size(bill.peak.total)} per rank ({size(bill.rest.total)} of it at rest) and "
        "the model's activations",
        got="less",
        do=f"What helps, most first: {'; '.join(knobs)}.",
    )
