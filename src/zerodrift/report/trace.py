"""A trace as text of 80 columns: what was found first, then every module with its operations.

`traced` says what the lines are; this file only sets them, as a tree of modules.

Invariant: no line is wider than WIDTH, whatever the names, and without colour the text says as much as
with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from zerodrift.errors import several
from zerodrift.plan.table import Plan
from zerodrift.plan.trace import Hidden, Trace
from zerodrift.report.frame import elide, grid, pairs, printed, section, shown, title
from zerodrift.report.traced import HiddenLine, OperationRun, TracedModule, hidden_lines, runs, traced_modules

WIDTH = 80
"""Narrower than a plan: a tree and two columns need no more."""

_MODULE, _DTYPES = 30, 17
_KINDS = {
    "refused": "refused by torch",
    "pin cast": "pinned, and cast for all that",
    "promotion": "widened, and rounded again",
    "compute": "used in another dtype than planned",
    "unused": "not used",
}


def trace_text(plan: Plan, trace: Trace, found: Sequence[Hidden], *, color: bool) -> str:
    """The whole trace, for a person."""
    modules = traced_modules(trace)
    parts = [
        title("plan --trace", plan.digest, WIDTH),
        pairs(_facts(plan, trace), width=WIDTH),
        section("findings", "" if found else "none"),
        *_findings(hidden_lines(found)),
        section("operations", "views are left out, and what has only whole numbers"),
        grid(list(_rows(modules)), (_MODULE, _DTYPES), ("", "bold"), WIDTH),
        Text("\n<  in the backward, in any order", style="dim"),
    ]
    return printed(parts, color, WIDTH)


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


def _findings(lines: Sequence[HiddenLine]) -> Iterator[RenderableType]:
    """By kind; what is said of several names in the same words is said once."""
    for number, (kind, alike) in enumerate(groupby(lines, key=lambda line: line.first.kind)):
        if number:
            yield Text()
        yield Text(_KINDS[kind], style="bold yellow")
        said: dict[str, list[str]] = {}
        for line in alike:
            at = f" ({line.first.line})" if line.first.line else ""
            text = f"{line.first.what}{at}. {line.first.do}"
            said.setdefault(text, []).append(_counted(line.pattern, line.count))
        for text, names in said.items():
            yield Padding(shown(", ".join(names), "bold"), (0, 0, 0, 2))
            yield Padding(shown(text), (0, 0, 0, 4))


def _counted(pattern: str, count: int) -> str:
    return f"{pattern or 'the model itself'}{f' x{count:,}' if count > 1 else ''}"


# --- the tree -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Branch:
    """A part of a path, and what is below it."""

    name: str
    module: TracedModule | None = None
    below: dict[str, _Branch] = field(default_factory=dict)


def _rows(modules: Sequence[TracedModule]) -> Iterator[tuple[str, str, str]]:
    root = _Branch("")
    for module in modules:
        node = root
        for part in _parts(module.pattern):
            node = node.below.setdefault(part, _Branch(part))
        node.module = module
    if root.module is not None:
        yield from _node_rows(_Branch("(the model itself)", root.module), 0, (), 1)
    yield from _below(root, 0, 1)


def _parts(pattern: str) -> list[str]:
    """The components of a path; a number belongs to the name before it."""
    parts: list[str] = []
    for part in pattern.split(".") if pattern else ():
        if parts and (part == "*" or part[:1].isdigit()):
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return parts


def _below(node: _Branch, depth: int, count: int) -> Iterator[tuple[str, str, str]]:
    """Lines of what is below a node, which stands for so many modules."""
    for _, group in groupby(node.below.values(), key=_merged_by):
        first, *others = group
        names = tuple(other.name for other in others)
        while first.module is None and len(first.below) == 1:
            (child,) = first.below.values()
            first = _Branch(f"{first.name}.{child.name}", child.module, child.below)
        yield from _node_rows(first, depth, names, count)
        own = first.module
        yield from _below(first, depth + 1, count if own is None else len(own.paths))


def _merged_by(node: _Branch) -> object:
    """Neighbours without anything below them that run the same are one line."""
    if node.below or node.module is None:
        return id(node)
    return (tuple(runs(node.module)), len(node.module.paths), node.module.calls, node.module.klass)


def _node_rows(
    node: _Branch, depth: int, others: Sequence[str], count: int
) -> Iterator[tuple[str, str, str]]:
    name = "  " * depth + ", ".join((node.name, *others))
    module = node.module
    if module is None:
        yield elide(name, _MODULE), "", ""
        return
    if len(module.paths) != count:
        name = f"{elide(name, _MODULE - 6)} x{len(module.paths)}"
    shown = _merged(runs(module))
    called = several(module.calls, "call") + ": " if module.calls > 1 else ""
    for number, run in enumerate(shown or [OperationRun("", ())]):
        mark = "< " if run.backward else ""
        text = (called if not number else "") + mark + ", ".join(_repeated(run.names))
        yield elide(name, _MODULE) if not number else "", run.dtypes, text


def _merged(found: Sequence[OperationRun]) -> list[OperationRun]:
    """One line for a module with one run of each direction, in the same dtypes."""
    if len(found) == 2 and found[1].backward and not found[0].backward and found[0].dtypes == found[1].dtypes:
        return [OperationRun(found[0].dtypes, (*_repeated(found[0].names), f"< {', '.join(found[1].names)}"))]
    return list(found)


def _repeated(names: Sequence[str]) -> list[str]:
    """`mul x3` for three that follow each other."""
    counted = [(name, len(list(group))) for name, group in groupby(names)]
    return [f"{name} x{count}" if count > 1 else name for name, count in counted]
