"""Moves a model's parameters and buffers to where the plan says, once, when an engine is made.

Rank 0's values are everybody's: they are broadcast in the dtype that the model holds them in, so a master
is made of the bits that were given, never of rounded ones. One segment is on its way at a time.

Invariant: afterwards every parameter of the model is a view of its segment, in the compute dtype.
"""

from __future__ import annotations

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives
from zerodrift.dtypes import from_torch
from zerodrift.engine.segment import FlatSegment, Pools
from zerodrift.engine.unit import LiveUnit
from zerodrift.errors import ModelError, Problems
from zerodrift.plan.table import Plan, Segment

Masters = dict[int, torch.Tensor]
"""Segment number -> the part of the initial fp32 values that this rank's optimizer owns."""


def place(
    plan: Plan, model: nn.Module, comm: Collectives, pools: Pools
) -> tuple[list[FlatSegment], list[LiveUnit], Masters]:
    """The segments and units of a plan, filled from `model`, and the initial values of the masters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check(plan, parameters)
    _tie(plan, model, parameters)
    segments, masters = [], {}
    for number, spec in enumerate(plan.segments):
        rows = [plan.rows[index] for index in spec.rows]
        held = [parameters[row.name] for row in rows]
        segment = FlatSegment(number, spec, rows, held, comm, pools)
        values = _initial(segment, spec, comm)
        segment.adopt(values)
        if segment.update is not None:
            masters[number] = segment.owned_of(values).to(torch.float32, copy=True)
        del values
        segments.append(segment)
    _place_buffers(plan, model, comm)
    return segments, _units(plan, model, segments), masters


def _check(plan: Plan, parameters: dict[str, nn.Parameter]) -> None:
    """The model must be the one that was planned, and hold values."""
    problems = Problems()
    for row in plan.rows:
        parameter = parameters.get(row.name)
        if parameter is None:
            problems.add(row.name, "must be a parameter of the model, as planned", "no such parameter")
        elif tuple(parameter.shape) != row.shape:
            problems.add(row.name, f"must have shape {list(row.shape)}", str(list(parameter.shape)))
        elif parameter.is_meta:
            problems.add(
                row.name, "must hold values", "the meta device", "Build the model on a real device first."
            )
        elif from_torch(parameter.dtype) is not row.source:
            problems.add(row.name, f"must be {row.source}, as planned", str(parameter.dtype))
    problems.raise_as(ModelError)


def _tie(plan: Plan, model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Names that the model declares to be one parameter become one, where they are not yet."""
    for row in plan.rows:
        for name in row.names[1:]:
            if parameters.get(name) is not parameters[row.name]:
                path, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(path), attribute, parameters[row.name])


def _initial(segment: FlatSegment, spec: Segment, comm: Collectives) -> torch.Tensor:
    """The initial values of a segment, `[padded]`, as exact as the model holds them."""
    device = comm.mesh.device
    wide = torch.float32 if spec.columns.storage.dtype.is_floating else spec.columns.storage.dtype.torch
    values = torch.zeros(spec.padded, dtype=wide, device=device)
    for row, parameter in zip(segment.rows, segment.parameters, strict=True):
        FlatSegment.view(values, row).copy_(parameter.detach())
        parameter.data = parameter.data.new_empty(0)
    comm.broadcast(values, 0, "data")
    return values


def _place_buffers(plan: Plan, model: nn.Module, comm: Collectives) -> None:
    """Buffers go to the device, in the dtype of their row, with rank 0's values."""
    rows = {row.name: row for row in plan.buffers}
    for path, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            row = rows.get(f"{path}.{name}" if path else name)
            if row is None:
                continue
            moved = buffer.to(comm.mesh.device, row.storage.torch)
            if moved.numel() and not moved.is_contiguous():
                moved = moved.contiguous()
            comm.broadcast(moved, 0, "data")
            setattr(module, name, moved)


def _units(plan: Plan, model: nn.Module, segments: list[FlatSegment]) -> list[LiveUnit]:
    modules = dict(model.named_modules())
    keep = plan.policy.sharding.keep_gathered
    return [
        LiveUnit(
            number,
            spec,
            modules[spec.name],
            [segments[index] for index in spec.segments],
            keep_after_forward=keep != "never",
            keep_after_backward=keep == "step",
        )
        for number, spec in enumerate(plan.units)
    ]
