"""Text about a plan beside its table: facts, reasons, marks, the parts of its cost, and its pipeline.

`terminal` and `plan_html` share these words. The order of a pipeline is a `Timeline` made from torch's
schedule; without torch it is left out.

Invariant: every reason of every column set is in `reasons`, once.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields

from zerodrift.errors import listed, several
from zerodrift.plan import (
    Boundary,
    Cost,
    Plan,
    Timeline,
    accumulators_of,
    activations,
    crossings,
    part,
    pieces,
    pieces_of,
    rank_micro_batches,
    stage_cost,
)
from zerodrift.policy import BY_RANK, COLUMNS, ORDER, SAME_BITS, Columns
from zerodrift.report import figures
from zerodrift.report.rows import ColumnSet, Table, ranges

WHEN = {"last": "after the last micro-batch", "every": "after every micro-batch"}  # `reduce.when` in words

ORDERS = {"tree": "by the tree over micro-batches", "native": "in NCCL's own order"}
"""`reduce.order` in words, except for the order of ranks."""

OPTION_WORDS = {
    "whole": "whole: a rank's slice never ends inside it",
    "matrices": "matrices: a rank's slice ends between two of its matrices only",
    "expert": "expert: every rank of the expert axis has its own experts, which the columns describe",
}
"""`placement` and `parallel` in words."""

_OPTION_MARKS = (
    ("whole", "a rank's slice holds whole parameters, for an optimizer that works on matrices"),
    ("matrices", "a rank's slice holds whole matrices of the last two dimensions"),
    ("Muon", "updated by Muon"),
    ("AdamW", "updated by AdamW, next to Muon"),
    ("fp8", "the products of these linear layers have fp8 operands, and results in the compute dtype"),
    ("fp8-hp-grad-weight", "like fp8, except for the product that computes the weight's gradient"),
)

OUTPUT = {"keep": "its own dtype", "input": "its input's dtype"}
"""`output` in words: the dtype that a module with a boundary returns."""


def facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return (label, value) pairs that identify a plan."""
    policy = plan.policy
    cells = [row.columns.cells() for row in {id(row.columns): row for row in plan.rows}.values()]
    sharded = [column for column in COLUMNS if any(cell[column].endswith("/") for cell in cells)]
    pairs = [
        ("model", plan.source),
        ("parameters", _parameters(plan)),
        ("mode", str(policy.mode)),
        ("stage", f"{policy.sharding.stage}: {listed(sharded) if sharded else 'nothing is'} sharded"),
        ("mesh", f"{plan.mesh} ({several(plan.mesh.world, 'rank')})" if plan.mesh.world > 1 else "1 rank"),
        ("backend", policy.backend),
        ("order", _order(plan)),
    ]
    for label, recipe in (("optimizer", policy.optimizer), ("schedule", policy.schedule)):
        if recipe is not None:  # AdamW, lr 0.0001, betas [0.9, 0.95]
            params = json.loads(recipe.params) if recipe.params else {}
            words = (recipe.type, *(f"{key} {value}" for key, value in params.items()))
            pairs.append((label, ", ".join(words)))
    return tuple(pairs)


def _order(plan: Plan) -> str:
    """Describe the order of sums, and for the tree the micro-batches of some ranks and the accumulators."""
    if not plan.policy.tree:
        found = (f"{each.value}; {each.why}" for each in plan.policy.decisions if each.key == ORDER)
        return next(found, BY_RANK)  # old plans have no such decision
    count, ranks = plan.policy.batch.accumulation, plan.mesh.data
    kind = "data rank" if plan.mesh.pipeline > 1 else "rank"
    taken = {rank: _few(rank_micro_batches(plan, rank)) for rank in sorted({0, 1 % ranks, ranks - 1})}
    shown = [f"{kind} {rank} takes {numbers}" for rank, numbers in taken.items()]
    shown[2:2] = ["..."] * (ranks > 3)
    total = several(count * ranks, "micro-batch", "micro-batches")
    sums = max((accumulators_of(plan, segment, count) for segment in plan.segments), default=1)
    dealt = f"{', '.join(shown)}; {several(sums, 'accumulator')}"
    return f"one tree over {total}, {SAME_BITS[plan.policy.requires_tree]}: {dealt}"


