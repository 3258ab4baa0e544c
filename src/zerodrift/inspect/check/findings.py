"""Findings about a run: a sentence on what costs precision, and one on how to fix it.

Every finding follows from sightings and facts of parameters, never from a config. One finding lists all of
its parameters.

Invariant: pure. A cell that was not seen is no finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from zerodrift.inspect.check.script_findings import (
    kept_findings,
    loss_findings,
    wire_error,
    wire_findings,
)
from zerodrift.inspect.check.table import BITS, RunFinding, advice, finding, library, same_model
from zerodrift.inspect.trace import COLUMNS, Column, ModelRecord, ParameterRecord, ProcessRecord, narrowest


def run_findings(processes: Sequence[ProcessRecord]) -> list[RunFinding]:
    """Return all findings, grouped by their remedy, the most expensive first."""
    first, found = processes[0], [*loss_findings(processes), *kept_findings(processes)]
    found += _rounding_hooks(first)
    for model in first.models:
        if model.trained:
            for rule in _RULES:
                found += rule(processes, model)
        elif not any(other.trained for other in first.models):
            found += _never_updated(processes, model)
    is_deepspeed = any(library(model) == "deepspeed" for model in first.models)
    of_clips = "Gradients are clipped, or their norm is taken,", _CLIPS["deepspeed" if is_deepspeed else ""]
    scaled = {"clipped_scaled": of_clips, "stepped_scaled": ("The optimizer is given gradients", _STEPS)}
    for event in (event for event in first.events if event["kind"] in scaled):
        does, do = scaled[event["kind"]]
        what = f"{does} while the loss scale is in them, which makes them thousands of times too large."
        found.append(RunFinding("norm-of-scaled-gradients", "grad", (), what, do, event["line"]))
    worst: dict[str, float] = {}
    for one in found:
        worst[one.do] = max(worst.get(one.do, 0.0), one.cost)
    places = {do: place for place, do in enumerate(worst)}
    return sorted(found, key=lambda one: (-worst[one.do], places[one.do], -one.cost))


_MASTERS = {
    "": "Keep the weights in fp32 and compute under `torch.autocast`, or update fp32 copies of them.",
    "fully_shard": "Load the weights in fp32, and give `fully_shard` a `MixedPrecisionPolicy`.",
    "fsdp": "Load the weights in fp32, and give FSDP a `MixedPrecision`.",
    "deepspeed": "Turn `bf16_master_weights_and_grads`, `bf16_optimizer_states` and similar keys off.",
}

_SUMS = {
    "": "Keep gradients in fp32: fp32 weights under autocast do.",
    "fully_shard": "Give `MixedPrecisionPolicy` `reduce_dtype=torch.float32`, or reduce every micro-batch.",
    "fsdp": "Reduce every micro-batch, without `no_sync`: FSDP adds them in the dtype of its flat "
    "parameters, whatever `reduce_dtype` is.",
    "deepspeed": "Set `data_types.grad_accum_dtype` to fp32 with ZeRO stage 3 or, in bf16, with stage 1: "
    "other stages ignore it before DeepSpeed 0.19.8.",
}

_ROUTERS = {
    "": "Compute the router's logits in fp32: cast its weight and its input up, with autocast off.",
    "fully_shard": "Give the router a unit of its own in fp32, since a cast adds no digit to gathered 16 "
    "bits: `fully_shard(router, mp_policy=MixedPrecisionPolicy(torch.float32))`.",
    "fsdp": "Give the router a unit of its own in fp32, since a cast adds no digit to gathered 16 bits: a "
    "`CustomPolicy` with `MixedPrecision(torch.float32, cast_forward_inputs=True)` for it.",
    "deepspeed": "Keep the weights in fp32, since `bf16` and `fp16` cast every one: use `torch_autocast` in "
    "their place, and turn autocast off where the router's logits are computed.",
}

_CLIPS = {
    "": "Call `scaler.unscale_(optimizer)` before clipping.",
    "deepspeed": "Use bfloat16 in `torch_autocast`, which needs no loss scale, or `fp16` in its place.",
}

_STEPS = "Take the step by `scaler.step(optimizer)`, which takes the loss scale out."

_AVERAGES = {
    "": "Average the gradients of all ranks before the optimizer's step. DistributedDataParallel does, if "
    "it is called in place of its module, and the last micro-batch is outside of `no_sync`.",
    "deepspeed": "Remove `data_types.grad_accum_dtype`, or use ZeRO stage 3: before DeepSpeed 0.19.8, "
    "stage 1 loses the average where it is not the model's dtype.",
}


_WIDTH = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def _names(parameters: Iterable[ParameterRecord]) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in parameters)


def _narrow(processes: Sequence[ProcessRecord], model: ModelRecord) -> Iterator[RunFinding]:
    """Find weights, computation, states, sums, routers and buffers in 16 bits."""
    parameters, micro_batches, steps = model.parameters, processes[0].micro_batches, processes[0].steps
    masters = advice(_MASTERS, model)
    for dtype, bits in BITS.items():
        resting = [p for p in parameters if p.dtypes("storage")[-1:] == (dtype,)]
        bare = [p for p in resting if p.dtypes("master") in (("same",), (dtype,))]
        bare = [parameter for parameter in bare if not parameter.facts.get("drawn")]
        norms = [parameter for parameter in bare if _is_norm(parameter)]
        wide = [p for p in bare if min((_WIDTH.get(d, 0) for d in p.dtypes("compute")), default=0) > 16]
        sums = [p for p in parameters if micro_batches > 1 and p.facts.get("gradients", 0) > steps]
        still = sum(parameter.facts.get("changed") is False for parameter in norms)
        lost = f"an update smaller than 1/{2**bits} of a weight is lost"
        others = [parameter for parameter in bare if not _is_norm(parameter)]
        share = _share_lost(others)
        who = "script" if any(p.facts.get("by_hand") for p in others) else "optimizer"
        what = f"The {who} updates {dtype} weights in place: {lost}"
        what += "." if share is None else f"; {share:.0%} of the sampled elements did not change in a step."
        cost = 0.5 if share is None else max(share, 1 / 2**bits)
        yield from finding("no-master", "master", _names(others), what, masters, cost)
        what = f"Gains of norms are {dtype} and updated in place: near 1.0, {lost}"
        what += f"; {still} of {len(norms)} did not change at all." if still else "."
        cost = _share_lost(norms) or 0.5
        yield from finding("norm-in-16-bits", "master", _names(norms), what, masters, cost)
        cast = wide[0].dtypes("compute")[0] if wide else ""
        what = f"Weights are stored in {dtype} and cast to {cast} to compute: every update rounds them "
        what += f"to {bits} bits before, and a cast adds none."
        yield from finding("upcast-without-effect", "compute", _names(wide), what, masters, 1 / 2**bits)
        states = _names(p for p in parameters if p.has("state", dtype))
        what = f"Optimizer states are {dtype}: a second moment shrinks by 1/1000 of itself a step, which "
        what += f"{dtype} rounds away, so it can grow and never shrink."
        yield from finding("state-too-narrow", "state", states, what, masters, 0.4)
        rounded = _names(p for p in sums if p.has("accumulate", dtype))
        what = f"Gradients of {micro_batches} micro-batches are added in {dtype}: each addition keeps {bits} "
        what += "bits."
        do = masters if set(rounded) & set(_names(bare)) and not library(model) else advice(_SUMS, model)
        cost = wire_error(dtype, micro_batches)
        yield from finding("rounded-before-accumulation", "accumulate", rounded, what, do, cost)
        found = [p for p in parameters if p.has("compute", dtype) and _is_router(p, model)]
        what = f"Routers compute in {dtype}: logits that differ by less than it resolves send tokens to "
        what += "other experts."
        is_rounded = any(p.has("gather", dtype) or p.has("storage", dtype) for p in found)
        do = advice(_ROUTERS, model) if is_rounded else _ROUTERS[""]
        yield from finding("router-in-16-bits", "compute", _names(found), what, do, 1 / 2**bits)
        averages = {name for e in processes[0].events if e["kind"] == "average" for name in e["names"]}
        buffers = [name for name, held in model.buffers.items() if held == dtype and name not in averages]
        what = f"Buffers are {dtype}: constants such as frequencies of positions or running statistics were "
        what += "rounded with the weights."
        do = "Cast only parameters, not the module, or restore the buffers after the cast."
        yield from finding("buffer-rounded", None, buffers, what, do, 1 / 2**bits)


def _share_lost(parameters: Sequence[ParameterRecord]) -> float | None:
    """Return the share of sampled elements that updates did not change; None if none was sampled."""
    known = [(p.facts["lost"], p.numel) for p in parameters if "lost" in p.facts]
    return sum(share * numel for share, numel in known) / sum(n for _, n in known) if known else None


def _is_norm(parameter: ParameterRecord) -> bool:
    return "norm" in parameter.kind.rpartition(".")[2].lower() and len(parameter.shape) <= 1


_ROUTER = re.compile(r"router|(^|\.)(gate|gating|wg)(\.|$)")
_EXPERTS = re.compile(r"(^|\.)experts?(\.|$)|moe", re.IGNORECASE)


def _is_router(parameter: ParameterRecord, model: ModelRecord) -> bool:
    """Return True for the name of a router; a gate is one only beside experts."""
    if not _ROUTER.search(parameter.name):
        return False
    around = _ROUTER.split(parameter.name)[0]
    beside = (other.name for other in model.parameters if other.name.startswith(around))
    return "router" in parameter.name or any(map(_EXPERTS.search, beside))


def _never_updated(processes: Sequence[ProcessRecord], model: ModelRecord) -> Iterator[RunFinding]:
    steps = processes[0].steps
    trained = [p for p in model.parameters if p.trained and p.facts.get("gradients", 0)]
    left_out = _names(p for p in trained if p.facts.get("optimized") is False)
    what = "Gradients arrive, and no optimizer that took a step has the parameter."
    do = "Build the optimizer from the parameters of the model that is trained, after it was wrapped, cast "
    if not any(event["kind"] == "skipped-by-a-scaler" for event in processes[0].events):
        yield from finding("never-updated", "master", left_out, what, do + "or moved.")
    events = (e for e in processes[0].events if e["kind"] == "rounded-between-steps" and not e["state"])
    rounded = {name for event in events for name in event["names"]}
    used = {p.name: [abs(value) for value in p.facts.get("used") or () if value] for p in trained}
    noise = 2.0**-20 * max((max(values) for values in used.values() if values), default=0.0)
    still = _names(
        p
        for p in (trained if steps > 1 else ())
        if p.facts.get("optimized")
        and p.facts.get("changed") is False
        and "follows" not in p.facts
        and p.name not in rounded
        and any(value > noise for value in used[p.name])  # else its gradient is zero, but for rounding
        and not set(p.dtypes("storage")[-1:]) & BITS.keys()  # `_narrow` says what they lost
    )
    what = f"Not one bit changed in {steps} steps, though gradients arrived that are not zero."
    do = "Look at the learning rate of its group, at whether updates are smaller than its dtype resolves, "
    do += "and at whether the optimizer holds the tensors that the model computes with."
    yield from finding("never-updated", "storage", still, what, do)
    apart = _names(p for p in trained if p.facts.get("follows") is False)
    what = "The optimizer updates copies, and the parameter has not their values after the step."
    do = "Copy each master into its parameter after every step: `parameter.copy_(master)`, without gradients."
    yield from finding("never-updated", "master", apart, what, do)


def _untied(processes: Sequence[ProcessRecord], model: ModelRecord) -> Iterator[RunFinding]:
    """Find an embedding and a parameter that began as its copy.

    That is a fault if the model's config ties the two, a question without a config, and meant if it unties.
    """
    pairs: dict[tuple[int, tuple[int, ...]], list[ParameterRecord]] = {}
    for parameter in () if model.ties is False else model.parameters:
        began = parameter.facts.get("began")
        if began is not None and parameter.trained and len(parameter.shape) > 1:
            pairs.setdefault((began, parameter.shape), []).append(parameter)
    for alike in pairs.values():
        # Other copies may be by intent, such as experts that began as one.
        if 0 < sum(parameter.kind.endswith("Embedding") for parameter in alike) < len(alike):
            apart = "began with the same values in memory of their own, and train apart."
            tie = "them again once the model is wrapped, cast or loaded (transformers: `model.tie_weights()`)"
            what, do = f"The model's config ties them; they {apart}", f"Tie {tie}."
            if not model.ties:
                what, do = f"They {apart}", f"Are they meant to be one parameter? Then tie {tie}."
                do += " A copy by intent is as it should be."
            yield from finding("untied", "storage", _names(alike), what, do)


def _narrow_export(processes: Sequence[ProcessRecord], model: ModelRecord) -> Iterator[RunFinding]:
    def width(parameter: ParameterRecord, column: Column) -> int:
        return max((_WIDTH.get(dtype, 32) for dtype in parameter.dtypes(column)), default=0)

    plain = [p for p in model.parameters if p.trained or set(p.dtypes("storage")) <= _WIDTH.keys()]
    narrow = [p for p in plain if p.dtypes("export") and width(p, "export") < width(p, "storage")]
    if narrow:
        export, storage = narrow[0].cells["export"][0], narrow[0].dtypes("storage")[0]
        what = f"Files have {export.dtype}, and the trained weights are {storage}: saving rounds them."
        do = "Write weights in the dtype of training, and round them where they are served."
        yield RunFinding("narrow-export", "export", _names(narrow), what, do, export.line, 0.004)


def _not_averaged(processes: Sequence[ProcessRecord], model: ModelRecord) -> Iterator[RunFinding]:
    given: dict[str, list[str]] = {}
    for parameter in model.parameters if len(processes) > 1 else ():
        given.setdefault(_kind_of_gradient(parameter.name, model, processes), []).append(parameter.name)
    if "own" in given:
        kept = _own_of_ranks(processes, model)
        given["own"] = [name for name in given["own"] if name not in kept]
    ranks, micro_batches = len(processes), processes[0].micro_batches
    what = "The optimizer gets the gradient of its own rank, not the average: each rank trains "
    what += "on its part of the batch."
    yield from finding("not-averaged", "reduce", given.get("own", ()), what, advice(_AVERAGES, model))
    what = f"The optimizer gets the sum of the gradients of {ranks} ranks, not their mean: "
    what += f"steps are {ranks} times as long, or clipped as often."
    do = "Divide by the number of ranks, unless the loss was divided by it."
    yield from finding("not-averaged", "reduce", given.get("sum", ()), what, do)
    lost = given.get("neither", ())
    if library(model) == "deepspeed" and micro_batches > 1 and 2 * len(lost) > len(model.parameters):
        what = f"The optimizer does not get the sum of the gradients of {micro_batches} micro-batches: "
        do = "Set `gradient_accumulation_steps` to the micro-batches of a step and call `engine.step()` "
        do += "after each, or mark the last with `engine.set_gradient_accumulation_boundary`."
        yield from finding("not-accumulated", "accumulate", lost, what + "some were dropped.", do)


def _own_of_ranks(processes: Sequence[ProcessRecord], model: ModelRecord) -> set[str]:
    """Return the parameters that may differ between ranks.

    The script averages their values over ranks, or each rank has its own module, such as an expert or a stage
    of a pipeline: it began with other values, beside parameters whose gradients are averaged, or on ranks
    that send values to each other.
    """
    kept, apart = set[str](), set[str]()
    for parameter in model.parameters:
        alike = _on_ranks(parameter.name, model, processes)
        if any(each.facts.get("averaged") for each in alike):
            kept.add(parameter.name)
        if len({each.facts.get("began") for each in alike}) > 1:
            apart.add(parameter.name.rpartition(".")[0])
    if apart and any(event["kind"] == "sent-to-a-rank" for event in processes[0].events):
        kept.update(_names(model.parameters))
    elif apart:
        names = [p.name for p in model.parameters if p.name.rpartition(".")[0] in apart]
        others = (p.name for p in model.parameters if p.name.rpartition(".")[0] not in apart)
        if any(_kind_of_gradient(name, model, processes) in ("mean", "sum") for name in others):
            kept.update(n for n in names if _kind_of_gradient(n, model, processes) in ("own", ""))
    return kept


def _rounding(before: Sequence[float], after: Sequence[float | None]) -> str:
    """Return the dtype of 16 bits that sampled gradients were rounded to; empty for none.

    A sign, or a bound that a gradient is clipped to, is no rounding of it.
    """
    pairs = [(value, own) for value, own in zip(after, before, strict=False) if value and own]
    dtype = narrowest([value for value, _ in pairs], BITS)
    is_rounding = len(pairs) >= _LEAST and _spread([v / own for v, own in pairs], median) < _ALIKE
    return dtype if is_rounding and narrowest([own for _, own in pairs], BITS) != dtype else ""


def _rounding_hooks(process: ProcessRecord) -> Iterator[RunFinding]:
    """Find full backward hooks of modules that round the gradients they pass on."""
    for event in process.events:
        dtype = _rounding(event["given"], event["returned"]) if event["kind"] == "backward-hook" else ""
        if dtype:
            what = f"A backward hook of `{event['module'] or 'the model'}` rounds gradients to {dtype}: all "
            what += f"gradients that are computed from them keep {BITS[dtype]} bits."
            do = "Return gradients from the hook in the dtype that they came in."
            cost = wire_error(dtype, 1)
            yield RunFinding("gradients-rounded", "grad", (), what, do, event["line"], cost)


def _rounded_gradients(processes: Sequence[ProcessRecord], model: ModelRecord) -> Iterator[RunFinding]:
    """Find wide gradients whose elements, as an optimizer got them, fit 16 bits."""
    found: dict[str, list[str]] = {}
    for parameter in model.parameters:
        columns: tuple[Column, ...] = ("grad", "accumulate", "reduce")
        wide = all(set(parameter.dtypes(column)) <= {"float32", "float64"} for column in columns)
        alike = _with_gradients(parameter.name, model, processes) if wide else []
        sums = [sum(each) for each in zip(*(p.facts["own"] for p in alike), strict=True)]
        for used in (p.facts["used"] for p in alike):
            if dtype := _rounding(sums, used):
                found.setdefault(dtype, []).append(parameter.name)
    for dtype, names in found.items():
        what = f"Gradients arrive in fp32, and what the optimizer is given has the {BITS[dtype]} bits of "
        what += f"{dtype}: the script rounds gradients, or adds them, in {dtype}."
        do = "Keep gradients and their sum in fp32 until the optimizer's step."
        cost = wire_error(dtype, processes[0].micro_batches)
        yield from finding("gradients-rounded", "accumulate", dict.fromkeys(names), what, do, cost)


_SMALLEST = 2.0**-14  # the smallest normal number of fp16


def _not_scaled(processes: Sequence[ProcessRecord], model: ModelRecord) -> Iterator[RunFinding]:
    """Find backwards in fp16 from losses that nothing scales."""
    seen = {event["kind"] for event in processes[0].events}
    if "loss-product" not in seen or "loss-scaled" in seen or library(model) == "deepspeed":
        return
    half = [p for p in model.parameters if p.has("compute", "float16")]
    sampled = [abs(value) for p in half for value in p.facts.get("own", ()) if value]
    share = sum(value < _SMALLEST for value in sampled) / max(len(sampled), 1)
    what = "The model computes in float16, and the loss is not scaled: numbers below 6e-5 in the "
    what += f"backward lose bits or become zero; {share:.0%} of the sampled gradients are that small."
    do = "Scale the loss with `torch.amp.GradScaler`, or compute in bfloat16."
    yield from finding("loss-not-scaled", "grad", _names(half), what, do, max(share, 2.0**-11))


def _with_gradients(
    name: str, model: ModelRecord, processes: Sequence[ProcessRecord]
) -> list[ParameterRecord]:
    """Return a parameter on every rank, if each has sampled its gradients; else nothing."""
    known = [each for each in _on_ranks(name, model, processes) if each.facts.get("own")]
    return known if len(known) == len(processes) else []


def _on_ranks(name: str, model: ModelRecord, processes: Sequence[ProcessRecord]) -> list[ParameterRecord]:
    alike = [same_model(process, model, processes[0]) for process in processes]
    found = [p for one in alike if one is not None and (p := one.parameter(name)) is not None]
    return [p for p in found if p.shape == found[0].shape]  # of another shape, it is another rank's own


def _kind_of_gradient(name: str, model: ModelRecord, processes: Sequence[ProcessRecord]) -> str:
    """Return which gradient the optimizers got, by sampled elements.

    It is the rank's `own`, the `mean` or the `sum` over ranks, `neither`, or empty if unclear.
    """
    parameters = _with_gradients(name, model, processes)
    owns = [p.facts["own"] for p in parameters]
    if not owns:
        return ""
    by_own, by_mean = [], []
    for rank, parameter in enumerate(parameters):
        for place, value in enumerate(parameter.facts["used"]):
            own, mean = owns[rank][place], sum(each[place] for each in owns) / len(owns)
            if value and own and mean:
                by_own.append(value / own)
                by_mean.append(value / mean)
    if len(by_own) < _LEAST:
        return ""
    if _spread(by_mean, max) < _ALIKE:
        return "sum" if abs(median(by_mean) / len(processes) - 1) < _ALIKE else "mean"
    if _spread(by_mean, max) > 5 * _ALIKE and _spread(by_own, max) < _ALIKE:
        return "own"
    return "neither" if min(_spread(by_mean, median), _spread(by_own, median)) > _UNLIKE else ""


_LEAST = 3  # elements without which the kind is unclear
_ALIKE = 0.02  # relative spread that rounding explains
_UNLIKE = 0.2  # relative spread of half of the elements that rounding does not explain


def _spread(ratios: Sequence[float], of: Callable[[Iterable[float]], float]) -> float:
    """Return the greatest or the usual distance from the median, relative to it."""
    middle = median(ratios)
    return of(abs(ratio - middle) for ratio in ratios) / abs(middle) if middle else float("inf")


def _ranks_differ(processes: Sequence[ProcessRecord], model: ModelRecord) -> Iterator[RunFinding]:
    rank = processes[0].rank
    kept = _own_of_ranks(processes, model) if len(processes) > 1 else set()
    for other in processes[1:]:
        same = same_model(other, model, processes[0])
        if same is None:
            continue
        pairs = [(p, q) for p in model.parameters if (q := same.parameter(p.name)) and q.shape == p.shape]
        for column in COLUMNS:
            if library(model) == "deepspeed" and column == "accumulate":
                continue  # each rank reduces the part that it updates into another tensor
            cells = [(p.name, p.dtypes(column), q.dtypes(column)) for p, q in pairs]
            unlike = {name: (a, b) for name, a, b in cells if a and b and set(a) != set(b)}
            do = "Build the same model and optimizer on every rank."
            for a, b in [*unlike.values()][:1]:
                what = f"Rank {rank} has {', '.join(a)}, rank {other.rank} {', '.join(b)}."
                yield from finding("ranks-differ", column, unlike, what, do)
        apart = []
        for p, q in pairs:
            digests = p.facts.get("digest"), q.facts.get("digest")
            is_own = p.facts.get("began") == q.facts.get("began")  # and is then named by `_not_averaged`
            is_own = is_own and _kind_of_gradient(p.name, model, processes) == "own"
            if p.facts.get("optimized") and None not in digests and digests[0] != digests[1]:
                apart += [p.name] if p.name not in kept and not is_own else []
        if apart:
            what = f"Values on rank {rank} and rank {other.rank} differ, and each has all of it: they train "
            do = "Begin with the same values on every rank (a seed before the model is built, or a "
            do += "broadcast), and average gradients."
            yield from finding("ranks-differ", "storage", apart, what + "apart.", do)
            return


_RULES = (
    _never_updated, _narrow, _rounded_gradients, _not_scaled, wire_findings, _untied, _narrow_export,
    _not_averaged, _ranks_differ,
)  # fmt: skip
