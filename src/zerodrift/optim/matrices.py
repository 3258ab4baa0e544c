"""Muon for matrices and AdamW for the rest, as the rows of a plan say which parameter gets which.

The config's `Muon` block alone comes here; a caller's own `torch.optim.Muon` runs on views like any other
class. Rows that Muon updates are whole matrices on the rank that owns them (`placement`), so no update needs
another rank. There are two parameter groups, Muon's and AdamW's, each with its learning rate.

Invariant: with fp32 masters and moments a matrix goes through the bits of `torch.optim.Muon`, and everything
else through those of `torch.optim.AdamW(fused=True)`; see `muon` and [Note: roots] in `updates`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from zerodrift import optimizers
from zerodrift.dtypes import BLOCK
from zerodrift.optim import muon, schemes
from zerodrift.optim.flat import TORCH_DECAY, FlatUpdater, Groups, keys_of, require
from zerodrift.optim.fused import UpdateFunction, update
from zerodrift.optim.muon import MuonHyper
from zerodrift.optim.schemes import Scheme, SliceTensors
from zerodrift.optim.statistics import Statistics, account
from zerodrift.optim.updater import Counters, Owned, Written, empty_statistics, no_callback, scheme_of
from zerodrift.optim.updates import Root
from zerodrift.plan.table import Plan, Row
from zerodrift.policy.nouns import ComponentSpec

MUON, ADAMW = 0, 1
"""The parameter groups."""

(MOMENT,) = optimizers.MUON.moments


class MuonUpdater:
    """An `Updater` whose pieces are Muon's or AdamW's."""

    def __init__(
        self,
        plan: Plan,
        owned: Sequence[Owned],
        groups: torch.optim.Optimizer,
        update_slice: UpdateFunction = update,
    ) -> None:
        self.groups = groups
        self.kind = optimizers.MUON.kind
        rest = [piece for piece in owned if not _is_muon(piece)]
        everything = {row.name: ADAMW for piece in rest for row in piece.rows}
        self._rest = FlatUpdater(plan, rest, optimizers.ADAMW, Root.EXACT, groups, everything, update_slice)
        mine = [piece for piece in owned if _is_muon(piece)]
        self.group_of = everything | {row.name: MUON for piece in mine for row in piece.rows}
        self._pieces = {piece.number: piece.without_values() for piece in mine}
        self._schemes = {piece.number: scheme_of(piece) for piece in mine}
        self._slices = {
            piece.number: schemes.allocate(
                self._schemes[piece.number],
                piece.storage,
                1,
                initial=piece.initial,
                keys=keys_of(piece) if self._schemes[piece.number].state.drawn else None,
            )
            for piece in mine
        }
        self._statistics = empty_statistics(plan, mine)
        self._steps = 0
        self._left_alone: frozenset[str] = frozenset()

    @property
    def statistics(self) -> Mapping[int, Statistics]:
        return {**self._rest.statistics, **self._statistics}

    def learning_rates(self) -> tuple[float, ...]:
        return self._rest.learning_rates()

    def leave_alone(self, names: Collection[str]) -> None:
        self._left_alone = frozenset(names)
        self._rest.leave_alone(names)

    @torch.no_grad()
    def update(
        self, gradients: Mapping[int, torch.Tensor], multiplier: float, written: Written = no_callback
    ) -> None:
        rest = {number: gradients[number] for number in gradients if number not in self._pieces}
        self._rest.update(rest, multiplier, written)
        self._steps += 1
        numbers = _numbers(self.groups.param_groups[MUON])
        for number in gradients:
            if number in self._pieces:
                for row in self._pieces[number].rows:
                    if row.name in self._left_alone:
                        continue
                    self._update_row(number, row, gradients[number], numbers, multiplier)
                written(number)

    def _update_row(
        self, number: int, row: Row, gradient: torch.Tensor, numbers: MuonHyper, multiplier: float
    ) -> None:
        span = self._pieces[number].span(row)
        count = span.stop - span.start
        if count == 0:
            return
        shape = (-1, *row.shape[-2:])
        if count % math.prod(row.shape[-2:]):
            raise AssertionError(f"{row.name}: {count} elements are no whole matrices of {shape[1:]}")
        scheme, of = self._schemes[number], self._slices[number]
        # To the end of the last block: what is behind the row there is zero and stays so.
        first, last = span.start // BLOCK, -(-span.stop // BLOCK)
        part = slice(span.start, min(last * BLOCK, of.numel))
        scale = torch.as_tensor(multiplier, dtype=torch.float32, device=gradient.device)
        scaled = gradient[part].float() * scale
        weight = schemes.read(scheme, of, part.start, part.stop)
        moment = schemes.read_moment(scheme, of, 0, first, last)
        room = self._statistics.get(number)
        before = None if room is None else (weight.clone(), of.storage[part].clone(), scaled)
        change = None if room is None else torch.zeros_like(weight)
        wanted = muon.direction(numbers, moment, scaled)
        muon.advance(
            numbers,
            weight[:count].view(shape),
            wanted[:count].view(shape),
            None if change is None else change[:count].view(shape),
        )
        schemes.write(scheme, of, weight, part.start)
        words = schemes.draw(scheme, of, self._steps, first, last)
        schemes.write_moment(scheme, of, 0, moment, first, words)
        if room is not None and before is not None and change is not None:
            stored = schemes.read_moment(scheme, of, 0, first, last)
            after = (schemes.read(scheme, of, part.start, part.stop), of.storage[part], stored)
            account(room.blocks[first:last], change, before, after)

    def _scheme_and_slice(self, number: int) -> tuple[Scheme, SliceTensors]:
        return self._schemes[number], self._slices[number]

    def master(self, number: int) -> torch.Tensor:
        return (
            schemes.read(*self._scheme_and_slice(number))
            if number in self._pieces
            else self._rest.master(number)
        )

    @torch.no_grad()
    def set_master(self, number: int, values: torch.Tensor) -> None:
        if number in self._pieces:
            schemes.write(*self._scheme_and_slice(number), values)
        else:
            self._rest.set_master(number, values)

    def states(self, number: int) -> dict[str, torch.Tensor]:
        if number not in self._pieces:
            return self._rest.states(number)
        return {MOMENT: schemes.read_moment(*self._scheme_and_slice(number), 0)} if self._steps else {}

    @torch.no_grad()
    def set_state(self, number: int, key: str, values: torch.Tensor) -> None:
        if number not in self._pieces:
            self._rest.set_state(number, key, values)
        elif key == MOMENT:
            schemes.write_moment(*self._scheme_and_slice(number), 0, values)
        else:
            raise AssertionError(f"Muon has one moment, {MOMENT}: {key}")

    def counters(self) -> Counters:
        return {"": {"steps": self._steps}}

    def set_counters(self, counters: Counters) -> None:
        self._steps = int(counters[""]["steps"])
        for number, of in self._slices.items():
            self.set_state(number, MOMENT, torch.zeros_like(of.storage, dtype=torch.float32))
        self._rest.set_counters(counters)

    def moment_names(self, name: str, counters: Counters) -> tuple[str, ...]:
        if self.group_of.get(name) != MUON:
            return self._rest.moment_names(name, counters)
        return (MOMENT,) if counters[""]["steps"] else ()

    def resting(self, number: int) -> tuple[torch.dtype | None, tuple[torch.dtype, ...]]:
        if number not in self._pieces:
            return self._rest.resting(number)
        held = self._slices[number]
        return None if held.master is None else held.master.dtype, tuple(m.dtype for m in held.moments)


def _is_muon(piece: Owned) -> bool:
    return piece.update.optimizer == optimizers.MUON.name


def _numbers(group: Mapping[str, Any]) -> MuonHyper:
    return MuonHyper(**{field.name: group[field.name] for field in fields(MuonHyper)})


# --- from a config ------------------------------------------------------------------------------------

_REST = {**optimizers.ADAMW.defaults, "weight_decay": TORCH_DECAY}
"""Of AdamW beside Muon."""

_OWN_RATES = {"muon_lr": MUON, "adam_lr": ADAMW}
"""DeepSpeed's keys for a part's own learning rate, over `lr`."""


def from_recipe(
    plan: Plan, owned: Sequence[Owned], recipe: ComponentSpec, update_slice: UpdateFunction = update
) -> MuonUpdater:
    """The optimizer that a config's Muon block means."""
    groups = _groups(require(recipe))
    stand_ins = [{"params": [nn.Parameter(torch.zeros(0))], **group} for group in groups]
    return MuonUpdater(plan, owned, Groups(stand_ins, {}), update_slice)


def _groups(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two groups' numbers, with torch's defaults; a key that both have means both, as in DeepSpeed."""
    muon_group = {field.name: field.default for field in fields(MuonHyper)}
    adamw_group = dict(_REST)
    groups = (muon_group, adamw_group)
    for key, value in params.items():
        for group in groups:
            if key in group:
                group[key] = value
    for key, place in _OWN_RATES.items():
        if key in params:
            groups[place]["lr"] = params[key]
    return groups
