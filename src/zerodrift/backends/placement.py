"""Apply `fully_shard` to a model, group by group, innermost first.

A group's parameters get rank 0's values in the storage dtype, torch shards them, and the whole ones are freed
before the next group. Then each group is gathered once, to set the accumulate dtype of its gathered
parameters.

Invariant: afterwards every parameter of the plan is a DTensor in exactly one group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zerodrift.backends.adapters import (
    AllGather,
    DTensorLayout,
    DTensorMesh,
    ReduceScatter,
    layout_of,
    local_part,
    require_tensor_axis,
)
from zerodrift.backends.group import Backwards, LiveGroup, Member, Places, ShardRange, register, registered
from zerodrift.comm import Collectives, raise_on_all_ranks
from zerodrift.engine import ValueSources
from zerodrift.engine import place as placing
from zerodrift.errors import ModelError, Problems
from zerodrift.model import has_forward
from zerodrift.plan import Group, Plan, Row, find_groups

Layouts = Mapping[str, DTensorLayout | None]
"""Row name -> layout of a DTensor of the user's, or None."""


def make_groups(plan: Plan, model: nn.Module, comm: Collectives) -> list[LiveGroup]:
    """Make the groups of a plan, in its order, with their modules."""
    problems = Problems()
    modules = dict(model.named_modules())
    specs = [part for spec in find_groups(plan) for part in _split_uncalled(spec, plan, modules, problems)]
    before = plan.policy.averaging.before
    groups = [
        LiveGroup(number, spec, [modules[path] for path in spec.paths], comm, before)
        for number, spec in enumerate(specs)
    ]
    problems.raise_as(ModelError, "backend fsdp2")
    return groups


def shard(
    plan: Plan,
    model: nn.Module,
    live: Sequence[LiveGroup],
    comm: Collectives,
    dtensor_mesh: DTensorMesh,
    backwards: Backwards,
    sources: ValueSources,
) -> list[Any]:
    """Put the model's parameters into the groups; returns the handles of our hooks."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    placing.check(plan, model, {name: local_part(held) for name, held in parameters.items()}, sources)
    placing.tie(plan, model, parameters)
    require_tensor_axis(model, comm.mesh)
    places: dict[str, Places] = {}
    for row in plan.rows:
        split = [name.rpartition(".") for name in row.names]
        places[row.name] = tuple((model.get_submodule(path), attribute) for path, _, attribute in split)
    spreads = {row.name: layout_of(parameters[row.name]) for row in plan.rows}
    whole = {row.name: parameters[row.name] for row in plan.rows}  # parameters without a group yet
    handles = []
    for group in sorted(live, key=_depth, reverse=True):
        rows = [plan.rows[row] for row in group.spec.rows]
        held = {row.name: whole.pop(row.name) for row in rows}
        values = _fill(rows, held, comm, sources)
        for row in rows:
            _set_values(held[row.name], values[row.name], spreads[row.name], places[row.name])
        handles += group.attach_before(backwards)
        _apply(plan, group, whole.values(), dtensor_mesh)
        handles += group.attach_after(backwards)
        for name, parameter in held.items():
            if spreads[name] is None:
                placing.free_parameter(parameter, parameter.device)
    with raise_on_all_ranks(comm):
        buffers = placing.read_buffers(plan, comm, sources)
    placing.place_buffers(plan, model, comm, buffers)
    for group in live:
        _gather_once(plan, group, places, spreads, comm)
    _require_all(plan, live)
    return handles


# --- which modules ------------------------------------------------------------------------------------


def _split_uncalled(
    group: Group, plan: Plan, modules: Mapping[str, nn.Module], problems: Problems
) -> Iterator[Group]:
    """Yield a group, or groups on the children of a container such as a `ModuleList`, which is never called,
    so that nothing would gather it."""
    silent = [path for path in group.paths if not has_forward(modules[path])]
    if not silent:
        yield group
        return
    path = silent[0]
    names = [plan.rows[row].name for row in group.rows]
    below: dict[str, tuple[int, ...]] = {}
    for child, _ in modules[path].named_children():
        inside = f"{path}.{child}".lstrip(".")
        held = [row for row in group.rows if any(n.startswith(f"{inside}.") for n in plan.rows[row].names)]
        below[inside] = tuple(held)
    if len(group.paths) > 1 or sum(map(len, below.values())) != len(names):
        must = "must be a module with a forward, which gathers its parameters"
        got = f"{type(modules[path]).__name__}, which is not called, with {', '.join(names[:3])}"
        do = "Give its parameters the columns of the module that uses them, or use the native backend."
        problems.add(path or "model", must, got=got, do=do)
        return
    for inside, rows in below.items():
        if rows:
            inner = dataclasses.replace(group, paths=(inside,), rows=rows)
            yield from _split_uncalled(inner, plan, modules, problems)


def _depth(group: LiveGroup) -> int:
    """Return the depth of a group's modules. Inner modules must be sharded before outer ones."""
    return max(len(path.split(".")) if path else 0 for path in group.spec.paths)


