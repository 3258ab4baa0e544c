"""What of a run that was watched costs precision: a sentence on what it costs, and what to do about it.

Every finding rests on sightings and on facts of parameters, never on a config. Parameters that share one are
told together.

Invariant: pure. A cell that was not seen is no finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from zerodrift.audit.ranks import same_model
from zerodrift.audit.seen import COLUMNS, Column, SeenModel, SeenParameter, SeenProcess

Kind = Literal[
    "no-master",
    "norm-in-16-bits",
    "state-too-narrow",
    "rounded-before-accumulation",
    "router-in-16-bits",
    "buffer-rounded",
    "never-updated",
    "not-averaged",
    "not-accumulated",
    "norm-of-scaled-gradients",
    "untied",
    "ranks-differ",
    "narrow-export",
    "key-without-effect",
    "not-as-expected",
]


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One thing, of every parameter that it is true of."""

    kind: Kind
    column: Column | None
    names: tuple[str, ...]
    """Of parameters, or of buffers; empty where it is of the run."""
    what: str
    """What was seen, and what it costs."""
    do: str
    """How to mend it with the library that runs."""
    line: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "column": self.column,
            "names": list(self.names),
            "what": self.what,
            "do": self.do,
            "line": self.line,
        }


_NARROW = {"bfloat16": 8, "float16": 11}
"""Dtypes of 16 bits, and the bits of their significand."""

_WIDTH = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def run_findings(processes: Sequence[SeenProcess]) -> list[RunFinding]:
    """Everything that is to be said of a run, what costs most first."""
    if not processes:
        return []
    first = processes[0]
    found: list[RunFinding] = []
    for model in first.models:
        library = _library(first, model)
        if not model.trained:
            if not any(other.trained for other in first.models):
                found += _never_updated(first, model, library)
            continue
        for rule in _RULES:
            found += rule(first, model, library)
        found += _not_averaged(processes, model, library)
        found += _ranks_differ(processes, model)
    found += _scaled(first)
    return found


# --- of one parameter ---------------------------------------------------------------------------------


