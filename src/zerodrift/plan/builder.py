"""Build a plan: `build(policy, model, mesh) -> Plan`.

The policy gives every parameter its columns, and the layout gives it a place. `build` joins the two, adds
notes for the reader, and checks the result.

Invariant: a plan that `build` returns has passed every check of `plan/check.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from zerodrift.dtypes import DType, lost
from zerodrift.errors import ConfigError, ModelError, Problems, several
from zerodrift.mesh import MeshShape
from zerodrift.model import BufferSpec, ModelSpec
from zerodrift.plan import boundaries, check, stages
from zerodrift.plan.groups import find_groups
from zerodrift.plan.layout import Members, find_units, group, move_small_segments, pack
from zerodrift.plan.table import BufferRow, Plan, Row, Segment, Unit
from zerodrift.policy import (
    KEY,
    TIED,
    V_SHAPED,
    Columns,
    Master,
    Policy,
    decide_columns,
    for_parameters,
    queues,
    refuse_order,
    refuse_ranks,
)


def build(policy: Policy, model: ModelSpec, mesh: MeshShape) -> Plan:
    """Apply a policy to every parameter of a model, lay the result out on a mesh, and check it.

    `make_plan` does this and the steps before it in one call.
    """
    if not model.parameters:
        raise ModelError(model.source, "must have parameters", got="none", do="Is it the right file?")
    columns = decide_columns(policy, model)
    pieces = stages.pieces(policy.pipeline, mesh)
    split = "layers" if policy.pipeline is None else policy.pipeline.split
    found = gathered = find_units(model, policy.sharding.units, pieces, split)
    tied = any(columns[index].update is not None for members in found for index in members.copies)
    policy, before = for_parameters(policy, columns, mesh, tied), policy
    if policy is not before:
        columns = decide_columns(policy, model)
    problems = Problems()
    if policy.requires_tree:
        whens = [kind.update.reduce.when for kind in columns if kind.update is not None]
        refuse_ranks(whens, policy.batch.accumulation, mesh, problems)
        problems.raise_as(ConfigError)
    _require_experts(model, columns, mesh.expert)
    rows: list[Row] = []
    units: list[Unit] = []
    segments: list[Segment] = []
    if pieces == 1 and policy.backend == "native" and not policy.sharding.units:
        gathered = move_small_segments(found, columns, model, mesh.shard)
    moved = len(gathered[0].parameters) - len(found[0].parameters)
    # The first and the last piece of a V-shaped schedule are on one rank, with all uses.
    v_shaped = policy.pipeline is not None and policy.pipeline.schedule in V_SHAPED
    for members in gathered:
        stages.require_ends(policy.pipeline, mesh, model, members.stage, members.copies)
        for index in members.copies if policy.requires_tree and not v_shaped else ():
            if columns[index].update is not None:
                got = f"tree, and {' tied to '.join(model.parameters[index].names)}"
                refuse_order(TIED, KEY, problems, got=got)
        problems.raise_as(ConfigError)
        _add_unit(members, model, columns, mesh, rows, units, segments)
    limits = boundaries.find_boundaries(policy, model, columns)
    plan = Plan(
        source=model.source,
        policy=policy,
        mesh=mesh,
        rows=tuple(rows),
        buffers=tuple(_buffer(buffer, policy) for buffer in model.buffers),
        units=tuple(units),
        segments=tuple(segments),
        boundaries=limits,
        notes=(
            *_notes(policy, model, rows, segments, units, mesh.shard),
            *boundaries.note_missing_classes(policy, model, columns),
            *boundaries.note_unused_outputs(policy, limits),
            *((_MOVED.format(moved),) if moved else ()),
        ),
    )
    check.require(plan)
    if policy.backend == "fsdp2":
        find_groups(plan)  # a plan that fully_shard cannot run is refused where it is made
    return plan


def _require_experts(model: ModelSpec, columns: Sequence[Columns], ranks: int) -> None:
    """Raise one error with all parameters that cannot be divided over `ranks`."""
    if ranks == 1:
        return
    problems = Problems()
    stacks = [(p, of) for p, of in zip(model.parameters, columns, strict=True) if of.parallel]
    first_of: dict[str, tuple[int, str]] = {}  # module -> number of experts and name of its first stack
    for parameter, of in stacks:
        form = of.storage.dtype.format or of.gather.format
        block = form.block if form is not None and isinstance(form.block, int) else 1
        if parameter.numel // ranks % block:
            must = f"must fill whole blocks of {block} with the experts of each rank"
            got = f"{parameter.numel // ranks:,} elements on each of {ranks} ranks"
            problems.add(parameter.name, must, got=got, do="Give it a plain dtype with a rule.")
        name, shape = parameter.name, list(parameter.shape)
        owner = name.rpartition(".")[0]
        parts = owner.split(".")
        after = parts[parts.index("experts") :] if "experts" in parts else parts[-1:]
        must, got, do = "", f"shape {shape}", _LESS
        if len(parameter.names) > 1:
            must, got = "must not be tied, as a stack of experts", ", ".join(parameter.names)
        elif any(part.isdecimal() for part in after):
            must = "must stack all experts of its layer in one parameter, `[experts, ...]`"
            got = "one expert of a list of modules"
            do = "Stack them, as the models of transformers 5 do, or leave `experts` out."
        elif not shape or shape[0] == 0 or shape[0] % ranks:
            must = f"must have a first dimension of experts that {ranks} ranks divide evenly"
            do = f"Change `experts.ranks`, or {_LESS[0].lower()}{_LESS[1:]}"
        else:
            count, first = first_of.setdefault(owner, (shape[0], name))
            if count != shape[0]:
                must = f"must have the {count} experts of `{first}` beside it"
        if must:
            problems.add(name, must, got=got, do=do)
    for parameter, of in zip(model.parameters, columns, strict=True):
        # A whole parameter beside divided stacks would be indexed by a rank's own expert numbers.
        count, first = first_of.get(parameter.name.rpartition(".")[0], (0, ""))
        if count and not of.parallel and parameter.shape[:1] == (count,):
            must = f"must be named in `experts.parameters`: it has the {count} experts of `{first}` beside it"
            problems.add(parameter.name, must, got="no match", do="Name all stacks of a module, or none.")
    if not stacks:
        do = "Name the parameters that stack experts in their first dimension, or leave `experts` out."
        problems.add("experts.parameters", f"must match a parameter of {model.source}", got="no match", do=do)
    problems.raise_as(ConfigError)


_LESS = "Name only stacks of experts in `experts.parameters`."


def _add_unit(
    members: Members,
    model: ModelSpec,
    columns: list[Columns],
    mesh: MeshShape,
    rows: list[Row],
    units: list[Unit],
    segments: list[Segment],
) -> None:
    """Append a unit with its rows and segments: parameters that agree in every column are one segment."""
    unit = len(units)
    first_row, first_segment = len(rows), len(segments)
    for indices in group(members.parameters, columns, members.copies):
        shared = columns[indices[0]]
        parts = mesh.expert if shared.parallel else 1
        parameters = [model.parameters[index] for index in indices]
        if parts > 1:  # a rank holds the experts from `rank * count / parts` on
            parameters = [replace(p, shape=(p.shape[0] // parts, *p.shape[1:])) for p in parameters]
        sliced = shared.storage.axis != "" or shared.trained
        placement = "sliced" if shared.update is None else shared.update.placement
        slices = mesh.shard // parts
        offsets, padded = pack(parameters, slices if sliced else 1, placement)
        number, start = len(segments), len(rows)
        for parameter, index, offset in zip(parameters, indices, offsets, strict=True):
            names, klass = parameter.names, parameter.owners[0].klass
            place = unit, number, offset, parts
            rows.append(Row(names, parameter.shape, parameter.dtype, klass, columns[index], *place))
        numbers = tuple(sorted(range(start, len(rows)), key=lambda number: rows[number].offset))
        copies = members.copies.get(indices[0], ())
        numel = sum(parameter.numel for parameter in parameters)
        segments.append(Segment(unit, shared, numbers, numel, padded, copies))
    held = tuple(range(first_row, len(rows))), tuple(range(first_segment, len(segments)))
    units.append(Unit(members.name, *held, members.stage, members.products))


def _buffer(buffer: BufferSpec, policy: Policy) -> BufferRow:
    storage, why = policy.buffers or buffer.dtype, policy.buffers_why
    if policy.buffers is not None and not buffer.dtype.is_floating:
        storage, why = buffer.dtype, "not a floating dtype: kept"
    return BufferRow(buffer.name, buffer.shape, buffer.dtype, storage, why)


# --- notes ------------------------------------------------------------------------------------------


def _notes(
    policy: Policy, model: ModelSpec, rows: list[Row], segments: list[Segment], units: list[Unit], shard: int
) -> Iterable[str]:
    """Write the notes that a reader should see before the first step."""
    for form, tensors in Counter(form for _, form in model.formats).items():
        yield f"the files hold {several(tensors, 'tensor')} as {form}"
    trained = [(row, update) for row in rows if (update := row.columns.update)]
    if not trained:
        yield "no parameter is trained: there is nothing to update"
    rounded = [
        row
        for row, update in trained
        if update.master is Master.SAME and row.columns.storage.dtype is not DType.FP32
    ]
    if rounded:
        count, dtype = several(len(rounded), "parameter"), rounded[0].columns.storage.dtype
        yield (
            f"{count} updated in {dtype} without an fp32 master: updates below half an ulp of the weight are "
            f"lost"
        )
    narrow = [(row, update) for row, update in trained if lost(update.accumulate.dtype, update.reduce.wire)]
    if narrow:
        first = narrow[0][1]
        yield (
            f"gradients of {several(len(narrow), 'parameter')} are rounded once on the wire "
            f"({first.accumulate.dtype} -> {first.reduce.wire}) and summed in {first.reduce.sum}"
        )
    if policy.optimizer is None and trained:
        yield "the plan knows no optimizer: state is planned for one with two moments (AdamW)"
    if policy.safe and not model.has_classes:
        yield (
            "this source has no module classes, so no parameter counts as a safe module of autocast: plan "
            "from the module or an HF config to see them"
        )
    across = [index for segment in segments if segment.copies for index in segment.rows]
    if across and policy.pipeline is not None and policy.pipeline.schedule not in V_SHAPED:
        count = several(len(across), "parameter")
        yield (
            f"{count} tied across the pipeline: first and last stage hold a copy, whose gradients are added "
            f"once per step"
        )
    at_once = [row for row, _ in trained if row.columns.products is not None]
    if at_once and queues(policy.pipeline):
        count = several(len(at_once), "parameter")
        yield f"gradients of {count} with fp8 products are formed in the backward: the queue defers others"
    yield from _large_units(policy, rows, units, shard)
    yield from _padding(segments, shard)
    divided = [row for row in rows if row.parts > 1]
    if divided:
        count = several(len(divided), "parameter")
        yield (
            f"{count} stack experts that are spread over {divided[0].parts} ranks: tokens travel to their "
            f"experts and back, forward and backward, which depends on the data and is not in the bill"
        )


def _padding(segments: list[Segment], shard: int) -> Iterable[str]:
    total = sum(s.numel for s in segments)
    padding = sum(s.padded - s.numel for s in segments if not s.whole)
    if padding > 0.01 * total and padding > 1 << 20:
        yield f"padding is {padding / total:.1%} of the parameters: fewer shards waste less"
    padded = sum(s.padded - s.numel for s in segments if s.whole)
    placed = sum(s.numel for s in segments if s.whole)
    if padded > 0.1 * placed and padded > 1 << 20:
        yield (
            f"keeping parameters whole pads them by {padded / placed:.0%}, in memory and on the wire: slices "
            f"over {shard} ranks are as long as the fullest. Fewer shard ranks waste less "
            f"(`sharding.replicate`), and so do rules that exclude parameters much larger than the rest"
        )


def _large_units(policy: Policy, rows: list[Row], units: list[Unit], shard: int) -> Iterable[str]:
    """Note a block that is much larger than a rank's share of the model."""
    if policy.sharding.stage < 2 or policy.sharding.keep_gathered != "never":
        return
    sizes = [sum(rows[index].numel for index in unit.rows) for unit in units if unit.name]
    total = sum(row.numel for row in rows)
    if not sizes or max(sizes) < LARGE_UNIT or max(sizes) * shard < LARGE_RATIO * total:
        return
    largest = [unit for unit in units if unit.name][sizes.index(max(sizes))]
    shape = re.sub(r"\d+", "*", largest.name)
    yield (
        f"unit {largest.name} alone has {max(sizes):,} elements, {max(sizes) * shard / total:.0f} times "
        f"what a rank owns, and is gathered whole: name finer units beside it, as in `sharding.units: "
        f'["{shape}", "{shape}.<child>.*"]`, or spread it with expert parallelism'
    )


_MOVED = (
    "{:,} small parameters of blocks are gathered with the root, once: on so many ranks each block's would "
    "be more padding than values"
)

LARGE_UNIT = 100_000_000
"""Least size of a unit that gets a note, in elements."""

LARGE_RATIO = 16
"""Least ratio of a unit to a rank's share of the model for a note."""
