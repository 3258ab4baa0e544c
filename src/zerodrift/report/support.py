"""The support table as text and Markdown.

`policy/support.py` holds the cells and `resolve` obeys them. Each distinct reason has a letter.

Invariant: every cell of the table is shown, and every refusal has its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from operator import attrgetter, itemgetter

from rich.console import RenderableType
from rich.text import Text

from zerodrift.dtypes import BLOCK, DType
from zerodrift.plan import block_bytes
from zerodrift.policy import (
    CARRIED,
    DEFAULT_ACCUMULATE,
    DEFAULT_RANK,
    GIVEN_UP,
    REFUSED,
    SLICED,
    TRAVEL,
    UNFIT,
    State,
    StateCell,
    SupportCell,
    narrow_storages,
)
from zerodrift.report.frame import WIDTH, grid, render, section, title
from zerodrift.report.rows import letter

_STYLES = {"yes": "green", "narrow": "yellow", "no": "red"}
_NARROW = "`precision.allow_narrow: true`"
_DEFAULT = f"the config does not say what to accumulate in: {DEFAULT_ACCUMULATE} in every mode"
_MODE, _ACCUMULATE, _CELL = 15, 13, 9  # widths of columns in characters

Place = tuple[bool, int]  # pair of (has a pipeline, stage)


class _Matrix:
    """Cells by their place, and one letter per reason."""

    def __init__(self, cells: Sequence[SupportCell]) -> None:
        self.backends = tuple(dict.fromkeys(cell.backend for cell in cells))
        self.rows = tuple(dict.fromkeys((cell.mode, cell.accumulate) for cell in cells))
        self.places: tuple[Place, ...] = tuple(sorted({(cell.pipeline, cell.stage) for cell in cells}))
        self._cells: dict[tuple[str, tuple[str, str], Place], SupportCell] = {
            (cell.backend, (cell.mode, cell.accumulate), (cell.pipeline, cell.stage)): cell for cell in cells
        }
        self.letters: dict[str, str] = {}
        for key in product(self.backends, self.rows, self.places):
            if reason := self._cells[key].reason:
                self.letters.setdefault(reason, letter(len(self.letters)).lower())

    def at(self, backend: str, row: tuple[str, str], place: Place) -> tuple[str, str]:
        """Return the status and the letter of the reason, or `""`."""
        cell = self._cells[backend, row, place]
        return cell.status, self.letters.get(cell.reason, "")


def support_text(
    cells: Sequence[SupportCell], states: Sequence[StateCell], *, color: bool, width: int = WIDTH
) -> str:
    """Render one block per backend, with as many stages side by side as fit."""
    matrix = _Matrix(cells)
    legend = [
        ("yes", "runs as it is"),
        ("narrow", f"runs with {_NARROW}: the letter says what is lost"),
        ("no", "is refused: the letter says why"),
        ("default", _DEFAULT),
    ]
    parts: list[RenderableType] = [title("support", width=width), grid(legend, (7,), ("bold",), width)]
    for backend in matrix.backends:
        parts.append(section(f"backend {backend}"))
        for number, places in enumerate(_side_by_side(matrix.places, (width - _MODE - _ACCUMULATE) // _CELL)):
            parts += [*([Text()] if number else []), *_block(matrix, backend, places)]
    travel, usual, tree, fp8 = (
        [(each.what, each.reason) for each in found] for found in (TRAVEL, DEFAULT_RANK, REFUSED, UNFIT)
    )
    below: list[tuple[str, str, int, list[tuple[str, str]]]] = [
        ("reasons", "", 2, [(mark, text) for text, mark in matrix.letters.items()]),
        ("state", "the optimizer's moments", 15, list(_states(states))),
        ("storage", "parameters at rest in a narrow format", 15, list(_storages())),
        ("gather, reduce", "narrow formats are refused with", 32, travel),
        ("reduce.order: auto", "the default: the tree, but the order of ranks with", 32, usual),
        ("reduce.order: tree", "is refused with", 32, tree),
        ("reduce.order: native", GIVEN_UP, 32, [(CARRIED.what, f"refused: {CARRIED.reason}")]),
        ("compute: fp8", "is refused with", 32, fp8),
    ]
    for name, detail, most, rows in below:
        parts += [section(name, detail), grid(rows, (most,), ("bold",), width)]
        parts += [Text(f"{SLICED[0].upper()}{SLICED[1:]}.")] if rows is travel else []
    return render(parts, color, width)


def _side_by_side(places: Sequence[Place], room: int) -> Iterator[Sequence[Place]]:
    """Split the places into groups that fit side by side."""
    if len(places) <= room:
        yield places
        return
    for pipeline in dict.fromkeys(place[0] for place in places):
        alike = [place for place in places if place[0] is pipeline]
        yield from (alike[first : first + room] for first in range(0, len(alike), room))


def _block(matrix: _Matrix, backend: str, places: Sequence[Place]) -> Iterator[Text]:
    over = Text(" " * (_MODE + _ACCUMULATE))
    head = Text("mode".ljust(_MODE) + "accumulate".ljust(_ACCUMULATE), style="bold")
    for pipeline, group in groupby(places, key=itemgetter(0)):
        stages = [f"stage {stage}".ljust(_CELL) for _, stage in group]
        over.append(_PIPELINE[pipeline].ljust(_CELL * len(stages)))
        head.append("".join(stages))
    yield from (over, head)
    last = ""
    for mode, accumulate in matrix.rows:
        line = Text((mode if mode != last else "").ljust(_MODE) + accumulate.ljust(_ACCUMULATE))
        for place in places:
            status, mark = matrix.at(backend, (mode, accumulate), place)
            line.append(status, style=_STYLES[status])
            line.append(f" {mark}".ljust(_CELL - len(status)))
        line.rstrip()
        yield line
        last = mode


_PIPELINE = {False: "without a pipeline", True: "with a pipeline"}


def _states(cells: Sequence[StateCell]) -> Iterator[tuple[str, str]]:
    """Yield each state with its bytes and its status per backend."""
    for state, of_state in groupby(cells, key=lambda cell: cell.state):
        words = [f"{block_bytes(State(state)) / BLOCK:.7g} bytes per element and moment"]
        for backend, group in groupby(of_state, key=lambda cell: cell.backend):
            mine = list(group)
            alike = len({cell.status for cell in mine}) == 1
            for cell in mine[:1] if alike else mine:
                where = f"backend {backend}" + ("" if alike else f" with beta2 {cell.beta2:g}")
                words.append(f"{where}: {cell.status}" + (f", {cell.reason}" if cell.reason else ""))
        yield state, "; ".join(words)


def _storages() -> Iterator[tuple[str, str]]:
    """Yield each narrow format with its bytes, and what is refused with its backends."""
    cells = narrow_storages()
    for storage in dict.fromkeys(cell.storage for cell in cells):
        yield storage, f"{DType(storage).nbytes(BLOCK) / BLOCK:.7g} bytes per element"
    for key, group in groupby(sorted(cells, key=_STORAGE), key=_STORAGE):
        of = "trained" if key[0] else "frozen"
        where = dict.fromkeys(cell.backend for cell in group)
        status = f"{key[1]}, {key[2]}" if key[2] else key[1]
        yield of, f"backend {' and '.join(where)}: {status}"


_STORAGE = attrgetter("trained", "status", "reason")


def support_markdown(cells: Sequence[SupportCell], states: Sequence[StateCell]) -> str:
    """Return the page `docs/support.md`."""
    matrix = _Matrix(cells)
    lines = [
        "# What is supported?",
        "",
        "What runs, by mode, accumulate dtype, stage, pipeline and backend. This page is the output of",
        "`zerodrift support --markdown`, and the config check asks the same table.",
        "",
        "- **yes**: runs as it is.",
        f"- **narrow**: runs with {_NARROW}; the letter says what is lost.",
        "- **no**: is refused; the letter says why.",
        f"- *default*: {_DEFAULT}.",
    ]
    for backend in matrix.backends:
        for pipeline in dict.fromkeys(place[0] for place in matrix.places):
            lines += ["", f"## Backend {backend}, {_PIPELINE[pipeline]}", ""]
            lines += _markdown_table(matrix, backend, pipeline)
    lines += ["", "## Reasons", ""]
    lines += [f"- **{mark}**: {text}." for text, mark in matrix.letters.items()]
    lines += ["", "## State", "", "The optimizer's moments, in every mode and at every stage.", ""]
    lines += [f"- **{state}**: {text}." for state, text in _states(states)]
    lines += ["", "## Storage", ""]
    lines += ["Parameters at rest in a narrow format, in every mode and at every stage.", ""]
    lines += [f"- **{what}**: {text}." for what, text in _storages()]
    lines += [
        "",
        "## Order",
        "",
        "By default (`precision.reduce: {order: auto}`) gradients are added by the tree over micro-batches,",
        "for the same bits on any number of ranks ([order](order.md)), and in the order of ranks with",
        "",
    ]
    lines += [f"- **{each.what}**: {each.reason}." for each in DEFAULT_RANK]
    lines += ["", "What `precision.reduce: {order: tree}` is refused with ([order](order.md)).", ""]
    lines += [f"- **{refusal.what}**: {refusal.reason}. {refusal.do}." for refusal in REFUSED]
    lines += ["", f"With `order: native` {GIVEN_UP}. It is refused with", ""]
    lines += [f"- **{CARRIED.what}**: {CARRIED.reason}. {CARRIED.do}."]
    lines += ["", "## Narrow formats on the way", ""]
    lines += ["What a narrow `gather` and a narrow wire of `reduce` are refused with, in every mode;"]
    lines += [f"{SLICED}.", ""]
    lines += [f"- **{refusal.what}**: {refusal.reason}. {refusal.do}" for refusal in TRAVEL]
    lines += ["", "## Products", ""]
    lines += ["What `precision.compute: fp8` ([a definition](precision.md#what-does-compute-fp8-compute)) is"]
    lines += ["refused with, in every mode and at every stage.", ""]
    lines += [f"- **{refusal.what}**: {refusal.reason}. {refusal.do}." for refusal in UNFIT]
    return "\n".join(lines) + "\n"


def _markdown_table(matrix: _Matrix, backend: str, pipeline: bool) -> Iterator[str]:
    places = [place for place in matrix.places if place[0] is pipeline]
    rows = [["mode", "accumulate", *(f"stage {stage}" for _, stage in places)], ["---"] * (2 + len(places))]
    for row in matrix.rows:
        cells = (matrix.at(backend, row, place) for place in places)
        rows.append([*row, *(" ".join(filter(None, cell)) for cell in cells)])
    yield from (f"| {' | '.join(row)} |" for row in rows)
