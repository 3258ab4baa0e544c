"""The supported combinations, and the reasons against the others.

`resolve` checks one config and `zerodrift support` prints every cell, both with the same functions.
`columns.py` has the rules about single columns, such as bf16 storage for a split master, and `order.py` and
`narrow.py` what an order of sums and narrow formats are refused with.

Invariant: every cell is `yes`, `narrow` (yes, once `precision.allow_narrow` is true) or `no` with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from zerodrift.config import BackendName
from zerodrift.dtypes import ADMITTED, DType, lost
from zerodrift.policy.backends import BACKENDS
from zerodrift.policy.decisions import Mode, State

Status = Literal["yes", "narrow", "no"]


class Verdict(NamedTuple):
    status: Status
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SupportCell:
    mode: str
    accumulate: str
    """`default`, `fp32`, `bf16` or `fp16`."""
    pipeline: bool
    stage: int
    backend: BackendName
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class StorageCell:
    """A narrow format at rest."""

    storage: str
    trained: bool
    backend: BackendName
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class StateCell:
    state: str
    backend: BackendName
    beta2: float
    status: Status
    reason: str


def gradient_dtype(mode: Mode, dtype: DType) -> Verdict:
    """Return whether gradients of a mode may be held in `dtype`, in the accumulator or on the wire."""
    if mode.dtype is DType.BF16 and dtype is DType.FP16:
        return Verdict(
            "no",
            "fp16 ends at 65504 and 6e-8: bf16 gradients overflow and vanish in it, and no loss scale "
            "protects them",
        )
    widest = DType.FP32 if mode.autocast else mode.dtype
    losses = lost(widest, dtype)
    if not losses:
        return Verdict("yes")
    where = "parameters outside the safe modules" if mode.autocast else "gradients"
    return Verdict(
        "narrow",
        f"{where} are {widest}, {dtype} loses {' and '.join(losses)}: needs `precision.allow_narrow: true`",
    )


def verdict(mode: Mode, accumulate: DType, pipeline: bool, stage: int, backend: BackendName) -> Verdict:
    """Return whether an accumulate dtype is supported in a mode, at a stage, on a backend."""
    narrow = gradient_dtype(mode, accumulate)
    refused = "" if narrow.status == "no" else BACKENDS[backend].refuse_sum(accumulate, pipeline, stage)
    return Verdict("no", refused) if refused else narrow


def why_not_state(state: State, backend: BackendName, beta2: float | None) -> str:
    """Return why moments cannot be kept in a state, or `""`. `beta2` decays the second moment, if known."""
    if state is State.BF16 and beta2 is not None and beta2 > MAX_NEAREST_BETA2:
        too_high = (
            f"it needs a beta2 of at most {MAX_NEAREST_BETA2}: above it the decay of the second moment is "
            "less than half an ulp, and it can never shrink: use `bf16-stochastic` or `8bit`, or lower beta2"
        )
        return BACKENDS[backend].refuse_state(state) or too_high
    return BACKENDS[backend].refuse_state(state)


def why_not_storage(trained: bool, backend: BackendName) -> str:
    """Return why a parameter cannot rest in a narrow format, or `""`."""
    return _TRAINED if trained else BACKENDS[backend].refuse_narrow_storage


def _status(reason: str) -> tuple[Status, str]:
    return ("no" if reason else "yes"), reason


_TRAINED = "it is trained, and the small steps of an update would vanish between the few values of the format"


def narrow_storages() -> tuple[StorageCell, ...]:
    """List every narrow format at rest, of frozen and of trained parameters, on every backend."""
    return tuple(
        StorageCell(str(dtype), trained, backend, *_status(why_not_storage(trained, backend)))
        for dtype, trained, backend in product(ADMITTED["frozen"], (False, True), BACKENDS)
    )


def states() -> tuple[StateCell, ...]:
    """List every state on every backend, with a beta2 that bf16 can represent and one that it cannot."""
    return tuple(
        StateCell(str(state), backend, beta2, *_status(why_not_state(state, backend, beta2)))
        for state, backend, beta2 in product(State, BACKENDS, (MAX_NEAREST_BETA2, USUAL_BETA2))
    )


def table() -> tuple[SupportCell, ...]:
    """List every (mode, accumulate, pipeline, stage, backend), in that order."""
    choices = {"default": DEFAULT_ACCUMULATE, "fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16}
    cells = []
    for mode, label, pipeline, stage, backend in product(Mode, choices, (False, True), range(4), BACKENDS):
        found = verdict(mode, choices[label], pipeline, stage, backend)
        cells.append(SupportCell(str(mode), label, pipeline, stage, backend, *found))
    return tuple(cells)


DEFAULT_ACCUMULATE: DType = DType.FP32
"""Default of every mode; a sum over micro-batches loses bits in anything narrower."""

MAX_NEAREST_BETA2 = 0.98
"""Largest beta2 of a second moment in bf16; above it (1 - beta2) is under half an ulp."""

USUAL_BETA2 = 0.999
