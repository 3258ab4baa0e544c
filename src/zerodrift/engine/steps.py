"""What a step is, whoever executes the plan: the parts that every engine shares.

Invariant: pure functions of a plan and of what an engine counts; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zerodrift.engine.scale import Scaler
from zerodrift.errors import NonFiniteError, UnsupportedError
from zerodrift.plan.table import Plan


def schedule(plan: Plan, optimizer: torch.optim.Optimizer | None, given: Any) -> Any:
    """The caller's schedule, made of the optimizer where it is a function; else that of the config."""
    from zerodrift.optim.schedules import make_schedule

    if given is not None or optimizer is None or plan.policy.schedule is None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    return make_schedule(plan.policy.schedule, optimizer)


def needs_optimizer() -> UnsupportedError:
    return UnsupportedError(
        "step",
        "must have an optimizer",
        got="none",
        do="Pass one to `initialize`, or write an `optimizer` block.",
    )


def closed() -> UnsupportedError:
    return UnsupportedError("engine", "must not be used after `destroy`", do="Make another one.")


def is_driven(what: str) -> UnsupportedError:
    return UnsupportedError(
        what,
        "must not be called on a pipeline, whose stages run together",
        do="Call `engine.train_batch` with all micro-batches of a step, or `engine.evaluate`.",
    )


def unfinished() -> UnsupportedError:
    return UnsupportedError(
        "accumulate",
        "must be given all micro-batches of a step, at its beginning",
        got="some that wait for their update",
        do="Call `step`, which updates with them, or `zero_grad`.",
    )


def unscaled(plan: Plan) -> UnsupportedError:
    """A backward that the loss scale was left out of."""
    return UnsupportedError(
        "backward",
        f"the loss must be scaled in mode {plan.policy.mode}",
        got="a plain `loss.backward()`",
        do="Call `engine.backward(loss)` or `engine.scale(loss).backward()`.",
    )


def taken_away(name: str) -> UnsupportedError:
    """A gradient that somebody believes to be forgotten."""
    return UnsupportedError(
        name,
        "its gradient must be cleared through the engine, which has collected it",
        got="`param.grad` set to None or zero between `backward` and `step`, as by `zero_grad`",
        do="Call `engine.zero_grad()`, or for one parameter `engine.parameter(name).gradient = zeros`.",
    )


def too_late(name: str) -> UnsupportedError:
    """A gradient of a micro-batch whose sum with others is under way."""
    return UnsupportedError(
        name,
        "its gradient must come once in a backward under `reduce.order: tree`",
        got="more of it after that of its unit was added to others",
        do="Call `checkpoint` with `use_reentrant=False`, or leave `order` out.",
    )


def too_many(name: str) -> UnsupportedError:
    """A backward after the last one of a step."""
    return UnsupportedError(
        "backward",
        "must not follow the last micro-batch of a step under `reduce.order: tree`, whose sum is complete",
        got=f"a gradient of {name}",
        do="Call `engine.step()`, or `engine.zero_grad()` to begin anew.",
    )


def beside(name: str) -> UnsupportedError:
    """A gradient that is no micro-batch's."""
    return UnsupportedError(
        name,
        "its gradient must come from backwards under `reduce.order: tree`, which adds up micro-batches alone",
        got="one that was put into `param.grad` after the last of them",
        do="Add it to the loss, or assign `engine.parameter(name).gradient` before `engine.step()`.",
    )


def not_yet(name: str) -> UnsupportedError:
    """A sum that is asked for in the middle."""
    return UnsupportedError(
        f"{name}.gradient",
        "must be read or assigned after the last micro-batch of a step under `reduce.order: tree`",
        got="a step that is not complete",
        do="Ask again before `engine.step()` of the last one.",
    )


def drawn() -> UnsupportedError:
    """Random numbers of a micro-batch that depend on those before it."""
    return UnsupportedError(
        "forward",
        "must draw random numbers by the number of its micro-batch under `reduce.order: tree`",
        got="some from a generator that goes on from one micro-batch to the next",
        do="Call `engine.seed_micro_batch(number)` before it, or leave `order` out.",
    )


def written(name: str) -> UnsupportedError:
    """What a model keeps of the micro-batches of its rank."""
    return UnsupportedError(
        name,
        "must not be written by a forward in training under `reduce.order: tree`: it is of one rank's data",
        got="a buffer with other values than before",
        do="Use a layer without running statistics, or leave `order` out.",
    )


def not_dealt(micro_batches: int, ranks: int) -> UnsupportedError:
    """A step of so many micro-batches that its sum is no tree over them."""
    return UnsupportedError(
        "step",
        "must have micro-batches that make whole nodes of the tree on every rank under `reduce.order: tree`",
        got=f"{micro_batches} on each of {ranks} ranks",
        do="Use as many as the config says, or leave `order` out.",
    )


def copied() -> UnsupportedError:
    """Of an engine that is one of several ranks."""
    return UnsupportedError(
        "engine",
        "must not be copied or pickled, for it is one of several ranks' and has their connections",
        do="Copy `engine.module` inside `engine.gathered()`; save with `zerodrift.Checkpoints`.",
    )


def nonfinite(norm: float, bad: Sequence[str]) -> NonFiniteError:
    """For a caller who wants an error, not a skipped step."""
    return NonFiniteError(
        "gradient",
        "must be finite",
        got=f"{norm}, first in {', '.join(bad) or 'no parameter alone'}",
        do="Nothing was updated. Look at the batch, lower the learning rate, or clip.",
    )


def line(step: int, norm: float | None, rates: Sequence[float], scaler: Scaler, skipped: int) -> str:
    """What `steps_per_print` shows."""
    shown = ", ".join(f"{rate:.6g}" for rate in rates) if rates else "-"
    text = f"step {step}  grad norm {norm:.6g}  lr {shown}"
    if scaler.active:
        text += f"  loss scale {scaler.scale:g}"
    return text + (f"  skipped {skipped}" if skipped else "")


def texts(plan: Plan) -> list[str]:
    """One line per row, for ranks that disagree about the plan."""
    lines = [f"mesh {plan.mesh}, mode {plan.policy.mode}, stage {plan.policy.sharding.stage}"]
    lines += [f"{decision.key} = {decision.value}" for decision in plan.policy.decisions]
    for row in plan.rows:
        shown = row.columns.cells() | row.columns.options()
        cells = " ".join(f"{column}={text}" for column, text in shown.items())
        lines.append(f"{row.name} {list(row.shape)} {cells} segment {row.segment} at {row.offset}")
    for boundary in plan.boundaries:
        lines.append(f"{boundary.path} computes in {boundary.dtype}, returns {boundary.output}")
    return lines
