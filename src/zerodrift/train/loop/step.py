"""Run one optimizer step of a job, and explain losses that are not finite and a lack of memory.

A step depends on the job, its number and the state before it. Under `reduce.order: tree` it does not depend
on the number of ranks. All stages of a pipeline get the same micro-batches and the same losses.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerodrift.engine import Digest, Engine, StepResult, item_in
from zerodrift.errors import ZerodriftError
from zerodrift.plan import Plan, cost
from zerodrift.report import size
from zerodrift.train.data.sampling import Feed, MicroBatch


@dataclass(frozen=True, slots=True)
class StepRun:
    batches: list[MicroBatch]
    own: list[float]
    """Losses of this rank's micro-batches, not weighted."""
    losses: list[float]
    """Weighted loss of every micro-batch, by its number over all ranks."""
    result: StepResult
    asked: bool
    """Whether any rank was asked to stop."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


def run_step(
    engine: Engine,
    feed: Feed,
    seed: int,
    step: int,
    around: contextlib.AbstractContextManager[object],
    asked: Callable[[], bool] = lambda: False,
) -> StepRun:
    """Run step `step`, counted from 0, inside `around`; `seed` is that of the run. Collective."""
    mesh, layout = engine.mesh, feed.layout
    # Dropout and the like depend on the step and the rank, so a checkpoint keeps no random state.
    rank = mesh.rank("data") + mesh.size("data") * mesh.rank("pipeline")
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**64)
    batches = list(feed.step(step))
    with around:
        inputs = [batch.inputs() for batch in batches]
        result = engine.train_batch(inputs, [batch.weight for batch in batches])
    losses = torch.tensor(result.losses, device=mesh.device)  # not weighted, fp32
    # Each rank fills in its own entries of one small all-reduce.
    places = torch.zeros(layout.ranks * layout.accumulation + 1, dtype=torch.float64, device=losses.device)
    if not mesh.rank("pipeline"):  # all stages have the same losses
        weights = places.new_tensor([batch.weight for batch in batches])
        places[list(layout.numbers)] = losses.double() * weights
    places[-1] = float(asked())
    *every, stop = engine.comm.all_reduce_sum(places, "world").tolist()
    return StepRun(batches, losses.tolist(), every, result.step, bool(stop))


def losses_of(engine: Engine, batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Return losses in evaluation mode, without gradients; fp64."""
    engine.eval()
    losses = engine.losses([batch.inputs() for batch in batches])
    engine.train()
    return torch.tensor(losses, dtype=torch.float64, device=engine.mesh.device)


def has_finite_gradient(engine: Engine, batch: MicroBatch, name: str) -> bool:
    """Return True if a micro-batch alone gives a parameter a finite gradient. Leaves gradients zeroed."""
    policy = engine.plan.policy
    if policy.pipeline is None and not policy.tree:
        loss = item_in(engine(**batch.inputs()), "loss")
        engine.backward(loss * batch.weight)
    else:  # a pipeline runs as many micro-batches as a step has, and a tree needs all of them
        count = engine.accumulation
        engine.accumulate([batch.inputs()] * count, [batch.weight] * count)
    finite = bool(torch.isfinite(engine.parameter(name).gradient).all())
    engine.zero_grad()
    return finite


class StepDigests:
    """Takes digests of one step for `zerodrift replay`: of the gradients before the update, and of the state
    after it.

    Equal bits have equal digests, on any number of ranks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gradients: Digest | None = None
        engine.before_update = self._digest_gradients

    def _digest_gradients(self) -> None:
        self._gradients = self._engine.gradient_digest()

    def line(self, step: int, losses: list[float]) -> dict[str, Any]:
        """Return the metrics line of a step; `losses` by the numbers of micro-batches. Collective."""
        self._engine.before_update = None
        state = self._engine.digest()
        return {
            "step": step,
            "digest": str(state),
            "state": state.by_unit(),
            "gradients": {} if self._gradients is None else self._gradients.by_unit(),
            "losses": [loss.hex() for loss in losses],
        }


# --- what goes wrong ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BadMicroBatch:
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


def find_nonfinite(
    engine: Engine, step: int, batches: Sequence[MicroBatch], losses: Sequence[float], result: StepResult
) -> NonFiniteStep:
    """Find the micro-batches that made a step skip. Collective.

    They are those whose loss is not finite. If all losses are finite, the micro-batches run again, one by
    one, until one has a gradient that is not finite. A skipped step leaves the parameters as they were.
    """
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


def save_batches(folder: Path, trouble: NonFiniteStep, batches: Sequence[MicroBatch], rank: int) -> bool:
    """Write this rank's bad batches, or all of its batches if no origin is known. Return False for none."""
    bad = {place.micro_batch for place in trouble.places if place.rank == rank}
    numbers = sorted(bad if trouble.places else range(len(batches)))
    for number in numbers:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{trouble.step:06d}-micro-{number}-rank-{rank}.pt"
        batch = batches[number]
        content = {
            "tokens": batch.tokens.cpu(),
            "labels": batch.labels.cpu(),
            "blocks": batch.blocks.tolist(),
            "parameters": list(trouble.parameters),
        }
        with path.open("wb") as stream:  # torch, given a path, does not report a full disk
            torch.save(content, stream)
    return bool(numbers)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of memory; torch has no class for it on a CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    texts = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def out_of_memory(plan: Plan, micro: int, checkpointing: bool) -> ZerodriftError:
    """Return an error with the memory of the plan, and the keys that help, in order of effect."""
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
        (plan.mesh.world < 64, "more ranks, which divide the sharded columns"),
    )
    planned = f"{size(bill.peak.total)} per rank ({size(bill.rest.total)} of it at rest)"
    must = f"must hold the plan's {planned} and the model's activations"
    todo = f"To save memory, most first: {'; '.join(text for helps, text in keys if helps)}."
    return ZerodriftError("memory", must, got="less", do=todo)
