"""Findings about what a script does beside forward and step: losses, averages, rounded states, the wire.

They follow from the events of the first rank's record, and from the column `reduce`.

Invariant: pure. A figure was measured in the run, or is called an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from zerodrift.inspect.check.table import BITS, RunFinding, library
from zerodrift.inspect.trace import ModelRecord, ProcessRecord

_FAR = 0.25  # error of a logit at which a head in 16 bits is a finding, even under autocast


def loss_findings(processes: Sequence[ProcessRecord]) -> Iterator[RunFinding]:
    events = processes[0].events
    narrow = [event for event in events if event["kind"] == "loss-loss"]
    do = "Cast the logits up before the loss: `logits.float()`."
    for dtype, bits in BITS.items():
        alike = [event for event in narrow if event["dtype"] == dtype]
        if not alike:
            continue
        worst = max(alike, key=_greatest)
        names = ", ".join(dict.fromkeys(f"`{event['operation']}`" for event in alike))
        error = min(_greatest(worst) / 2**bits, 1.0)
        what = f"The loss is computed in {dtype}, by {names}: it keeps {bits} bits"
        if _greatest(worst):
            what += f", so a result of {_greatest(worst):.3g}, the greatest that was sampled, is up to "
            what += f"{error:.2g} off"
        yield RunFinding("loss-in-16-bits", "compute", (), f"{what}.", do, worst["line"], error)
    if not narrow:
        yield from _rounded_logits(processes, events)
    for event in events:
        dtype, line = event.get("dtype", ""), event["line"]
        most = 2 ** BITS.get(dtype, 4)
        if event["kind"] == "whole-numbers":
            what = (
                f"Whole numbers up to {event['greatest']:.0f} are cast to {dtype}, which holds those up to "
            )
            what += f"{most}: {event['share']:.0%} of the sampled ones change."
            do = "Keep positions, timesteps and counts whole or in fp32, and cast values computed from them."
            yield RunFinding("whole-numbers-rounded", "compute", (), what, do, line, 1 / most)
        if event["kind"] == "loss-statistic":
            what = f"A statistic is computed in {dtype}, by `{event['operation']}`: all that it scales or "
            what += f"shifts is up to 1/{most} off."
            do = "Compute norms, variances and running sums in fp32, and cast their result: `x.float()`."
            yield RunFinding("statistic-in-16-bits", "compute", (), what, do, line, 1 / most)


def _rounded_logits(processes: Sequence[ProcessRecord], events: Sequence[Any]) -> Iterator[RunFinding]:
    casts = [event for event in events if event["kind"] == "loss-rounded"]
    for event in casts[:1]:
        error = _greatest(event) / 2 ** BITS[event["dtype"]]
        what = f"Logits are computed in more bits and cast to {event['dtype']} before the loss, which casts "
        what += f"them up again: up to {error:.2g} is lost of each."
        do = "Remove that cast: pass the head's output to the loss."
        yield RunFinding("logits-rounded", "compute", (), what, do, event["line"], min(error, 1.0))
    products = [event for event in events if event["kind"] == "loss-product" and event["dtype"] in BITS]
    greatest = max((_greatest(event) for event in events if event["kind"] == "loss-widened"), default=0.0)
    for event in () if casts else products[:1]:
        names = _head(processes[0].models, event)
        error = greatest / 2 ** BITS[event["dtype"]]
        is_alone = bool(names) and event["is_alone"]
        if not is_alone and error < _FAR:
            continue
        why = "the rest of the model is wider" if is_alone else f"logits are as large as {greatest:.3g}"
        what = f"The head computes in {event['dtype']}, and {why}: each logit is up to {error:.2g} off "
        what += "before the loss casts it up, which adds no digit."
        do = "Compute the head in fp32: keep its weight in fp32, cast its input up, leave autocast off there."
        yield RunFinding("logits-rounded", "compute", names, what, do, event["line"], min(error, 1.0))


def _greatest(event: dict[str, Any]) -> float:
    return float(event.get("greatest") or 0.0)


def _head(models: Sequence[ModelRecord], event: dict[str, Any]) -> tuple[str, ...]:
    names = (p.name for model in models if model.trained for p in model.parameters)
    module = event["module"]
    return tuple(name for name in names if module and name.rpartition(".")[0] == module)


def kept_findings(processes: Sequence[ProcessRecord]) -> Iterator[RunFinding]:
    """Find averages that are kept in 16 bits, and weights and states that the script rounds between steps."""
    averages: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in processes[0].events:
        if event["kind"] == "average":
            averages.setdefault((event["dtype"], event["line"]), []).append(event)
        if event["kind"] == "rounded-between-steps":
            yield _rounded(event)
        if event["kind"] == "number-in-16-bits":
            key, dtype, most = event["key"], event["dtype"], 2 ** BITS[event["dtype"]]
            what = f"The optimizer keeps the number `{key}` in {dtype}: a counter ends at {most}, and a rate "
            what += "that changes by less than its last bit stays."
            do = f"Keep `{key}` in fp32, or as a number of Python's."
            yield RunFinding("state-too-narrow", "state", (), what, do, "", 1 / most)
    for (dtype, line), alike in averages.items():
        names = tuple(dict.fromkeys(name for event in alike for name in event["names"]))
        moves, still = (sum(event[key] for event in alike) for key in ("moves", "still"))
        weights = {parameter.name for model in processes[0].models for parameter in model.parameters}
        kept = "An average of these weights" if weights & {*names} else "A running average or sum"
        what = f"{kept} is kept in {dtype}, which rounds each update: one that is smaller than "
        what += f"1/{2 ** BITS[dtype]} of it is lost"
        if moves:
            what += f"; {still / moves:.0%} of the sampled elements that had to move did not"
        do = "Keep it in fp32 (`.float()` of a copy), and cast it where it is used."
        cost = 2.0 ** -BITS[dtype] if not any(names) else still / moves if moves else 0.5
        yield RunFinding("average-in-16-bits", "storage", names, f"{what}.", do, line, cost)


def _rounded(event: dict[str, Any]) -> RunFinding:
    dtype, key, names = event["dtype"], event["state"], tuple(event["names"])
    if not key:
        what = f"The script rounds weights to {dtype} after each step: what an optimizer adds in fp32 is "
        what += "lost where it is smaller than that resolves."
        do = "Leave that rounding out, and cast a copy where 16 bits are needed."
        return RunFinding("weights-rounded", "master", names, what, do, "", 0.5)
    what = f"The script rounds `{key}` to {dtype} between steps"
    cost = 2.0 ** -BITS.get(dtype, 4)
    if "sq" in key:
        what += ": a second moment shrinks by 1/1000 of itself a step, which is rounded away, so it can grow "
        what += "and never shrink"
        cost = 0.4
    do = "Keep states in fp32 where they rest, too: on the CPU, or in the dtype that the optimizer uses."
    return RunFinding("states-rounded", "state", names, f"{what}.", do, "", cost)


_WIRES = {
    "": "Reduce gradients in fp32: leave the hook or the cast out.",
    "ddp": "Reduce gradients in fp32: leave the communication hook out, and keep the weights in fp32.",
    "fully_shard": "Give `MixedPrecisionPolicy` `reduce_dtype=torch.float32`.",
    "fsdp": "Give `MixedPrecision` `reduce_dtype=torch.float32`.",
    "deepspeed": 'Set `"communication_data_type": "fp32"`, or, under `torch_autocast`, which ignores it, '
    '`"lower_precision_safe_modules": []`.',
}


def wire_error(dtype: str, gradients: int) -> float:
    """Estimate the relative error of a sum of gradients that is rounded after each addition.

    Rounding moves a number by 0.2 units of its last place, as a root of mean squares relative to its
    significand. A partial sum of independent gradients grows with the root of their number.
    """
    once = 0.2 * 2.0 ** (1 - BITS.get(dtype, 4))
    return once * math.sqrt((gradients + 1) / 2 + 1 - 1 / gradients)


def wire_findings(processes: Sequence[ProcessRecord], model: ModelRecord) -> Iterator[RunFinding]:
    """Find gradients that travel in 16 bits or fewer, graded by the number of ranks and micro-batches."""
    ranks, micro_batches = processes[0].world, processes[0].micro_batches
    wires: dict[str, list[str]] = {}
    for parameter in model.parameters if ranks > 1 else ():
        for dtype in parameter.dtypes("reduce"):
            if dtype in BITS or dtype.startswith(("float8", "int8", "uint8")):
                wires.setdefault(dtype, []).append(parameter.name)
    hook = next((event for event in processes[0].events if event["kind"] == "communication-hook"), None)
    name, line = (hook["name"], hook["line"]) if hook else ("", "")
    if "powerSGD" in name and "DistributedDataParallel" in model.wrappers:
        what = "PowerSGD sends a few columns for each matrix: what they do not hold of a gradient comes a "
        what += "step or more later, or never."
        do = "Send whole gradients where ranks are few: leave the hook out."
        sent = tuple(parameter.name for parameter in model.parameters if parameter.trained)
        yield RunFinding("wire-compressed", "reduce", sent, what, do, line, 0.1)
    for dtype, names in wires.items():
        first = model.parameter(names[0])
        is_summed = first is not None and first.has("accumulate", dtype)
        summed = ranks * (micro_batches if is_summed else 1)
        of = f"{ranks} ranks" + (f" and {micro_batches} micro-batches" if summed > ranks else "")
        error = wire_error(dtype, summed)
        what = f"Gradients are sent and summed in {dtype}{f' by `{name}`' if name else ''}: over {of} each "
        what += f"element of a sum is some {error:.1%} off (an estimate), over 64 ranks "
        what += f"{wire_error(dtype, 64 * summed // ranks):.1%}."
        kind = library(model)
        kind = "ddp" if not kind and "DistributedDataParallel" in model.wrappers else kind
        yield RunFinding("wire-in-16-bits", "reduce", tuple(names), what, _WIRES[kind], line, error)
