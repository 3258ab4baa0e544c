"""What of a run that was watched costs precision: a sentence on what it costs, and what to do about it.

Every finding rests on sightings and on facts of parameters, never on a config. Parameters that share one are
told together.

Invariant: pure. A cell that was not seen is no finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from zerodrift.observer.advice import MASTERS, SUMS, library_of
from zerodrift.observer.finding import RunFinding, names_of
from zerodrift.observer.rank_findings import not_averaged, ranks_differ
from zerodrift.observer.seen import SeenModel, SeenParameter, SeenProcess

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
        library = library_of(model)
        if not model.trained:
            if not any(other.trained for other in first.models):
                found += _never_updated(first, model, library)
            continue
        for rule in _RULES:
            found += rule(first, model, library)
        found += not_averaged(processes, model, library)
        found += ranks_differ(processes, model)
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
                names_of(rest),
                f"The optimizer updates {dtype} weights in place: {lost}.",
                MASTERS.get(library, MASTERS[""]),
            )
        if norms:
            still = [parameter for parameter in norms if parameter.facts.get("changed") is False]
            yield RunFinding(
                "norm-in-16-bits",
                "master",
                names_of(norms),
                f"Gains of norms are {dtype} and updated in place: near 1.0, {lost}"
                + (f"; {len(still)} of {len(norms)} did not change at all." if still else "."),
                MASTERS.get(library, MASTERS[""]),
            )


def _widened_in_vain(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    """Weights that each update rounds, and that compute in more. An upcast whose result nobody kept leaves no
    trace: those weights have no master."""
    for dtype, bits in _NARROW.items():
        widened = [
            parameter
            for parameter in model.parameters
            if parameter.whats("master") == ("same",)
            and parameter.whats("storage") == (dtype,)
            and min((_WIDTH.get(what, 0) for what in parameter.whats("compute")), default=0) > 16
        ]
        if widened:
            wide = widened[0].whats("compute")[0]
            yield RunFinding(
                "upcast-without-effect",
                "compute",
                names_of(widened),
                f"Weights rest in {dtype} and are cast to {wide} where they compute: every update rounds "
                f"them to {bits} bits before, and a cast adds none.",
                MASTERS.get(library, MASTERS[""]),
            )


def _narrow_state(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    for dtype in _NARROW:
        narrow = [parameter for parameter in model.parameters if dtype in parameter.whats("state")]
        if narrow:
            yield RunFinding(
                "state-too-narrow",
                "state",
                names_of(narrow),
                f"Optimizer states are {dtype}: a second moment shrinks by 1/1000 of itself a step, which "
                f"{dtype} rounds away, so it can grow and never shrink.",
                MASTERS.get(library, MASTERS[""]),
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
                names_of(rounded),
                f"Gradients of {process.micro_batches} micro-batches are added in {dtype}: each addition "
                f"keeps {bits} bits.",
                SUMS.get(library, SUMS[""]),
            )


def _narrow_router(process: SeenProcess, model: SeenModel, library: str) -> Iterator[RunFinding]:
    for dtype in _NARROW:
        routers = [p for p in model.parameters if _is_router(p, model) and dtype in p.whats("compute")]
        if routers:
            yield RunFinding(
                "router-in-16-bits",
                "compute",
                names_of(routers),
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
            names_of(left_out),
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
            names_of(still),
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
                names_of(alike),
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
            names_of(narrow),
            f"Files have {seen} of weights that are {narrow[0].whats('storage')[0]}: what was trained is "
            "rounded.",
            "Write the weights as they are trained, and round where they are served.",
            narrow[0].cells["export"][0].line,
        )


_RULES: tuple[Callable[[SeenProcess, SeenModel, str], Iterator[RunFinding]], ...] = (
    *(_never_updated, _no_master, _widened_in_vain, _narrow_state, _rounded_sums, _narrow_router),
    *(_narrow_buffer, _untied, _narrow_export),
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


# --- words --------------------------------------------------------------------------------------------


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