# --- one group ----------------------------------------------------------------------------------------


@torch.no_grad()
def _fill(
    rows: Sequence[Row], held: Mapping[str, nn.Parameter], comm: Collectives, sources: ValueSources
) -> dict[str, torch.Tensor]:
    """Return the whole values of a group's parameters in the storage dtype, on the device. A parameter with a
    source is filled only in the part that this rank keeps."""
    ranks, rank = comm.mesh.size("shard"), comm.mesh.rank("shard")
    wholes: dict[str, torch.Tensor] = {}
    for row in rows:
        dtype = row.columns.storage.dtype.torch
        wholes[row.name] = torch.empty(row.shape, dtype=dtype, device=comm.mesh.device)
    read = [row for row in rows if row.name in sources]
    if read:
        with raise_on_all_ranks(comm):
            for row in read:
                mine = ShardRange.of_rank(row.shape, ranks, rank)
                out = mine.of(wholes[row.name])
                if mine.numel:
                    sources[row.name].fill(row.name, mine.start, out)
    for row in rows:
        if row.name not in sources:
            for at, values in placing.broadcast_values(row, local_part(held[row.name]), comm):
                wholes[row.name].view(-1)[at : at + values.numel()] = values
    return wholes


def _set_values(
    parameter: nn.Parameter,
    values: torch.Tensor,
    layout: DTensorLayout | None,
    places: Places,
) -> None:
    """Give a parameter its values; a DTensor is replaced by another object."""
    if layout is None:
        placing.free_parameter(parameter, values.device)
        parameter.data = values
        return
    register(places, nn.Parameter(layout.of(values), requires_grad=parameter.requires_grad))


def _apply(plan: Plan, group: LiveGroup, others: Iterable[nn.Parameter], dtensor_mesh: DTensorMesh) -> None:
    """Call `fully_shard` and its setters. `others` are parameters of later groups."""
    kind, keep = group.spec.kind, plan.policy.sharding.keep_gathered
    root = plan.units[group.spec.unit].name == ""
    applied = fully_shard(
        group.modules if len(group.modules) > 1 else group.modules[0],
        mesh=dtensor_mesh.shard,
        reshard_after_forward=keep == "never" and not root,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=kind.compute.torch,
            reduce_dtype=kind.update[1].torch if kind.update else None,
            cast_forward_inputs=False,
        ),
        ignored_params=set(others),
    )
    group.modules = applied if isinstance(applied, list) else [applied]
    first = group.modules[0]
    first.set_gradient_divide_factor(1.0)
    first.set_force_sum_reduction_for_comms(True)
    first.set_custom_all_gather(AllGather(group.collectives))  # type: ignore[arg-type]
    if kind.update is not None:
        carrier = ReduceScatter(group.collectives, kind.update[2], plan.policy.averaging.before)
        first.set_custom_reduce_scatter(carrier)  # type: ignore[arg-type]
        if group.collectives.mesh.size("replicate") > 1:
            first.set_all_reduce_hook(group.after_reduce)


def _gather_once(
    plan: Plan, group: LiveGroup, places: Mapping[str, Places], layouts: Layouts, comm: Collectives
) -> None:
    """Gather a group to get both forms of its parameters. torch would make the gathered form in the first
    forward, which a rank may skip although it takes part in the reduction."""
    ranks, rank = comm.mesh.size("shard"), comm.mesh.rank("shard")
    rows = [plan.rows[row] for row in group.spec.rows]
    sharded = [registered(places[row.name]) for row in rows]
    group.modules[0].unshard()
    for row, parameter in zip(rows, sharded, strict=True):
        here, full = places[row.name], registered(places[row.name])
        mine = ShardRange.of_rank(row.shape, ranks, rank)
        group.members.append(Member(row, mine, here, parameter, full, layouts[row.name]))
    group.set_gradient_dtypes()
    group.modules[0].reshard()


def _require_all(plan: Plan, live: Sequence[LiveGroup]) -> None:
    """Refuse a parameter that is registered only in modules of other groups, which torch does not shard."""
    problems = Problems()
    for group in live:
        for member in group.members:
            if not isinstance(member.sharded, DTensor) or member.full is member.sharded:
                got = f"only in modules that are groups of their own: {', '.join(member.row.names)}"
                do = "Give those modules the columns of the rest of their unit, or use the native backend."
                problems.add(member.row.name, "must be in a module of its own group", got=got, do=do)
    problems.raise_as(ModelError, "backend fsdp2")