def _few(numbers: Sequence[int]) -> str:
    """Format ascending numbers: `5`, `0 to 3`, or `0, 4, ..., 28`."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    first = [str(number) for number in numbers[:2]]
    return ", ".join([*first, *(["..."] if len(numbers) > 3 else []), *map(str, numbers[2:][-1:])])


def _parameters(plan: Plan) -> str:
    total = sum(row.whole_numel for row in plan.rows)
    text = f"{figures.elements(total)} in {several(len(plan.rows), 'tensor')}"
    pinned = sum(row.whole_numel for row in plan.rows if row.columns.pinned)
    frozen = sum(row.whole_numel for row in plan.rows if not row.trained)
    for word, count in (("pinned", pinned), ("frozen", frozen)):
        text += f", {figures.elements(count)} {word}" if count else ""
    return text


def kind(columns: Columns) -> str:
    """Return the special properties of columns: `pinned`, `frozen`, `whole`, `Muon`, ... or `""`."""
    words = [word for word, holds in (("pinned", columns.pinned), ("frozen", not columns.trained)) if holds]
    usual = () if columns.products is not None else ("products",)
    return ", ".join([*words, *(text for name, text in columns.options().items() if name not in usual)])


def percent_of_elements(item: ColumnSet, table: Table) -> str:
    total = sum(columns.numel for columns in table.sets)
    return figures.percent(item.numel / total) if total else "0%"


def amount(item: ColumnSet, table: Table) -> str:
    """Count the parameters and elements of a column set in a clause."""
    elements = figures.elements(item.numel)
    return f"{several(item.tensors, 'parameter')}, {elements} elements, {percent_of_elements(item, table)}"


def describe_columns(columns: Columns) -> dict[str, str]:
    """Return column -> its value in words."""
    update = columns.update
    words = {column: text.replace("/", ", sharded") for column, text in columns.cells().items()}
    if update is None:
        return {column: "none, frozen" if text == "-" else text for column, text in words.items()}
    reduce = update.reduce
    words["reduce"] = f"{reduce.wire} on the wire, summed in {reduce.sum}, {WHEN[reduce.when]}"
    if reduce.order != "rank":
        words["reduce"] += f", {ORDERS[reduce.order]}"
    words["reduce"] += ", rounded stochastically" if reduce.rounding == "stochastic" else ""
    words["reduce"] += ", with feedback" if reduce.feedback else ""
    return words


def options(columns: Columns) -> dict[str, str]:
    """Return option -> its value in words, for unusual options."""
    return {name: OPTION_WORDS.get(value, value) for name, value in columns.options().items()}


def marks(table: Table, plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return (mark, meaning) pairs for the marks that occur in the table."""
    sets = table.shown()
    cells = [text for item in sets for text in item.columns.cells().values()]
    trained = [item.columns.trained for item in sets]
    words = {value for item in sets for value in item.columns.options().values()}
    ranks = several(plan.mesh.shard, "rank")
    ranks += f", experts over {plan.mesh.expert_shard}" if plan.mesh.expert > 1 else ""
    wire = "left of it the dtype on the wire, right of it the dtype of the sum"
    pattern = "the pattern stands for N parameters of that shape; elements are their sum"
    found = (
        ("/", any(text.endswith("/") for text in cells), f"sharded over {ranks}; without it, whole on each"),
        (">", any(">" in text for text in cells), wire),
        ("pinned", any(item.columns.pinned for item in sets), "never rounded, in any column"),
        ("frozen", not all(trained), "not trained: columns marked - do not exist"),
        ("reduce", any(trained), _when(sets)),
        *((word, word in words, meaning) for word, meaning in _OPTION_MARKS),
        ("xN", any(line.count > 1 for line in table.lines), pattern),
        (":", any(":" in line.pattern for line in table.lines), "0-10:2 is every second number from 0 to 10"),
        ("=", any(line.also for line in table.lines), "tied: other names of the same parameter"),
    )
    return tuple((mark, meaning) for mark, is_there, meaning in found if is_there)


def _when(sets: Iterable[ColumnSet]) -> str:
    """Describe when gradients are reduced. The letters are left out if all sets agree."""
    letters_of: dict[str, list[str]] = {}
    for item in sets:
        if item.columns.update is not None:
            letters_of.setdefault(WHEN[item.columns.update.reduce.when], []).append(item.letter)
    if len(letters_of) == 1:
        return next(iter(letters_of))
    return "; ".join(f"{', '.join(letters)}: {text}" for text, letters in letters_of.items())


