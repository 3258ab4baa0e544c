"""Make the engine of a pipeline: cut the model, place this rank's pieces, free the rest.

Every rank has made the same plan of the whole model. A rank keeps the modules of its own pieces, in a tree
with the model's own paths, which an executor gets with this rank's part of the plan.

Invariant: afterwards this rank holds no values of parameters that none of its pieces uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerodrift.comm import Collectives, Mesh
from zerodrift.engine import Engine, ValueSource, ValueSources
from zerodrift.errors import UnsupportedError
from zerodrift.kernels import PackedRun
from zerodrift.pipeline.cut import Causal, Cut, check_names, prune
from zerodrift.pipeline.run import PipelineExecutor
from zerodrift.pipeline.values import make_equal
from zerodrift.plan import Plan, names_of, part, pieces_of
from zerodrift.policy import SPLIT


def pipeline_engine(
    plan: Plan, model: nn.Module, mesh: Mesh, sources: ValueSources, cut: Cut | None, schedule: Any = None
) -> Engine:
    """Make the engine of a plan that has a pipeline; `sources` are of the whole plan."""
    how = Causal.of(model) if cut is None else cut
    rank = mesh.rank("pipeline")
    mine = part(plan, rank)
    _require_trained(plan)
    pieces = [names_of(plan, piece) for piece in pieces_of(plan, rank)]
    tree = prune(model, frozenset().union(*pieces), how)
    check_names(tree, frozenset(name for row in mine.rows for name in row.names))
    _require_eager(plan, model)

    def execute(comm: Collectives) -> PipelineExecutor:
        executor = PipelineExecutor(plan, tree, comm, _known_here(plan, mine, sources))
        executor.whole = model
        make_equal(mine, executor.own_values)  # the model of the other end may have another seed
        kept = {id(parameter) for parameter in tree.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in kept and not parameter.is_meta:
                parameter.data = parameter.data.new_empty(0)
        parts = [prune(tree, names, how) for names in pieces]
        for module, names in zip(parts, pieces, strict=True):
            check_names(module, names)
        executor.cut_into(parts, how)
        return executor

    return Engine(plan, mesh, execute, schedule)


def _require_trained(plan: Plan) -> None:
    for rank in range(plan.mesh.pipeline):
        if all(not row.trained for row in part(plan, rank).rows):
            must, got = "must train something on every stage", f"stage {rank}, on which everything is frozen"
            do = "Use fewer stages, or train without a pipeline."
            raise UnsupportedError("pipeline", must, got=got, do=do)
    if plan.policy.optimizer is None:
        must = "must be a block of the config with a pipeline, whose ranks each build their part of it"
        do = "Write `optimizer: {type: AdamW, params: {...}}`."
        raise UnsupportedError("optimizer", must, got="none", do=do)


def _require_eager(plan: Plan, model: nn.Module) -> None:
    """Refuse compiled modules under schedules that split backwards, which go through the graph twice or look
    at products as they are called. The marks of `Module.compile` are private in torch (2.13 to 2.15)."""
    pipeline = plan.policy.pipeline
    if pipeline is None or pipeline.schedule not in SPLIT:
        return
    for path, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            must = f"must not be compiled under `{pipeline.schedule}`, which splits backwards"
            got = f"a compiled {type(module).__name__}"
            do = "Use `gpipe`, `1f1b` or `interleaved`, or do not compile it."
            raise UnsupportedError(path or "model", must, got=got, do=do)


@dataclass(frozen=True)
class _Named:
    """The values of a parameter that this rank knows by another of its names."""

    source: ValueSource
    name: str

    def exact(self, name: str) -> torch.dtype:
        return self.source.exact(self.name)

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        self.source.fill(self.name, start, out)

    def fill_packed(self, name: str, start: int, run: PackedRun, at: int, numel: int) -> bool:
        return self.source.fill_packed(self.name, start, run, at, numel)


def _known_here(plan: Plan, mine: Plan, sources: ValueSources) -> ValueSources:
    """Return the sources of this rank's part, by the names that it has there."""
    whole = {row.name: plan.row(row.name) for row in mine.rows}
    known = {
        name: _Named(sources[row.name], row.name)
        for name, row in whole.items()
        if row is not None and row.name in sources
    }
    return {**sources, **known}