def _no_master(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    """Weights of 16 bits that an optimizer updates in place."""
    for dtype, bits in _NARROW.items():
        bare = [
            parameter
            for parameter in model.parameters
            if parameter.whats("master") == ("same",) and parameter.whats("storage") == (dtype,)
        ]
        norms = [parameter for parameter in bare if _is_norm(parameter)]
        rest = [parameter for parameter in bare if not _is_norm(parameter)]
        lost = f"an update smaller than 1/{2**bits} of a weight is lost"
        if rest:
            yield RunFinding(
                "no-master",
                "master",
                _names(rest),
                f"The optimizer updates {dtype} weights in place: {lost}.",
                _MASTERS.get(library, _MASTERS[""]),
            )
        if norms:
            still = [parameter for parameter in norms if parameter.facts.get("changed") is False]
            yield RunFinding(
                "norm-in-16-bits",
                "master",
                _names(norms),
                f"Gains of norms are {dtype} and updated in place: near 1.0, {lost}"
                + (f"; {len(still)} of {len(norms)} did not change at all." if still else "."),
                _MASTERS.get(library, _MASTERS[""]),
            )


def _narrow_state(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    for dtype in _NARROW:
        narrow = [parameter for parameter in model.parameters if dtype in parameter.whats("state")]
        if narrow:
            yield RunFinding(
                "state-too-narrow",
                "state",
                _names(narrow),
                f"Optimizer states are {dtype}: a second moment shrinks by 1/1000 of itself a step, which "
                f"{dtype} rounds away, so it can grow and never shrink.",
                _MASTERS.get(library, _MASTERS[""]),
            )


def _rounded_sums(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    """Sums over micro-batches that are rounded after each."""
    if process.micro_batches < 2:
        return
    for dtype, bits in _NARROW.items():
        rounded = [
            parameter
            for parameter in model.parameters
            if dtype in parameter.whats("accumulate") and parameter.facts.get("gradients", 0) > process.steps
        ]
        if rounded:
            yield RunFinding(
                "rounded-before-accumulation",
                "accumulate",
                _names(rounded),
                f"Gradients of {process.micro_batches} micro-batches are added in {dtype}: each addition "
                f"keeps {bits} bits.",
                _SUMS.get(library, _SUMS[""]),
            )


def _narrow_router(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    for dtype in _NARROW:
        routers = [p for p in model.parameters if _is_router(p, model) and dtype in p.whats("compute")]
        if routers:
            yield RunFinding(
                "router-in-16-bits",
                "compute",
                _names(routers),
                f"Routers compute in {dtype}: logits that differ by less than it resolves send tokens to "
                "other experts.",
                "Compute the router's logits in fp32: cast its weight and its input up, with autocast off.",
            )


def _narrow_buffer(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    for dtype in _NARROW:
        narrow = tuple(name for name, held in model.buffers.items() if held == dtype)
        if narrow:
            yield RunFinding(
                "buffer-rounded",
                None,
                narrow,
                f"Buffers are {dtype}: constants such as frequencies of positions or running statistics were "
                "rounded with the weights.",
                "Cast parameters alone, not the module, or restore the buffers after the cast.",
            )


def _never_updated(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    trained = [p for p in model.parameters if p.trained and p.facts.get("gradients", 0)]
    left_out = [p for p in trained if p.facts.get("optimized") is False]
    if left_out:
        yield RunFinding(
            "never-updated",
            "master",
            _names(left_out),
            "Gradients arrive, and no optimizer that took a step has the parameter.",
            "Build the optimizer from the parameters of the model that is trained, after it was wrapped, "
            "cast or moved.",
        )
    still = [
        p
        for p in trained
        if p.facts.get("optimized")
        and p.facts.get("changed") is False
        and process.steps > 1
        and any(p.facts.get("used") or ())
        and not (_is_norm(p) and p.whats("storage")[:1] in (("bfloat16",), ("float16",)))
    ]
    if still:
        yield RunFinding(
            "never-updated",
            "storage",
            _names(still),
            f"Not one bit changed in {process.steps} steps, though gradients arrived that are not zero.",
            "Look at the learning rate of its group, at whether updates are smaller than its dtype resolves, "
            "and at whether the optimizer holds the tensors that the model computes with.",
        )


def _untied(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    """An embedding and what began as it: a fault where the model's config ties them, a question where no
    config says, and a copy by intent where it says that they are two."""
    if model.ties is False:
        return
    pairs: dict[tuple[int, tuple[int, ...]], list[SeenParameter]] = {}
    for parameter in model.parameters:
        began = parameter.facts.get("began")
        if began is not None and parameter.trained and len(parameter.shape) > 1:
            pairs.setdefault((began, parameter.shape), []).append(parameter)
    for alike in pairs.values():
        # Others may be copies by intent, as experts are that began as one.
        embeddings = sum(parameter.kind.endswith("Embedding") for parameter in alike)
        if 0 < embeddings < len(alike):
            alone = "began with the same values in memory of their own, and train apart"
            tie = "once the model is wrapped, cast or loaded (transformers: `model.tie_weights()`)"
            yield RunFinding(
                "untied",
                "storage",
                _names(alike),
                f"The model's config ties them; they {alone}." if model.ties else f"They {alone}.",
                f"Tie them again {tie}."
                if model.ties
                else f"Are they meant to be one parameter? Then tie them again {tie}. A copy by intent is "
                "as it should be.",
            )


def _narrow_export(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    narrow = [
        p
        for p in model.parameters
        if p.whats("export") and _widest(p.whats("export")) < _widest(p.whats("storage"))
    ]
    if narrow:
        seen = narrow[0].whats("export")[0]
        yield RunFinding(
            "narrow-export",
            "export",
            _names(narrow),
            f"Files have {seen} of weights that are {narrow[0].whats('storage')[0]}: what was trained is "
            "rounded.",
            "Write the weights as they are trained, and round where they are served.",
            narrow[0].cells["export"][0].line,
        )


_RULES: tuple[Callable[[SeenProcess, SeenModel, str], Iterator[RunFinding]], ...] = (
    *(_never_updated, _no_master, _narrow_state, _rounded_sums, _narrow_router, _narrow_buffer),
    *(_untied, _narrow_export),
)


# --- of a run -----------------------------------------------------------------------------------------


def _scaled(process: SeenProcess) -> Iterator[RunFinding]:
    for event in process.events:
        if event["kind"] == "clipped_scaled":
            yield RunFinding(
                "norm-of-scaled-gradients",
                "grad",
                (),
                "Gradients are clipped while the loss scale is in them: their norm is thousands of times too "
                "large, so every step is clipped to the bone.",
                "Call `scaler.unscale_(optimizer)` before clipping.",
                event["line"],
            )


def _not_averaged(processes: Sequence[SeenProcess], model: SeenModel, library: str) -> Iterator[RunFinding]:
    """A rank's optimizer was given its own gradient, where ranks had different ones."""
    if len(processes) < 2:
        return
    made = {p.name: _made_of(p.name, model, processes) for p in model.parameters}
    alone, summed, lost = (
        [p for p in model.parameters if made[p.name] == what] for what in ("own", "sum", "neither")
    )
    if alone:
        yield RunFinding(
            "not-averaged",
            "reduce",
            _names(alone),
            "What the optimizer was given is the gradient of its own rank, not the average: each rank trains "
            "on its part of the batch.",
            _AVERAGES.get(library, _AVERAGES[""]),
        )
    if summed:
        yield RunFinding(
            "not-averaged",
            "reduce",
            _names(summed),
            f"What the optimizer was given is the sum of the gradients of {len(processes)} ranks, not their "
            f"mean: steps are {len(processes)} times as long, or clipped as often.",
            "Divide by the number of ranks, unless the loss was divided by it.",
        )
    if library == "deepspeed" and processes[0].micro_batches > 1 and 2 * len(lost) > len(made):
        yield RunFinding(
            "not-accumulated",
            "accumulate",
            _names(lost),
            f"What the optimizer was given is no sum of the gradients of {processes[0].micro_batches} "
            "micro-batches: some were dropped.",
            "Set `gradient_accumulation_steps` to the micro-batches of a step and call `engine.step()` after "
            "each, or mark the last with `engine.set_gradient_accumulation_boundary`.",
        )


def _made_of(name: str, model: SeenModel, processes: Sequence[SeenProcess]) -> str:
    """What sampled elements that optimizers were given are a multiple of: a rank's `own` gradient, the `mean`
    or the `sum` over ranks, or `neither`; empty where they do not say."""
    alike = [same_model(process, model, processes[0]) for process in processes]
    parameters = [one.parameter(name) if one is not None else None for one in alike]
    owns = [p.facts.get("own") for p in parameters if p is not None and p.facts.get("own")]
    if len(owns) < len(processes):
        return ""
    by_own, by_mean = [], []
    for rank, parameter in enumerate(parameters):
        assert parameter is not None
        for place, value in enumerate(parameter.facts["used"]):
            elements = [own[place] for own in owns if own is not None]
            mean, own = sum(elements) / len(elements), elements[rank]
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


_LEAST = 3
"""Elements that say something."""

_ALIKE = 0.02
"""Relative spread that rounding explains."""

_UNLIKE = 0.2
"""Relative spread of half of the elements that rounding does not explain."""


def _spread(ratios: Sequence[float], of: Callable[[Iterable[float]], float]) -> float:
    """The greatest or the usual distance from the middle one, relative to it."""
    middle = median(ratios)
    return of(abs(ratio - middle) for ratio in ratios) / abs(middle) if middle else float("inf")


def _ranks_differ(processes: Sequence[SeenProcess], model: SeenModel) -> Iterator[RunFinding]:
    for other in processes[1:]:
        same = same_model(other, model, processes[0])
        if same is None:
            continue
        library = _library(processes[0], model)
        for column in COLUMNS:
            if library == "deepspeed" and column == "accumulate":
                continue  # each rank reduces what it updates into another tensor
            unlike = [
                p
                for p in model.parameters
                if (q := same.parameter(p.name)) is not None
                and p.whats(column)
                and q.whats(column)
                and set(p.whats(column)) != set(q.whats(column))
            ]
            if unlike:
                q = same.parameter(unlike[0].name)
                yield RunFinding(
                    "ranks-differ",
                    column,
                    _names(unlike),
                    f"Rank {processes[0].rank} has {', '.join(unlike[0].whats(column))}, rank {other.rank} "
                    f"{', '.join(q.whats(column)) if q is not None else '-'}.",
                    "Build the model and its optimizer alike on every rank.",
                )
        apart = [
            p
            for p in model.parameters
            if (q := same.parameter(p.name)) is not None
            and p.facts.get("optimized")
            and p.facts.get("digest") is not None
            and q.facts.get("digest") is not None
            and p.facts["digest"] != q.facts["digest"]
        ]
        if apart:
            yield RunFinding(
                "ranks-differ",
                "storage",
                _names(apart),
                f"Values on rank {processes[0].rank} and rank {other.rank} differ, and each has all of it: "
                "they train apart.",
                "Begin with the same values on every rank (a seed before the model is built, or a "
                "broadcast), and average gradients.",
            )
            return


# --- words --------------------------------------------------------------------------------------------


def _names(parameters: Iterable[SeenParameter]) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in parameters)


def _widest(dtypes: Iterable[str]) -> int:
    return max((_WIDTH.get(dtype, 32) for dtype in dtypes), default=0)


def _is_norm(parameter: SeenParameter) -> bool:
    return "norm" in parameter.kind.rpartition(".")[2].lower() and len(parameter.shape) <= 1


_ROUTER = re.compile(r"(^|\.)(router|gate|gating|wg)(\.|$)")
_EXPERTS = re.compile(r"(^|\.)experts?(\.|$)|moe", re.IGNORECASE)


def _is_router(parameter: SeenParameter, model: SeenModel) -> bool:
    """By its name, beside experts."""
    if not _ROUTER.search(parameter.name):
        return False
    around = _ROUTER.split(parameter.name)[0]
    return "router" in parameter.name or any(
        other.name.startswith(around) and _EXPERTS.search(other.name) for other in model.parameters
    )


def _library(process: SeenProcess, model: SeenModel) -> str:
    """What runs the model, for advice."""
    if "DeepSpeedEngine" in model.wrappers:
        return "deepspeed"
    if any(parameter.layout.startswith("sharded") for parameter in model.parameters):
        return "fully_shard"
    if "FullyShardedDataParallel" in model.wrappers:
        return "fsdp"
    return "ddp" if "DistributedDataParallel" in model.wrappers else ""


_MASTERS = {
    "": "Keep the weights in fp32 and compute under `torch.autocast`, or update fp32 copies of them.",
    "ddp": "Keep the weights in fp32 and compute under `torch.autocast`, or update fp32 copies of them.",
    "fully_shard": "Load the weights in fp32, and give `fully_shard` a `MixedPrecisionPolicy`.",
    "fsdp": "Load the weights in fp32, and give FSDP a `MixedPrecision`.",
    "deepspeed": "Leave `bf16_master_weights_and_grads`, `bf16_optimizer_states` and their like off.",
}

_SUMS = {
    "": "Keep gradients in fp32: fp32 weights under autocast do.",
    "ddp": "Keep gradients in fp32: fp32 weights under autocast do.",
    "fully_shard": "Give `MixedPrecisionPolicy` `reduce_dtype=torch.float32`, or reduce every micro-batch.",
    "fsdp": "Give `MixedPrecision` `reduce_dtype=torch.float32`, or reduce every micro-batch.",
    "deepspeed": "Set `data_types.grad_accum_dtype` to fp32 with ZeRO stage 3 or, in bf16, with stage 1: "
    "other stages ignore it before DeepSpeed 0.19.8.",
}

_AVERAGES = {
    "": "Average the gradients of all ranks before the optimizer's step.",
    "deepspeed": "Remove `data_types.grad_accum_dtype`, or use ZeRO stage 3: before DeepSpeed 0.19.8, "
    "stage 1 loses the average where it is not the model's dtype.",
}
