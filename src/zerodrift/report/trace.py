"""A trace as text: findings first, then a tree of modules with their operations.

Modules that run the same operations, and whose paths differ only in numbers, share a line.

Invariant: no line is wider than asked for, and the lines name every module with an operation exactly once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from zerodrift.dtypes import DType
from zerodrift.errors import several
from zerodrift.plan import Hidden, Plan, Trace, TracedOperation
from zerodrift.report.frame import elide, grid, legible_text, pairs, render, section, title
from zerodrift.report.rows import fold_names

WIDTH = 80
"""Columns of the text outside a terminal."""

_DTYPES = 17
_KINDS = {
    "refused": "refused by torch",
    "not deterministic": "not deterministic on CUDA",
    "pin cast": "pinned, and cast for all that",
    "promotion": "widened, and rounded again",
    "compute": "used in another dtype than planned",
    "unused": "not used",
}


def trace_text(plan: Plan, trace: Trace, found: Sequence[Hidden], *, color: bool, width: int = WIDTH) -> str:
    """Render a whole trace."""
    modules = traced_modules(trace)
    most = min(width * 3 // 8, int(width * 0.65) - _DTYPES - 4)
    parts = [
        title("plan --trace", plan.digest, width),
        pairs(_facts(plan, trace), width=width),
        section("findings", "" if found else "none"),
        *_findings(found),
        section("operations", "views are left out, and what has only whole numbers"),
        grid(list(_rows(modules, most)), (most, _DTYPES), ("", "bold"), width),
        Text("\n<  in the backward, in any order", style="dim"),
    ]
    return render(parts, color, width)


def _facts(plan: Plan, trace: Trace) -> list[tuple[str, str]]:
    backward = sum(operation.backward for operation in trace.operations)
    forward = len(trace.operations) - backward
    ran = f"one forward of {forward:,} operations, one backward of {backward:,}, without values"
    facts = [
        ("model", plan.source),
        ("mode", str(plan.policy.mode)),
        ("ran", f"{ran}; as on {trace.device}"),
        ("inputs", trace.inputs),
        ("loss", trace.loss or "none: nothing that the model returns has a gradient"),
    ]
    return facts if trace.refused is None else facts[:-1]


def _findings(found: Sequence[Hidden]) -> Iterator[RenderableType]:
    """Render findings by kind. Findings that differ only in the numbers of their names share a pattern, and
    patterns with the same text share a paragraph."""
    first: dict[tuple[str, Hashable], Hidden] = {}
    for each in found:
        first.setdefault((each.name, (each.kind, each.what, each.line, each.do)), each)
    distinct = list(first)
    lines = [(pattern, len(same), first[distinct[same[0]]]) for pattern, same in fold_names(distinct)]
    for number, (kind, alike) in enumerate(groupby(lines, key=lambda line: line[2].kind)):
        if number:
            yield Text()
        yield Text(_KINDS[kind], style="bold yellow")
        names_of: dict[str, list[str]] = {}
        for pattern, count, one in alike:
            at = f" ({one.line})" if one.line else ""
            name = f"{pattern or 'the model itself'}{f' x{count:,}' if count > 1 else ''}"
            names_of.setdefault(f"{one.what}{at}. {one.do}", []).append(name)
        for text, names in names_of.items():
            yield Padding(legible_text(", ".join(names), "bold"), (0, 0, 0, 2))
            yield Padding(legible_text(text), (0, 0, 0, 4))


# --- the tree -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Branch:
    """Component of a module path, with the components below it."""

    name: str
    module: TracedModule | None = None
    below: dict[str, _Branch] = field(default_factory=dict)


def _rows(modules: Sequence[TracedModule], most: int) -> Iterator[tuple[str, str, str]]:
    """Yield the lines of the tree, with names of at most `most` columns."""
    root = _Branch("")
    for module in modules:
        node = root
        for part in _parts(module.pattern):
            node = node.below.setdefault(part, _Branch(part))
        node.module = module
    if root.module is not None:
        yield from _node_rows(_Branch("(the model itself)", root.module), "(the model itself)", 1, most)
    yield from _below(root, 0, 1, most)


def _parts(pattern: str) -> list[str]:
    """Split a path into components. A number stays with the name before it."""
    parts: list[str] = []
    for part in pattern.split(".") if pattern else ():
        if parts and (part == "*" or part[:1].isdigit()):
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return parts


def _below(node: _Branch, depth: int, count: int, most: int) -> Iterator[tuple[str, str, str]]:
    """Yield the lines below a node that stands for `count` modules."""
    for _, group in groupby(node.below.values(), key=_merged_by):
        first, *others = group
        names = tuple(other.name for other in others)
        while first.module is None and len(first.below) == 1:
            (child,) = first.below.values()
            first = _Branch(f"{first.name}.{child.name}", child.module, child.below)
        yield from _node_rows(first, "  " * depth + ", ".join((first.name, *names)), count, most)
        own = first.module
        yield from _below(first, depth + 1, count if own is None else len(own.paths), most)


def _merged_by(node: _Branch) -> object:
    """Return a key that is equal for neighbouring leaves that run the same operations."""
    if node.below or node.module is None:
        return id(node)
    return (tuple(operation_runs(node.module)), len(node.module.paths), node.module.calls, node.module.klass)


def _node_rows(node: _Branch, name: str, count: int, most: int) -> Iterator[tuple[str, str, str]]:
    module = node.module
    if module is None:
        yield elide(name, most), "", ""
        return
    if len(module.paths) != count:
        name = f"{elide(name, most - 6)} x{len(module.paths)}"
    shown = operation_runs(module)
    if [run.backward for run in shown] == [False, True] and shown[0].dtypes == shown[1].dtypes:
        names = (*_repeated(shown[0].names), f"< {', '.join(shown[1].names)}")
        shown = [OperationRun(shown[0].dtypes, names)]
    called = several(module.calls, "call") + ": " if module.calls > 1 else ""
    for number, run in enumerate(shown or [OperationRun("", ())]):
        mark = "< " if run.backward else ""
        text = (called if not number else "") + mark + ", ".join(_repeated(run.names))
        yield elide(name, most) if not number else "", run.dtypes, text


def _repeated(names: Sequence[str]) -> list[str]:
    """Count consecutive equal names: `mul x3`."""
    counted = [(name, len(list(group))) for name, group in groupby(names)]
    return [f"{name} x{count}" if count > 1 else name for name, count in counted]


# --- lines -------------------------------------------------------------------------------------------

NAMES = {"_to_copy": "cast"}
"""Clearer names of torch operations."""
_PARTS = ("native_", "_backward_data", "_backward", "_flash_attention_for_cpu", "_forward")
"""Parts of operation names that are left out."""


@dataclass(frozen=True, slots=True)
class TracedModule:
    """Modules that run the same operations."""

    pattern: str
    paths: tuple[str, ...]
    klass: str
    calls: int
    """Number of equal forwards of each module. 1 if its forwards differ, and `forward` has them all."""
    forward: tuple[TracedOperation, ...]
    """Operations of the first module."""
    backward: tuple[TracedOperation, ...]


@dataclass(frozen=True, slots=True)
class OperationRun:
    """Consecutive forward operations, or backward operations in any order, with the same dtypes."""

    dtypes: str
    """Dtypes as `dtypes` formats them."""
    names: tuple[str, ...]
    backward: bool = False


def traced_modules(trace: Trace) -> list[TracedModule]:
    """Group modules into lines, in the order of their first operations."""
    forward: dict[str, dict[int, list[TracedOperation]]] = defaultdict(lambda: defaultdict(list))
    backward: dict[str, list[TracedOperation]] = defaultdict(list)
    order: dict[str, None] = {}
    for operation in trace.operations:
        order[operation.module] = None
        if operation.backward:
            backward[operation.module].append(operation)
        else:
            forward[operation.module][operation.call].append(operation)
    modules, keys = [], []
    for path in order:
        calls = list(forward[path].values())
        same = len({_alike(call) for call in calls}) == 1
        shown = calls[0] if same else [operation for call in calls for operation in call]
        klass, count, back = trace.classes.get(path, ""), len(calls) if same else 1, backward[path]
        modules.append(TracedModule(path, (path,), klass, count, tuple(shown), tuple(back)))
        # Sums of gradients run in whichever module has the last gradient.
        unordered = frozenset((each.name, dtypes(each)) for each in back if each.name != "add")
        keys.append((path, (klass, count, _alike(shown), unordered)))
    return [
        replace(modules[indices[0]], pattern=pattern, paths=tuple(modules[n].pattern for n in indices))
        for pattern, indices in fold_names(keys)
    ]


def _alike(operations: Iterable[TracedOperation]) -> tuple[tuple[str, str, str], ...]:
    return tuple((shown_name(operation), dtypes(operation), operation.line) for operation in operations)


def operation_runs(module: TracedModule) -> list[OperationRun]:
    """Group the operations of a module that read or write floating numbers."""
    floating = filter(dtypes, module.forward)
    runs = [OperationRun(types, tuple(map(shown_name, alike))) for types, alike in groupby(floating, dtypes)]
    backward: dict[str, dict[str, None]] = {}
    for operation in filter(dtypes, module.backward):
        backward.setdefault(dtypes(operation), {})[shown_name(operation)] = None
    return [*runs, *(OperationRun(types, tuple(names), True) for types, names in backward.items())]


def shown_name(operation: TracedOperation) -> str:
    """Name an operation. A cast that the model does not ask for names its cause: `cast by autocast`."""
    name = NAMES.get(operation.name, operation.name.strip("_"))
    for part in _PARTS:
        name = name.replace(part, "")
    name = name.replace("scaled_dot_product", "attention")
    by = operation.cast_by
    return f"{name} by {by}" if by not in ("", "the model", "autograd") else name


def dtypes(operation: TracedOperation) -> str:
    """Format dtypes: `bf16`, `bf16 -> fp32`, `bf16 fp32 -> fp32`. `""` without floating numbers."""
    sides, has_floating = [], False
    for tensors in (operation.inputs, operation.outputs):
        names = {tensor.dtype for tensor in tensors}
        floating = {name for name in names if name in _FLOATING or name.startswith("complex")}
        has_floating = has_floating or bool(floating)
        sides.append(" ".join(sorted(floating or names)))
    return " -> ".join(filter(None, dict.fromkeys(sides))) if has_floating else ""


_FLOATING = {dtype.value for dtype in DType if dtype.is_floating}