def reasons(sets: Sequence[ColumnSet]) -> list[tuple[str, str, str]]:
    """Return (sets, cells, reason) rows in the order of sets and columns. A reason for different cells in
    different sets has several rows, and only the first shows it."""
    order = [item.letter for item in sets]
    letters_of: dict[str, dict[str, list[str]]] = {}
    for item in sets:
        cells = item.columns.cells() | item.columns.options()
        mine: dict[str, list[str]] = {}
        for column, text in item.columns.why:
            # A column stays with its value: NBSP does not break.
            mine.setdefault(text, []).append(f"{column}\N{NO-BREAK SPACE}{cells[column]}")
        for text, shown in mine.items():
            is_every = len(shown) == sum(name in COLUMNS for name, _ in item.columns.why) > 1
            words = "every column" if is_every else ", ".join(shown)
            letters_of.setdefault(text, {}).setdefault(words, []).append(item.letter)
    return [
        (_runs(letters, order), words, '"' if number else text)
        for text, uses in letters_of.items()
        for number, (words, letters) in enumerate(uses.items())
    ]


def _runs(letters: Sequence[str], order: Sequence[str]) -> str:
    """Join letters, with `C-F` for three or more in sequence."""
    texts: list[str] = []
    for _, found in itertools.groupby(enumerate(letters), lambda pair: order.index(pair[1]) - pair[0]):
        run = [letter for _, letter in found]
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else run
    return " ".join(texts)


BOUNDARY_HEADS = ("module", "computes in", "returns", "because")  # headers of the table of boundaries


def boundary_rows(table: Table) -> tuple[tuple[str, str, str, str], ...]:
    """Return one row per pattern of boundaries, in the order of BOUNDARY_HEADS."""
    rows = []
    for pattern, (first, *others) in table.boundaries:
        name = f"{pattern} x{len(others) + 1}" if others else pattern
        rows.append((name, str(first.dtype), OUTPUT[first.output], boundary_reason(first)))
    return tuple(rows)


def input_casts(plan: Plan) -> str:
    """Describe the casts of the model's floating inputs and of modules without a boundary."""
    mode = plan.policy.mode
    if mode.autocast:
        return f"inputs are not cast; elsewhere autocast to {mode.dtype} decides"
    return f"floating inputs of the model are cast to {mode.dtype}"


def embedding_casts(table: Table) -> str:
    """Describe what modules without floating inputs return, or `""` if that is their own dtype."""
    dtypes = dict.fromkeys(alike[0].lookup for _, alike in table.boundaries if alike[0].lookup is not None)
    what = "a module that gets no floating input, an embedding, returns"
    return "".join(f"{what} {dtype} unless a rule says `keep`" for dtype in dtypes)


def boundary_reason(boundary: Boundary) -> str:
    """Join the reasons of the dtype and the output of a boundary, without a repetition."""
    reasons = dict(boundary.why)
    return "; ".join(dict.fromkeys((reasons["output"], reasons["dtype"])))


