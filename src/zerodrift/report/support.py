"""The support table as Markdown, for `docs/support.md` and the terminal.

`policy/support.py` holds the cells, and `resolve` obeys them. Each distinct reason has a letter.

Invariant: every cell of the table is shown, and every refusal has its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from zerodrift import policy
from zerodrift.dtypes import BLOCK, DType
from zerodrift.plan import block_bytes
from zerodrift.report.rows import letter

_NARROW = "`precision.allow_narrow: true`"
_DEFAULT = f"the config does not say what to accumulate in: {policy.DEFAULT_ACCUMULATE} in every mode"
_BACKENDS = list(policy.BACKENDS)


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
    """Yield each narrow format with its bytes, then the status of trained and of frozen parameters."""
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
    cells = sorted(cells, key=lambda cell: _BACKENDS.index(cell.backend))
    letters: dict[str, str] = {}
    for reason in dict.fromkeys(cell.reason for cell in cells if cell.reason):
        letters[reason] = letter(len(letters)).lower()
    lines = [
        "# What is supported?",
        "",
        "Which combinations of mode, accumulate dtype, stage, pipeline and backend run. This page is the",
        "output of `zerodrift support --markdown`; the config check uses the same table.",
        "",
        "- **yes**: runs.",
        f"- **narrow**: runs with {_NARROW}; the letter names the loss.",
        "- **no**: is refused; the letter names the reason.",
        f"- *default*: {_DEFAULT}.",
    ]
    lines += _markdown_tables(cells, letters)
    lines += ["", "## Reasons", ""]
    lines += [f"- **{mark}**: {text}." for text, mark in letters.items()]
    lines += ["", "## State", "", "The optimizer's moments, in every mode and at every stage.", ""]
    lines += [f"- **{state}**: {text}." for state, text in _states(states)]
    lines += ["", "## Storage", ""]
    lines += ["Parameters that are stored in a narrow format, in every mode and at every stage.", ""]
    lines += [f"- **{what}**: {text}." for what, text in _storages()]
    lines += [
        "",
        "## Order",
        "",
        "By default (`precision.reduce: {order: auto}`) gradients are added by the tree over micro-batches,",
        "for the same bits on any number of ranks ([order](order.md)). In these cases the default is the",
        "order of ranks:",
        "",
    ]
    lines += [f"- **{each.what}**: {each.reason}." for each in policy.DEFAULT_RANK]
    lines += ["", "`precision.reduce: {order: tree}` is refused with ([order](order.md)):", ""]
    lines += [f"- **{refusal.what}**: {refusal.reason}. {refusal.do}." for refusal in policy.REFUSED]
    lines += ["", f"With `order: native` {policy.GIVEN_UP}. It is refused with:", ""]
    lines += [f"- **{policy.CARRIED.what}**: {policy.CARRIED.reason}. {policy.CARRIED.do}."]
    lines += ["", "## Narrow formats on the wire", ""]
    lines += ["A narrow `gather` and a narrow wire of `reduce` are refused in these cases, in every mode;"]
    lines += [f"{policy.SLICED}.", ""]
    lines += [f"- **{refusal.what}**: {refusal.reason}. {refusal.do}" for refusal in policy.TRAVEL]
    lines += ["", "## Products", ""]
    lines += ["`precision.compute: fp8` ([a definition](precision.md#what-does-compute-fp8-compute)) is"]
    lines += ["refused in these cases, in every mode and at every stage.", ""]
    lines += [f"- **{refusal.what}**: {refusal.reason}. {refusal.do}." for refusal in policy.UNFIT]
    return "\n".join(lines) + "\n"


def _markdown_tables(cells: Sequence[policy.SupportCell], letters: Mapping[str, str]) -> Iterator[str]:
    """Yield a table for each backend, with and without a pipeline. `letters` has one per reason."""
    tables: dict[tuple[int, bool], dict[tuple[str, str], list[policy.SupportCell]]] = {}
    for cell in cells:
        rows = tables.setdefault((_BACKENDS.index(cell.backend), cell.pipeline), {})
        rows.setdefault((cell.mode, cell.accumulate), []).append(cell)
    for (backend, pipeline), rows in sorted(tables.items()):
        stages = [f"stage {cell.stage}" for cell in next(iter(rows.values()))]
        words = "with a pipeline" if pipeline else "without a pipeline"
        yield from ("", f"## Backend {_BACKENDS[backend]}, {words}", "")
        yield f"| mode | accumulate | {' | '.join(stages)} |"
        yield f"| {' | '.join(['---'] * (2 + len(stages)))} |"
        for names, mine in rows.items():
            marked = (" ".join(filter(None, (cell.status, letters.get(cell.reason)))) for cell in mine)
            yield f"| {' | '.join((*names, *marked))} |"
