"""What a report says about a plan besides its table: facts, reasons, marks, the parts of a bill.

Words are chosen here once; `terminal` and `page` only set them. Nothing is computed that the plan or the
cost does not already hold.

Invariant: every reason of every column set is in `reasons`, once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerodrift.errors import listed, several
from zerodrift.plan.cost import Cost, accumulators_of
from zerodrift.plan.schedule import rank_micro_batches
from zerodrift.plan.table import Boundary, Plan
from zerodrift.policy.nouns import COLUMNS, Columns, ComponentSpec
from zerodrift.report import figures
from zerodrift.report.rows import ColumnSet, Table

WHEN = {"last": "after the last micro-batch", "every": "after every micro-batch"}
"""`reduce.when` in words."""

ORDERS = {"tree": "by the tree over micro-batches", "native": "in the carrier's order"}
"""`reduce.order` in words, where it is not that of ranks."""

OPTION_WORDS = {
    "whole": "whole: a rank's slice never ends inside it",
    "matrices": "matrices: a rank's slice ends between two of its matrices only",
    "expert": "expert: every rank of the expert axis has its own experts, which the columns describe",
}
"""`placement` and `parallel` in words."""

OUTPUT = {"keep": "its own dtype", "input": "its input's dtype"}
"""`output` in words: what a module with a boundary returns."""


@dataclass(frozen=True, slots=True)
class Use:
    """Where a reason holds: these column sets, in these cells."""

    letters: tuple[str, ...]
    where: str
    """The letters as a table writes them, runs shortened: `A C-F`."""
    cells: tuple[tuple[str, str], ...]
    """(column, cell text) pairs, in the order of COLUMNS."""
    every: bool
    """Whether these are all the columns that the sets have."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One distinct reason, and everything that it set."""

    text: str
    uses: tuple[Use, ...]


# --- the head of a report -----------------------------------------------------------------------------


def facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    """(label, value) pairs that say which plan this is."""
    policy = plan.policy
    pairs = [
        ("model", plan.source),
        ("parameters", _parameters(plan)),
        ("mode", str(policy.mode)),
        ("stage", _stage(plan)),
        ("mesh", f"{plan.mesh} ({several(plan.mesh.world, 'rank')})" if plan.mesh.world > 1 else "1 rank"),
        ("backend", policy.backend),
    ]
    if policy.tree:
        pairs.append(("order", _order(plan)))
    for label, recipe in (("optimizer", policy.optimizer), ("schedule", policy.schedule)):
        if recipe is not None:
            pairs.append((label, _recipe(recipe)))
    return tuple(pairs)


def _order(plan: Plan) -> str:
    """Who takes which micro-batches, and what waits for others."""
    count, ranks = plan.policy.batch.accumulation, plan.mesh.data
    kind = "data rank" if plan.mesh.pipeline > 1 else "rank"
    shown = [
        f"{kind} {rank} takes {_few(rank_micro_batches(plan, rank))}"
        for rank in sorted({0, 1 % ranks, ranks - 1})
    ]
    total = several(count * ranks, "micro-batch", "micro-batches")
    sums = max((accumulators_of(plan, segment, count) for segment in plan.segments), default=1)
    return f"one tree over {total}: {', '.join(shown)}; {several(sums, 'accumulator')}"