def buffers(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return (count and cast, reason) pairs for the buffers of a plan."""
    counts: dict[tuple[str, str], int] = {}
    for buffer in plan.buffers:
        kept, cast = f"kept as {buffer.source}", f"cast {buffer.source} -> {buffer.storage}"
        what = kept if buffer.storage is buffer.source else cast
        counts[what, buffer.why] = counts.get((what, buffer.why), 0) + 1
    return tuple((f"{several(count, 'buffer')} {what}", why) for (what, why), count in counts.items())


def rest_parts(cost: Cost) -> tuple[tuple[str, int], ...]:
    """Return (column, bytes) pairs at rest between steps."""
    return tuple((field.name, getattr(cost.rest, field.name)) for field in fields(cost.rest))


def peak_parts(cost: Cost) -> tuple[tuple[str, int], ...]:
    """Return (part, bytes) pairs at the peak of a step."""
    parts = ("gathered", "accumulate", "gradient", "wire")
    return (("at rest", cost.peak.rest), *((part, getattr(cost.peak, part)) for part in parts))


def padding(plan: Plan, cost: Cost) -> str:
    text = f"{figures.percent(cost.padding_ratio)} of {figures.elements(cost.parameters)} parameters"
    if cost.whole_padding:
        text += f" ({figures.percent(cost.whole_padding / cost.parameters)} to keep them whole)"
    return f"{text} in {several(len(plan.units), 'unit')}, {several(len(plan.segments), 'segment')}"


def basis(plan: Plan, cost: Cost) -> str:
    """Name the rank and the step that the cost describes."""
    stage = f" of pipeline stage {cost.pipeline_stage}, the most loaded,"
    where = f"one rank{stage if plan.mesh.pipeline > 1 else ''}"
    return f"{where} at {several(cost.micro_batches, 'micro-batch', 'micro-batches')} per step"


SHOWN = 60  # most actions of a rank that are written out


def pipeline_legend(timeline: Timeline) -> str:
    legend = (
        "1F0: piece 1, forward of micro-batch 0; B a whole backward, I the gradient of the piece's input, W "
        "those of its weights"
    )
    paired = "; with + in between, one computes while tokens of the other travel to experts"
    return legend + (paired if timeline.paired else "")


def pipeline_facts(plan: Plan, timeline: Timeline | None) -> tuple[tuple[str, str], ...]:
    """Return (label, value) pairs about the whole pipeline."""
    pipeline = plan.policy.pipeline
    if pipeline is None:
        return ()
    count = plan.policy.batch.accumulation
    total = pieces(pipeline, plan.mesh)
    ranks, schedule = plan.mesh.pipeline, pipeline.schedule
    bubble = f"not computed for {count * total:,} forwards"
    if timeline is not None:
        units = "a forward, the gradient of an input and those of weights take one unit of time each"
        bubble = f"{figures.percent(timeline.bubble)} of the ranks' time, if {units} and messages none: "
        bubble += f"{timeline.length} units in all"
    return (
        ("schedule", f"{schedule}, {count} micro-batches through {total} pieces on {ranks} ranks"),
        ("travels", _travels(plan)),
        ("bubble", bubble),
        ("imbalance", _imbalance(plan)),
    )


def _imbalance(plan: Plan) -> str:
    """Compare the most expensive piece with the mean. The bubble assumes that all pieces take equal time."""
    costs = [0] * pieces(plan.policy.pipeline, plan.mesh)
    for unit in plan.units:
        costs[unit.stage] += unit.products
    mean = sum(costs) / len(costs)
    if not mean:
        return "no piece has a matrix, so their cost is unknown"
    share = f"piece {costs.index(max(costs))} takes {max(costs) / mean:.2f} times the mean of all pieces"
    return f"{share}, by elements of matrices that a token uses; the bubble assumes equal pieces"


def _travels(plan: Plan) -> str:
    """Describe the bytes between pieces per token. The number of tokens is unknown before the run."""
    count, known = crossings(plan), activations(plan)
    over = f"{several(count, 'boundary', 'boundaries')} between ranks"
    if known is None:
        what = "the outputs of the model's layers, whose size is unknown before it runs"
        return f"over {over}, there and back per micro-batch: {what}"
    values, dtype = known
    size, sent = figures.size(values * dtype.size), f"{values:,} values in {dtype}; not in the bill"
    return f"{size} per token over each of {over}, and as much back per micro-batch: {sent}"


def pipeline_ranks(plan: Plan, timeline: Timeline | None) -> tuple[tuple[str, str, str, str, str, str], ...]:
    """Return one row per rank, in the order of PIPELINE_HEADS. `alive` counts micro-batches in memory."""
    lines = []
    for rank in range(plan.mesh.pipeline):
        mine, bill = part(plan, rank), stage_cost(plan, rank, plan.policy.batch.accumulation)
        held = "-" if timeline is None else str(timeline.most_alive[rank])
        pieces = "; ".join(_piece(plan, piece) for piece in pieces_of(plan, rank))
        elements = figures.elements(sum(row.whole_numel for row in mine.rows))
        rest, peak = figures.size(bill.rest.total), figures.size(bill.peak.total)
        lines.append((f"rank {rank}", pieces, elements, rest, peak, held))
    return tuple(lines)


PIPELINE_HEADS = ("place", "pieces", "elements", "at rest", "peak", "alive")


def _piece(plan: Plan, piece: int) -> str:
    """Describe the units of a piece: `0: root, model.layers.0-7`."""
    units = [unit for unit in plan.units if unit.stage == piece]
    words = ["root"] if any(not unit.name and unit.rows for unit in units) else []
    numbers: dict[str, list[int]] = {}
    for unit in units:
        head, number = re.fullmatch(r"(.*?)(\d*)", unit.name).groups()  # type: ignore[union-attr]
        numbers.setdefault(head, []).extend([int(number)] if number else [])
    words += [head + ranges(found) for head, found in numbers.items() if head or found]
    for segment in plan.segments:
        if piece in segment.copies:
            words += [name for index in segment.rows for name in plan.rows[index].names[1:]]
    return f"{piece}: {', '.join(words)}"


def pipeline_order(timeline: Timeline) -> tuple[tuple[str, str], ...]:
    """Return (rank, its actions in order) pairs."""
    lines = []
    for number, actions in enumerate(timeline.ranks):
        more = len(actions) - SHOWN
        words = (f"{action}{'+' if action in timeline.paired else ' '}" for action in actions[:SHOWN])
        lines.append((f"rank {number}", "".join(words).strip() + (f" and {more} more" if more > 0 else "")))
    return tuple(lines)
