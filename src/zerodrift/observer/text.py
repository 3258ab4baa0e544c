"""What was seen of a run, as text: the nine cells of every parameter, what showed them, and what they cost.

Right at 80 columns, whatever the terminal, so that it can be pasted into an issue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from zerodrift.observer.finding import RunFinding
from zerodrift.observer.grouping import SHORT, SeenGroup, folded, groups
from zerodrift.observer.seen import COLUMNS, SeenModel, SeenProcess
from zerodrift.report import figures
from zerodrift.report.frame import elide, grid, pairs, printed, section, shown, title

WIDTH = 80
_NAMES = 6
"""Names of a group that are told."""

_FOUND = 3
"""Names of a finding."""

_STYLES = {"fp32": "green", "fp64": "green", "same": "", "bf16": "cyan", "fp16": "magenta"}


def run_text(
    processes: Sequence[SeenProcess], findings: Sequence[RunFinding], notes: Iterable[str], *, color: bool
) -> str:
    """The table of the first rank, what differs on others, and the findings."""
    first = processes[0]
    parts: list[RenderableType] = [title("check", "", WIDTH), pairs(facts(processes), width=WIDTH)]
    for model in first.models:
        parts += _model(model)
    trained = [p.name for model in first.models for p in model.parameters if p.trained]
    parts.append(section("findings", "" if findings else "none"))
    for finding in findings:
        parts += [_finding(finding, trained), Text()]
    told = [*notes, *first.notes]
    if told:
        parts += [section("notes"), grid([("!", note) for note in told], (1,), ("bold yellow",), WIDTH)]
    return printed(parts, color, WIDTH)


def facts(processes: Sequence[SeenProcess]) -> list[tuple[str, str]]:
    """What was watched, and with what."""
    first = processes[0]
    ranks = f"{len(processes)} of {first.world}" if len(processes) < first.world else str(first.world)
    versions = ", ".join(f"{name} {version}" for name, version in first.libraries.items())
    micro = f", {first.micro_batches} micro-batches in the last" if first.micro_batches > 1 else ""
    return [
        ("watched", f"{first.steps} optimizer step{'s' * (first.steps != 1)}{micro}, ranks: {ranks}"),
        ("libraries", versions),
    ]


def _model(model: SeenModel) -> list[RenderableType]:
    numel = sum(parameter.numel for parameter in model.parameters)
    around = f" in {' in '.join(reversed(model.wrappers))}" if model.wrappers else ""
    counted = f"{len(model.parameters):,} parameters, {figures.elements(numel)} elements"
    parts: list[RenderableType] = [
        section(model.name + around),
        Text(counted + ("" if model.trained else ", none of them updated"), style="dim"),
        Text(),
    ]
    if not model.parameters:
        return parts
    made = groups(model)
    widths = [max(len(name), *(len(group.cells[n]) for group in made)) for n, name in enumerate(COLUMNS)]
    wide = sum(widths) + len(widths) > WIDTH
    if wide:
        widths = [
            max(len(name), *(_longest(group.cells[n]) for group in made)) for n, name in enumerate(COLUMNS)
        ]
    parts.append(_line([(name, "dim") for name in COLUMNS], widths))
    for group in made:
        parts += _lines(group, widths)
        parts.append(_group_names(group))
    parts += _evidence(made)
    return parts


def _longest(cell: str) -> int:
    return max(map(len, cell.split(" ")))


def _line(cells: Sequence[tuple[str, str]], widths: Sequence[int]) -> Text:
    line = Text()
    for (words, style), width in zip(cells, widths, strict=True):
        line.append(words.ljust(width), style=style).append(" ")
    return line


def _lines(group: SeenGroup, widths: Sequence[int]) -> list[Text]:
    """A cell of several dtypes has them below each other where it is narrow."""
    stacked = [
        [words] if len(words) <= width else words.split(" ")
        for words, width in zip(group.cells, widths, strict=True)
    ]
    return [
        _line(
            [(words[row] if row < len(words) else "", _style(words, row)) for words in stacked],
            widths,
        )
        for row in range(max(map(len, stacked)))
    ]


def _style(words: Sequence[str], row: int) -> str:
    return _STYLES.get(words[row].split(" ")[0], "dim") if row < len(words) else ""


def _group_names(group: SeenGroup) -> RenderableType:
    names = group.names
    told = [elide(name, WIDTH - 4) for name in names[:_NAMES]]
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    frozen = "" if group.parameters[0].trained else ", frozen"
    text = Text(f"{figures.elements(group.numel)} elements{frozen}: ", style="dim")
    return Padding(text.append_text(shown(", ".join(told) + more)), (0, 0, 0, 2))


def _evidence(made: Sequence[SeenGroup]) -> list[RenderableType]:
    """What showed each cell first, and why cells are empty."""
    rows: dict[tuple[str, str, str], None] = {}
    for group in made:
        parameter = group.parameters[0]
        for column in COLUMNS:
            for sighting in parameter.cells.get(column, ()):
                where = f" in {sighting.module}" if sighting.module else ""
                line = f", {sighting.line}" if sighting.line else ""
                what = ">".join(SHORT.get(part, part) for part in sighting.what.split(">"))
                if column in ("storage", "master") and not line:
                    continue
                rows.setdefault((column, what, f"{sighting.by}{where}{line}"))
            if column in parameter.unseen:
                rows.setdefault((column, "-", parameter.unseen[column]))
    ordered = sorted(rows, key=lambda row: COLUMNS.index(row[0]))
    firsts: dict[tuple[str, str], tuple[str, str, str]] = {}
    for row in ordered:
        firsts.setdefault((row[0], row[1]), row)
    return [
        section("seen in", "the first of each"),
        grid(list(firsts.values()), (10, 9), ("dim", "bold"), WIDTH),
    ]


def named(finding: RunFinding, trained: Sequence[str]) -> str:
    """Whose it is, in a line or two."""
    if list(finding.names) == trained:
        return "every parameter that is trained"
    names = folded(finding.names)
    return ", ".join(names[:_FOUND]) + (f" and {len(names) - _FOUND} more" if len(names) > _FOUND else "")


def _finding(finding: RunFinding, trained: Sequence[str]) -> RenderableType:
    told = named(finding, trained)
    head = finding.kind + (f", {finding.column}" if finding.column else "")
    line = f"{finding.line}: " if finding.line else ""
    rows = [("!", head)]
    rows += [("", told)] if told else []
    rows += [("", line + finding.what), ("", finding.do)]
    return grid(rows, (1,), ("bold yellow",), WIDTH)
