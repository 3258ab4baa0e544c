"""Run the trainer's model with some cells of the sampler.

Every run is an engine of a copy of the model: with the sampler's values where a cell says so, with rules for
the parameters that compute in other dtypes, and with rounded activations.

Invariant: a run without cells is the trainer's own. A run with all cells has every tensor and every dtype of
the sampler. Equal bits give equal runs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from zerodrift.dtypes import DType
from zerodrift.inspect.audit.run import Subject, running
from zerodrift.inspect.audit.signals import Signals, forward_signals
from zerodrift.inspect.audit.tokens import Batch
from zerodrift.inspect.audit.variants import make_rule, with_rules
from zerodrift.inspect.drift.activations import ActivationRounder
from zerodrift.inspect.drift.differences import DifferentCell, sampler_mode
from zerodrift.inspect.drift.sampler_dtypes import SamplerDtypes
from zerodrift.inspect.drift.sampler_weights import SamplerTensor
from zerodrift.inspect.drift.trainer import TrainerSide, set_parameter
from zerodrift.mesh import MeshShape
from zerodrift.plan.build import build
from zerodrift.plan.table import Row
from zerodrift.policy.nouns import Policy
from zerodrift.policy.rules import PIN

Cells = Collection[DifferentCell]


@dataclass(slots=True)
class SideReplays:
    """Runs of a trainer's model, each made once."""

    trainer: TrainerSide
    table: SamplerDtypes
    tensors: Mapping[str, SamplerTensor]
    """The sampler's tensors."""
    compute: Mapping[str, DType]
    """First name -> the sampler's compute dtype."""
    batches: Sequence[Batch]
    valued: Collection[str]
    """Names with a cell for their values; the values of others come with their dtypes."""
    done: dict[frozenset[DifferentCell], tuple[Signals, ActivationRounder]] = field(default_factory=dict)

    def run(self, cells: Cells) -> Signals:
        """Run with these cells of the sampler, and the trainer's everywhere else."""
        key = frozenset(cells)
        if key not in self.done:
            values: dict[str, Tensor] = {}
            for cell in cells:
                for name in cell.names:
                    with_dtype = cell.kind in ("dtype", "compute") and name not in self.valued
                    if cell.kind in ("tensor", "weights") or (with_dtype and name in self.tensors):
                        values[name] = self.tensors[name].values
            asked = dict(self.table.activations)
            self.done[key] = self._run(
                values, cells, {cell.key: asked[cell.key] for cell in cells if cell.kind == "activation"}
            )
        return self.done[key][0]

    def run_sampler(self, cells: Cells) -> Signals:
        """Run with all tensors of the sampler, differing or not, and its whole table."""
        values = {name: tensor.values for name, tensor in self.tensors.items()}
        return self._run(values, cells, dict(self.table.activations))[0]

    def seen(self, cells: Cells) -> ActivationRounder:
        """Activations of such a run, by key, and their dtypes."""
        self.run(cells)
        return self.done[frozenset(cells)][1]

    def _run(
        self, values: Mapping[str, Tensor], cells: Cells, asked: Mapping[str, DType]
    ) -> tuple[Signals, ActivationRounder]:
        buffers = self.table.buffers if any(cell.kind == "buffers" for cell in cells) else None

        def make() -> nn.Module:
            module = copy.deepcopy(self.trainer.module)
            _set_values(module, values, self.tensors)
            for buffer in module.buffers() if buffers is not None else ():
                if buffers is not None and buffer.is_floating_point():
                    buffer.copy_(buffer.to(buffers.torch).to(buffer.dtype))
            return module

        rounder = ActivationRounder(asked)
        with (
            running(Subject(make), self._policy(cells), MeshShape()) as engine,
            rounder.hooks(engine.module, self.trainer.head),
        ):
            return forward_signals(engine, self.batches, rounder.around), rounder

    def _policy(self, cells: Cells) -> Policy:
        """The trainer's policy, with a rule for each parameter that would not compute as the cells say."""
        plan = self.trainer.plan
        policy, mode = plan.policy, plan.policy.mode
        if any(cell.kind == "compute" for cell in cells):
            # Demands on every parameter's forward were made of the trainer's mode.
            mode = sampler_mode(self.table, plan)
            forward = ("storage", "gather", "compute")
            demands = tuple(demand for demand in policy.demands if demand[0] not in forward)
            policy = replace(policy, mode=mode, demands=demands, safe=policy.safe if mode.autocast else ())
        theirs = {name for cell in cells if cell.kind in ("compute", "dtype") for name in cell.names}
        if not theirs and mode is plan.policy.mode:
            return policy
        rules = []
        for row, now in zip(plan.rows, build(policy, self.trainer.spec, MeshShape()).rows, strict=True):
            if not row.columns.compute.is_floating:
                continue
            sets = _forward_columns(row)
            if row.name in theirs:
                sets = dict.fromkeys(sets, str(self.compute[row.name]))
            unpinned = row.name in theirs and now.columns.pinned and sets["compute"] != "fp32"
            if sets != _forward_columns(now) or unpinned:
                pin = sets["compute"] == "fp32" and mode.autocast
                cause = "the other side"
                rules += [make_rule(n, dict(PIN) if pin else sets, pin=pin, why=cause) for n in row.names]
        return with_rules(policy, rules)


def _forward_columns(row: Row) -> dict[str, str]:
    columns = row.columns
    dtypes = {"storage": columns.storage.dtype, "gather": columns.gather, "compute": columns.compute}
    return {column: str(dtype) for column, dtype in dtypes.items()}


def _set_values(module: nn.Module, values: Mapping[str, Tensor], held: Collection[str]) -> None:
    """Set other values. A tied parameter stays tied, except under names that the sampler holds too."""
    ties: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        ties.setdefault(id(parameter), []).append(name)
    tied = {name: names for names in ties.values() for name in names}
    buffers = dict(module.named_buffers())
    for name, value in values.items():
        if name in buffers:
            buffers[name].copy_(value)
            continue
        parameter = nn.Parameter(value.clone(), requires_grad=False)
        for other in tied[name]:
            if other == name or other not in held:
                set_parameter(module, other, parameter)
