"""Findings about operations of a dry run that are not deterministic on CUDA.

A trace runs as on a CPU, so they are named before there is a GPU. `policy/order.py` has the table, and
torch refuses the same operations when they run. Only running can tell which kernel attention takes; each has
a deterministic form where the engine asks for it.

Invariant: pure, and empty for any other device than CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerodrift.inspect.trace import CASTS
from zerodrift.plan import Hidden, Plan, Trace, TracedOperation
from zerodrift.policy import SILENT, need_of, remedy


def nondeterministic(plan: Plan, trace: Trace, device: str, digest_every: int = 0) -> Iterator[Hidden]:
    """Yield the operations whose result on `device` is not the same each time, each once per module, if the
    plan's order of sums or a run's digests ask for the same bits."""
    need = need_of(plan.policy.requires_tree, digest_every)
    if device != "cuda" or need is None:
        return
    whole = _cast_from_whole_numbers(trace)
    named = set()
    for operation in trace.operations:
        name = operation.name.lstrip("_")
        instead = remedy(name)
        place = operation.module, name, operation.line
        if instead is None or place in named or _is_exempt(name, operation, whole):
            continue
        named.add(place)
        then = f"and refused by torch under `{need.key}: {need.value}`"
        if name in SILENT:
            then = "which torch does not notice"
        what = f"the result of `{name}` on CUDA is not the same each time, {then}"
        yield Hidden("not deterministic", operation.module, what, operation.line, f"{instead}.")


def _cast_from_whole_numbers(trace: Trace) -> set[int]:
    """Return the memory of floating tensors that hold whole numbers, cast because a CPU needs them so."""
    return {
        output.memory
        for operation in trace.operations
        if operation.name in CASTS and all(tensor.dtype.startswith("int") for tensor in operation.inputs)
        for output in operation.outputs
    }


def _is_exempt(name: str, operation: TracedOperation, whole: set[int]) -> bool:
    """Return True for a form of an operation that is the same each time."""
    given, made = operation.inputs, operation.outputs
    if name == "histc":
        return given[0].dtype.startswith("int") or given[0].memory in whole
    if name == "bincount":
        return len(given) == 1  # no weights
    if name in ("median", "nanmedian"):
        return len(made) == 1  # no indices
    if name == "embedding_bag_backward":
        return given[5].dims < 2  # no places of maxima
    if name == "scatter_reduce":
        return True  # torch refuses products, and a trace does not have this argument
    return name == "nll_loss2d_forward" and made[0].dims > 0  # not reduced
