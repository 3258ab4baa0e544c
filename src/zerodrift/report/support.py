"""The support table as Markdown, which the terminal shows too.

`policy/support.py` holds the cells and `resolve` obeys them. Each distinct reason has a letter.

Invariant: every cell of the table is shown, and every refusal has its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from operator import attrgetter

from zerodrift import policy
from zerodrift.dtypes import BLOCK, DType
from zerodrift.plan import block_bytes
from zerodrift.report.rows import letter

_NARROW = "`precision.allow_narrow: true`"
_DEFAULT = f"the config does not say what to accumulate in: {policy.DEFAULT_ACCUMULATE} in every mode"

Place = tuple[bool, int]  # pair of (has a pipeline, stage)


class _Matrix:
    """Cells by their place, and one letter per reason."""

    def __init__(self, cells: Sequence[policy.SupportCell]) -> None:
        self.backends = tuple(dict.fromkeys(cell.backend for cell in cells))
        self.rows = tuple(dict.fromkeys((cell.mode, cell.accumulate) for cell in cells))
        self.places: tuple[Place, ...] = tuple(sorted({(cell.pipeline, cell.stage) for cell in cells}))
        self._cells: dict[tuple[str, tuple[str, str], Place], policy.SupportCell] = {
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


_PIPELINE = {False: "without a pipeline", True: "with a pipeline"}


def _states(cells: Sequence[policy.StateCell]) -> Iterator[tuple[str, str]]:
    """Yield each state with its bytes and its status per backend."""
    for state, of_state in groupby(cells, key=lambda cell: cell.state):
        words = [f"{block_bytes(policy.State(state)) / BLOCK:.7g} bytes per element and moment"]
        for backend, group in groupby(of_state, key=lambda cell: cell.backend):
            mine = list(group)
            alike = len({cell.status for cell in mine}) == 1
            for cell in mine[:1] if alike else mine:
                where = f"backend {backend}" + ("" if alike else f" with beta2 {cell.beta2:g}")
                words.append(f"{where}: {cell.status}" + (f", {cell.reason}" if cell.reason else ""))
        yield state, "; ".join(words)


def _storages() -> Iterator[tuple[str, str]]:
    """Yield each narrow format with its bytes, and what is refused with its backends."""
    cells = policy.narrow_storages()
    for storage in dict.fromkeys(cell.storage for cell in cells):
        yield storage, f"{DType(storage).nbytes(BLOCK) / BLOCK:.7g} bytes per element"
    for key, group in groupby(sorted(cells, key=_STORAGE), key=_STORAGE):
        of = "trained" if key[0] else "frozen"
        where = dict.fromkeys(cell.backend for cell in group)
        status = f"{key[1]}, {key[2]}" if key[2] else key[1]
        yield of, f"backend {' and '.join(where)}: {status}"


_STORAGE = attrgetter("trained", "status", "reason")


def support_markdown(cells: Sequence[policy.SupportCell], states: Sequence[policy.StateCell]) -> str:
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
    lines += [f"- **{each.what}**: {each.reason}." for each in policy.DEFAULT_RANK]
    lines += ["", "What `precision.reduce: {order: tree}` is refused with ([order](order.md)).", ""]
    lines += [f"- **{refusal.what}**: {refusal.reason}. {refusal.do}." for refusal in policy.REFUSED]
    lines += ["", f"With `order: native` {policy.GIVEN_UP}. It is refused with", ""]
    lines += [f"- **{policy.CARRIED.what}**: {policy.CARRIED.reason}. {policy.CARRIED.do}."]
    lines += ["", "## Narrow formats on the way", ""]
    lines += ["What a narrow `gather` and a narrow wire of `reduce` are refused with, in every mode;"]
    lines += [f"{policy.SLICED}.", ""]
    lines += [f"- **{refusal.what}**: {refusal.reason}. {refusal.do}" for refusal in policy.TRAVEL]
    lines += ["", "## Products", ""]
    lines += ["What `precision.compute: fp8` ([a definition](precision.md#what-does-compute-fp8-compute)) is"]
    lines += ["refused with, in every mode and at every stage.", ""]
    lines += [f"- **{refusal.what}**: {refusal.reason}. {refusal.do}." for refusal in policy.UNFIT]
    return "\n".join(lines) + "\n"


def _markdown_table(matrix: _Matrix, backend: str, pipeline: bool) -> Iterator[str]:
    places = [place for place in matrix.places if place[0] is pipeline]
    rows = [["mode", "accumulate", *(f"stage {stage}" for _, stage in places)], ["---"] * (2 + len(places))]
    for row in matrix.rows:
        cells = (matrix.at(backend, row, place) for place in places)
        rows.append([*row, *(" ".join(filter(None, cell)) for cell in cells)])
    yield from (f"| {' | '.join(row)} |" for row in rows)
