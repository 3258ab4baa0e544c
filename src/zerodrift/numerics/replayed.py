"""The trainer's model, run with some cells of the other side.

Every run is an engine of a copy of the model: with the other side's values where a cell says so, under the
trainer's policy with rules for the parameters that are computed in other dtypes, and with the roundings of
activations around its forwards.

Invariant: a run without cells is the trainer's own, and one with all of them has every tensor and every dtype
of the other side; equal bits give equal runs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zerodrift.dtypes import DType
from zerodrift.inspect.trace.places import ModulePaths
from zerodrift.mesh import MeshShape
from zerodrift.numerics.activations import Activations, Done, at_modules
from zerodrift.numerics.runs import Batch, Subject, running
from zerodrift.numerics.sampler import SamplerDtypes
from zerodrift.numerics.sent import SentTensor
from zerodrift.numerics.signals import Signals, signals
from zerodrift.numerics.trainer import Trainer, put
from zerodrift.numerics.unlike import UnlikeCell, mode_of
from zerodrift.numerics.variants import rule
from zerodrift.plan.build import build
from zerodrift.plan.table import Row
from zerodrift.policy.nouns import Mode, Policy
from zerodrift.policy.rules import PIN

Chosen = Collection[UnlikeCell]


@dataclass(slots=True)
class Replays:
    """Runs of one trainer's model, each made once."""

    trainer: Trainer
    table: SamplerDtypes
    sent: Mapping[str, SentTensor]
    """What the other side has, by name."""
    dtypes: Mapping[str, DType]
    """What it computes parameters in, by first name."""
    batches: Sequence[Batch]
    valued: Collection[str]
    """Names that have a cell for their values; those of others come with their dtypes."""
    done: dict[frozenset[UnlikeCell], tuple[Signals, Done]] = field(default_factory=dict)

    def of(self, chosen: Chosen) -> Signals:
        """With these cells of the other side, and the trainer's everywhere else."""
        key = frozenset(chosen)
        if key not in self.done:
            values = {name: self.sent[name].values for cell in chosen for name in self._valued(cell)}
            self.done[key] = self._run(values, chosen, self._activations(chosen))
        return self.done[key][0]

    def does(self, chosen: Chosen) -> Done:
        """What such a run does beside products, and in which dtypes."""
        self.of(chosen)
        return self.done[frozenset(chosen)][1]

    def without(self, left_out: UnlikeCell, cells: Chosen) -> Signals:
        """With all but one of them."""
        return self.of([cell for cell in cells if cell != left_out])

    def whole(self, cells: Chosen) -> tuple[Signals, Done]:
        """The other side: all of its tensors, differing or not, and its whole table."""
        values = {name: tensor.values for name, tensor in self.sent.items()}
        return self._run(values, cells, dict(self.table.activations))

    def _valued(self, cell: UnlikeCell) -> list[str]:
        """Names whose values a cell brings."""
        if cell.of in ("tensor", "weights"):
            return list(cell.names)
        if cell.of in ("dtype", "compute"):
            return [name for name in cell.names if name in self.sent and name not in self.valued]
        return []

    def _activations(self, chosen: Chosen) -> dict[str, DType]:
        asked = dict(self.table.activations)
        return {cell.key: asked[cell.key] for cell in chosen if cell.of == "activation"}

    def _run(
        self, values: Mapping[str, Tensor], chosen: Chosen, asked: Mapping[str, DType]
    ) -> tuple[Signals, Done]:
        module, done = self.trainer.module, Done()
        rounded = self.table.buffers if any(cell.of == "buffers" for cell in chosen) else None

        def made() -> nn.Module:
            built = copy.deepcopy(module)
            _overlay(built, values, self.sent)
            if rounded is not None:
                round_buffers(built, rounded)
            return built

        subject, policy = Subject(made), self._policy(chosen)
        with running(subject, policy, MeshShape()) as engine:
            around = _around(asked, done)

            def key_of(key: str, tensor: Tensor) -> Tensor:
                done.note(key, tensor.dtype)
                dtype = asked.get(key)
                return tensor if dtype is None else tensor.to(dtype.torch).to(tensor.dtype)

            with at_modules(engine.module, self.trainer.head, key_of):
                return signals(engine, self.batches, around), done

    # --- dtypes ---------------------------------------------------------------------------------------

    def _policy(self, chosen: Chosen) -> Policy:
        """The trainer's, with a rule for each parameter that would not compute as these cells say."""
        plan = self.trainer.plan
        policy, mode = plan.policy, plan.policy.mode
        if any(cell.of == "compute" for cell in chosen):
            mode = mode_of(self.table, plan)
            policy = _in_mode(policy, mode)
        theirs = {name for cell in chosen if cell.of in ("compute", "dtype") for name in cell.names}
        if not theirs and mode is plan.policy.mode:
            return policy
        rules = []
        for row, now in zip(plan.rows, build(policy, self.trainer.spec, MeshShape()).rows, strict=True):
            if not row.columns.compute.is_floating:
                continue
            sets = _as_there(self.dtypes[row.name]) if row.name in theirs else _as_here(row)
            held = _as_here(now)
            if sets != held or (row.name in theirs and now.columns.pinned and sets["compute"] != "fp32"):
                pin = sets["compute"] == "fp32" and mode.autocast
                rules += [
                    rule(name, dict(PIN) if pin else sets, pin=pin, why="the other side")
                    for name in row.names
                ]
        return replace(policy, rules=(*policy.rules, *rules))


def _as_there(dtype: DType) -> dict[str, str]:
    return {"storage": str(dtype), "gather": str(dtype), "compute": str(dtype)}


def _as_here(row: Row) -> dict[str, str]:
    columns = row.columns
    return {
        "storage": str(columns.storage.dtype),
        "gather": str(columns.gather),
        "compute": str(columns.compute),
    }


def _in_mode(policy: Policy, mode: Mode) -> Policy:
    """The same decisions, from another recipe: what was said of every parameter's forward was said of the
    first."""
    forward = ("storage", "gather", "compute")
    demands = tuple(demand for demand in policy.demands if demand[0] not in forward)
    return replace(policy, mode=mode, demands=demands, safe=() if not mode.autocast else policy.safe)


# --- values -------------------------------------------------------------------------------------------


def _overlay(module: nn.Module, values: Mapping[str, Tensor], held: Collection[str]) -> None:
    """Other values. A tied parameter stays one, but under the names that the other side holds apart."""
    ties: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        ties.setdefault(id(parameter), []).append(name)
    names_of = {name: names for names in ties.values() for name in names}
    buffers = dict(module.named_buffers())
    for name, value in values.items():
        if name in buffers:
            buffers[name].copy_(value)
            continue
        parameter = nn.Parameter(value.clone(), requires_grad=False)
        for other in names_of[name]:
            if other == name or other not in held:
                put(module, other, parameter)


def round_buffers(module: nn.Module, dtype: DType) -> None:
    """Floating buffers to a dtype and back."""
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.copy_(buffer.to(dtype.torch).to(buffer.dtype))


def _around(asked: Mapping[str, DType], done: Done) -> Callable[[ModulePaths], AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def around(path: ModulePaths) -> Iterator[None]:
        with torch.no_grad(), Activations(path, asked, done):
            yield

    return around