def _few(numbers: Sequence[int]) -> str:
    """`5`, `0 to 3`, or `0, 4, ..., 28`."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    first = [str(number) for number in numbers[:2]]
    return ", ".join([*first, *(["..."] if len(numbers) > 3 else []), *map(str, numbers[2:][-1:])])


def _recipe(recipe: ComponentSpec) -> str:
    """`AdamW, lr 0.0001, betas [0.9, 0.95]`."""
    params = json.loads(recipe.params) if recipe.params else {}
    return ", ".join([recipe.type, *(f"{key} {value}" for key, value in params.items())])


def _parameters(plan: Plan) -> str:
    total = sum(row.whole_numel for row in plan.rows)
    text = f"{figures.elements(total)} in {several(len(plan.rows), 'tensor')}"
    pinned = sum(row.whole_numel for row in plan.rows if row.columns.pinned)
    frozen = sum(row.whole_numel for row in plan.rows if not row.trained)
    parts = [
        f"{figures.elements(count)} {word}"
        for word, count in (("pinned", pinned), ("frozen", frozen))
        if count
    ]
    return ", ".join([text, *parts])


def _stage(plan: Plan) -> str:
    """The stage, and what it means: the columns that are sharded."""
    cells = [row.columns.cells() for row in {id(row.columns): row for row in plan.rows}.values()]
    sharded = [column for column in COLUMNS if any(cell[column].endswith("/") for cell in cells)]
    return f"{plan.policy.sharding.stage}: {listed(sharded) if sharded else 'nothing is'} sharded"


def layout(plan: Plan) -> str:
    """Units and segments, in a clause."""
    return f"{several(len(plan.units), 'unit')}, {several(len(plan.segments), 'segment')}"


# --- lines and sets -----------------------------------------------------------------------------------


def kind(columns: Columns) -> str:
    """What sets these columns apart, in words: `pinned`, `frozen`, `whole`, `Muon`, ... or nothing."""
    words = (("pinned", columns.pinned), ("frozen", not columns.trained))
    return ", ".join([*(word for word, holds in words if holds), *columns.options().values()])


def percent_of_elements(item: ColumnSet, table: Table) -> str:
    """A column set's part of the plan's elements."""
    total = sum(columns.numel for columns in table.sets)
    return figures.percent(item.numel / total) if total else "0%"


def amount(item: ColumnSet, table: Table) -> str:
    """How much of the plan has these columns, in a clause."""
    elements = figures.elements(item.numel)
    return f"{several(item.tensors, 'parameter')}, {elements} elements, {percent_of_elements(item, table)}"


def spelled(columns: Columns) -> dict[str, str]:
    """Column -> its value in words, where a table has only room for a mark."""
    update = columns.update
    words = {column: text.replace("/", ", sharded") for column, text in columns.cells().items()}
    if update is None:
        return {column: "none, frozen" if text == "-" else text for column, text in words.items()}
    reduce = update.reduce
    words["reduce"] = f"{reduce.wire} on the wire, summed in {reduce.sum}, {WHEN[reduce.when]}"
    if reduce.order != "rank":
        words["reduce"] += f", {ORDERS[reduce.order]}"
    return words


def options(columns: Columns) -> dict[str, str]:
    """Option -> its value in words, for those that are not as usual."""
    return {name: OPTION_WORDS.get(value, value) for name, value in columns.options().items()}


def marks(table: Table, plan: Plan) -> tuple[tuple[str, str], ...]:
    """(mark, meaning) pairs for the marks that occur in the table."""
    sets = table.shown()
    cells = [text for item in sets for text in item.columns.cells().values()]
    updates = [item.columns.update for item in sets]
    marks = []
    if any(text.endswith("/") for text in cells):
        ranks = several(plan.mesh.shard, "rank")
        if plan.mesh.expert > 1:
            ranks += f", experts over {plan.mesh.expert_shard}"
        marks.append(("/", f"sharded over {ranks}; without it, whole on each"))
    if any(">" in text for text in cells):
        marks.append((">", "left of it the dtype on the wire, right of it the dtype of the sum"))
    if any(item.columns.pinned for item in sets):
        marks.append(("pinned", "never rounded, in any column"))
    if any(update is None for update in updates):
        marks.append(("frozen", "not trained: columns marked - do not exist"))
    if any(update is not None for update in updates):
        marks.append(("reduce", _when(sets)))
    marks += _option_marks(sets)
    if any(line.count > 1 for line in table.lines):
        marks.append(("xN", "the pattern stands for N parameters of that shape; elements are their sum"))
    if any(":" in line.pattern for line in table.lines):
        marks.append((":", "0-10:2 is every second number from 0 to 10"))
    if any(line.also for line in table.lines):
        marks.append(("=", "tied: other names of the same parameter"))
    return tuple(marks)


def _option_marks(sets: Sequence[ColumnSet]) -> list[tuple[str, str]]:
    words = {value for item in sets for value in item.columns.options().values()}
    meanings = {
        "whole": "a rank's slice holds whole parameters, for an optimizer that works on matrices",
        "matrices": "a rank's slice holds whole matrices of the last two dimensions",
        "Muon": "updated by Muon",
        "AdamW": "updated by AdamW, next to Muon",
    }
    return [(word, meaning) for word, meaning in meanings.items() if word in words]


def _when(sets: Iterable[ColumnSet]) -> str:
    """When gradients are reduced."""
    updates = [(item.letter, item.columns.update) for item in sets]
    return _by_set((letter, WHEN[update.reduce.when]) for letter, update in updates if update is not None)


def _by_set(pairs: Iterable[tuple[str, str]]) -> str:
    """(letter, text) pairs as a clause: the text alone where all sets agree."""
    letters_of: dict[str, list[str]] = {}
    for letter, text in pairs:
        letters_of.setdefault(text, []).append(letter)
    if len(letters_of) == 1:
        return next(iter(letters_of))
    return "; ".join(f"{', '.join(letters)}: {text}" for text, letters in letters_of.items())


def reasons(sets: Sequence[ColumnSet]) -> tuple[Reason, ...]:
    """Each distinct reason once, with the cells that it set, in the order of sets and columns."""
    order = [item.letter for item in sets]
    uses_of: dict[str, dict[tuple[tuple[tuple[str, str], ...], bool], list[str]]] = {}
    for item in sets:
        cells = item.columns.cells() | item.columns.options()
        mine: dict[str, list[tuple[str, str]]] = {}
        for column, text in item.columns.why:
            mine.setdefault(text, []).append((column, cells[column]))
        for text, pairs in mine.items():
            every = len(pairs) == sum(name in COLUMNS for name, _ in item.columns.why) > 1
            uses_of.setdefault(text, {}).setdefault((tuple(pairs), every), []).append(item.letter)
    return tuple(
        Reason(
            text,
            tuple(Use(tuple(letters), _runs(letters, order), *cells) for cells, letters in uses.items()),
        )
        for text, uses in uses_of.items()
    )


def _runs(letters: Sequence[str], order: Sequence[str]) -> str:
    """Letters, and `C-F` for three or more that follow each other."""
    places = [order.index(letter) for letter in letters]
    texts: list[str] = []
    start = 0
    for stop in range(1, len(places) + 1):
        if stop < len(places) and places[stop] == places[stop - 1] + 1:
            continue
        run = letters[start:stop]
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else run
        start = stop
    return " ".join(texts)


# --- boundaries ---------------------------------------------------------------------------------------

CASTS = ("module", "computes in", "returns", "because")
"""Heads of a table of boundaries."""


def casts(table: Table) -> tuple[tuple[str, str, str, str], ...]:
    """A line per pattern of boundaries, as CASTS has it."""
    return tuple(
        (
            cast.pattern + (f" x{len(cast.boundaries)}" if len(cast.boundaries) > 1 else ""),
            str(cast.first.dtype),
            OUTPUT[cast.first.output],
            because(cast.first),
        )
        for cast in table.casts
    )


def entered(plan: Plan) -> str:
    """What becomes of the floating inputs of the model, and of the modules that have no boundary."""
    mode = plan.policy.mode
    if mode.autocast:
        return f"inputs are as they are given; elsewhere autocast to {mode.dtype} decides"
    return f"floating inputs of the model are cast to {mode.dtype}"


def lookups(table: Table) -> str:
    """What modules return that get no floating input; `""` where that is their own dtype."""
    dtypes = dict.fromkeys(cast.first.lookup for cast in table.casts if cast.first.lookup is not None)
    return "".join(
        f"a module that gets no floating input, an embedding, returns {dtype} unless a rule says `keep`"
        for dtype in dtypes
    )


def because(boundary: Boundary) -> str:
    """Both reasons, once where they are one."""
    reasons = dict(boundary.why)
    return "; ".join(dict.fromkeys((reasons["output"], reasons["dtype"])))


def buffers(plan: Plan) -> tuple[tuple[str, str], ...]:
    """(what happens, why) for the buffers of the plan: how many are kept, how many are cast."""
    counts: dict[tuple[str, str], int] = {}
    for buffer in plan.buffers:
        if buffer.storage is buffer.source:
            what = f"kept as {buffer.source}"
        else:
            what = f"cast {buffer.source} -> {buffer.storage}"
        counts[what, buffer.why] = counts.get((what, buffer.why), 0) + 1
    return tuple((f"{several(count, 'buffer')} {what}", why) for (what, why), count in counts.items())


# --- the bill -----------------------------------------------------------------------------------------


def rest_parts(cost: Cost) -> tuple[tuple[str, int], ...]:
    """(column, bytes) at rest between steps."""
    rest = cost.rest
    return (
        ("storage", rest.storage),
        ("buffers", rest.buffers),
        ("accumulate", rest.accumulate),
        ("master", rest.master),
        ("state", rest.state),
    )


def peak_parts(cost: Cost) -> tuple[tuple[str, int], ...]:
    """(what, bytes) at the worst moment of a step."""
    peak = cost.peak
    return (
        ("at rest", peak.rest),
        ("gathered", peak.gathered),
        ("accumulate", peak.accumulate),
        ("gradient", peak.gradient),
        ("wire", peak.wire),
    )


def per_parameter(count: int, cost: Cost) -> str:
    """Bytes per parameter, of one rank."""
    bytes_each = count / cost.parameters if cost.parameters else 0.0
    return "<0.001" if 0.0 < bytes_each < 0.001 else figures.significant(bytes_each)


def padding(plan: Plan, cost: Cost) -> str:
    """What is allocated beyond the parameters, in a clause."""
    text = f"{figures.percent(cost.padding_ratio)} of {figures.elements(cost.parameters)} parameters"
    if cost.whole_padding:
        text += f" ({figures.percent(cost.whole_padding / cost.parameters)} to keep them whole)"
    return f"{text} in {layout(plan)}"


def basis(plan: Plan, cost: Cost) -> str:
    """What the figures of a bill are of."""
    stages = plan.mesh.pipeline
    where = (
        f"one rank of pipeline stage {cost.pipeline_stage}, the most loaded," if stages > 1 else "one rank"
    )
    return f"{where} at {several(cost.micro_batches, 'micro-batch', 'micro-batches')} per step"


# --- words --------------------------------------------------------------------------------------------
