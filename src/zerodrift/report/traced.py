"""Groups the operations of a trace into the lines of a page: pure, and fast for hundreds of layers.

Modules whose paths differ only in numbers and that run the same operations in the same dtypes are one line.
`trace` draws the lines.

Invariant: the patterns of the lines, expanded, are the modules that run an operation, each exactly once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerodrift.dtypes import DType
from zerodrift.plan.trace import Hidden, Trace, TracedOperation
from zerodrift.report.rows import folded

NAMES = {"_to_copy": "cast"}
"""What a person calls an operation, where torch's own name says less."""
_PARTS = ("native_", "_backward_data", "_backward", "_flash_attention_for_cpu", "_forward")
"""Of names that a page leaves out."""


@dataclass(frozen=True, slots=True)
class TracedModule:
    """Modules that run the same operations."""

    pattern: str
    paths: tuple[str, ...]
    klass: str
    calls: int
    """Forwards of each that ran the same; 1 where they differ, and all of them are shown."""
    forward: tuple[TracedOperation, ...]
    """Of the first of them."""
    backward: tuple[TracedOperation, ...]


@dataclass(frozen=True, slots=True)
class OperationRun:
    """Operations of one forward that follow each other and have the same dtypes; or all of a backward."""

    dtypes: str
    """`bf16`, where all that goes in and comes out has it; `bf16 fp32 -> fp32`."""
    names: tuple[str, ...]
    backward: bool = False


@dataclass(frozen=True, slots=True)
class HiddenLine:
    """Findings that differ in nothing but the numbers of their names."""

    pattern: str
    count: int
    first: Hidden


def traced_modules(trace: Trace) -> list[TracedModule]:
    """The lines, in the order in which modules first run an operation."""
    forward: dict[str, dict[int, list[TracedOperation]]] = defaultdict(lambda: defaultdict(list))
    backward: dict[str, list[TracedOperation]] = defaultdict(list)
    order: dict[str, None] = {}
    for operation in trace.operations:
        order[operation.module] = None
        if operation.backward:
            backward[operation.module].append(operation)
        else:
            forward[operation.module][operation.call].append(operation)
    entries: list[tuple[str, int, list[TracedOperation]]] = []
    for path in order:
        calls = list(forward[path].values())
        same = len({_alike(call) for call in calls}) == 1
        shown = calls[0] if same else [operation for call in calls for operation in call]
        entries.append((path, len(calls) if same else 1, shown))
    keys = [
        (path, (trace.classes.get(path, ""), calls, _alike(shown), _sums_apart(backward[path])))
        for path, calls, shown in entries
    ]
    return [
        TracedModule(
            pattern=pattern,
            paths=tuple(entries[index][0] for index in indices),
            klass=trace.classes.get(entries[indices[0]][0], ""),
            calls=entries[indices[0]][1],
            forward=tuple(entries[indices[0]][2]),
            backward=tuple(backward[entries[indices[0]][0]]),
        )
        for pattern, indices in folded(keys)
    ]


def _alike(operations: Iterable[TracedOperation]) -> tuple[tuple[str, str, str], ...]:
    return tuple((shown_name(operation), dtypes(operation), operation.line) for operation in operations)


def _sums_apart(backward: Iterable[TracedOperation]) -> frozenset[tuple[str, str]]:
    """Of a backward: gradients of one tensor are added wherever the last of them comes from."""
    return frozenset((operation.name, dtypes(operation)) for operation in backward if operation.name != "add")


def runs(module: TracedModule) -> list[OperationRun]:
    """What a page shows of a module: operations in which floating numbers go in or come out."""
    found: list[OperationRun] = []
    for operation in module.forward:
        told = dtypes(operation)
        if not told:
            continue
        name = shown_name(operation)
        if found and found[-1].dtypes == told:
            found[-1] = OperationRun(told, (*found[-1].names, name))
        else:
            found.append(OperationRun(told, (name,)))
    behind: dict[str, dict[str, None]] = {}
    for operation in module.backward:
        if told := dtypes(operation):
            behind.setdefault(told, {})[shown_name(operation)] = None
    return [*found, *(OperationRun(told, tuple(names), True) for told, names in behind.items())]


def shown_name(operation: TracedOperation) -> str:
    """`mul`; of a cast also who asks for it, where the model does not."""
    name = NAMES.get(operation.name, operation.name.strip("_"))
    for part in _PARTS:
        name = name.replace(part, "")
    name = name.replace("scaled_dot_product", "attention")
    by = operation.cast_by
    return f"{name} by {by}" if by not in ("", "the model", "autograd") else name


def dtypes(operation: TracedOperation) -> str:
    """`bf16`, `bf16 -> fp32`, `bf16 fp32 -> fp32`; empty where nothing floating goes in or comes out."""
    given, made = ([tensor.dtype for tensor in tensors] for tensors in (operation.inputs, operation.outputs))
    if not any(map(_floats, (*given, *made))):
        return ""
    one, other = _floating_first(given), _floating_first(made)
    return one if one == other or not other else f"{one} -> {other}" if one else other


def _floats(dtype: str) -> bool:
    known = {each.value for each in DType if each.is_floating}
    return dtype in known or dtype.startswith("complex")


def _floating_first(told: Sequence[str]) -> str:
    """The floating dtypes, or the others where there is none."""
    floating = [dtype for dtype in told if _floats(dtype)]
    return " ".join(sorted(dict.fromkeys(floating or told)))


def hidden_lines(found: Sequence[Hidden]) -> list[HiddenLine]:
    """A line per pattern."""
    keys = [(each.name, (each.kind, each.what, each.line, each.do)) for each in found]
    distinct = list(dict.fromkeys(keys))
    first = {key: found[index] for index, key in reversed(list(enumerate(keys)))}
    return [
        HiddenLine(pattern, len(indices), first[distinct[indices[0]]])
        for pattern, indices in folded(distinct)
    ]
