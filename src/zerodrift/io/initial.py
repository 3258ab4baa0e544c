"""Where each value of a model comes from when its engine is made.

Files where a checkpoint has it; the model's own where the model has memory for it; what its module would
have done to it where neither is there (`model/recipe.py`).

Invariant: every parameter and buffer has one of the three, the same on every rank, or there is one error on
all of them that names all that have none.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.place import ValueSource, ValueSources
from zerodrift.errors import ModelError, Problems, RankError
from zerodrift.io.safetensors.matching import Strict, dtypes, expected
from zerodrift.io.safetensors.weights import LoadedWeights, SafetensorsWeights
from zerodrift.model import recipe
from zerodrift.model.document import listed
from zerodrift.model.dtensors import is_dtensor
from zerodrift.model.sources import describe
from zerodrift.model.spec import ModelSpec
from zerodrift.plan.table import Plan

TODO = (
    "Give weights that have them, or build the model inside `zerodrift.empty()` with parameters that are "
    "written in place, as the functions of `torch.nn.init` do."
)


@dataclass(slots=True)
class InitialValues:
    """The first values of one model."""

    model: nn.Module
    spec: ModelSpec
    """The model, and the dtypes of the checkpoint where there is one."""
    files: SafetensorsWeights | None
    comm: Collectives

    @staticmethod
    def begin(
        model: nn.Module, weights: str | os.PathLike[str] | None, strict: Strict, comm: Collectives
    ) -> InitialValues:
        """Look at the model, and at the headers of the files. A call of all ranks."""
        sources: list[InitialValues] = []
        with raise_on_all_ranks(comm):
            spec, files = describe(model), None
            if weights is not None:
                _require_plain(model)
                files = SafetensorsWeights.open(
                    weights, model, expected(spec.parameters, spec.buffers, model), strict
                )
                spec = replace(spec, checkpoint=tuple(dtypes(files.match).items()))
            sources.append(InitialValues(model, spec, files, comm))
        return sources[0]

    def show(self, shown: bool) -> None:
        """Show a bar while files are read, where that helps."""
        if self.files is not None:
            self.files.show(shown, self.comm.mesh.size("shard"))

    def sources(self, plan: Plan) -> ValueSources:
        """Sources of everything that the model itself has no values for. A call of all ranks."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        files, bare = self.files, {}
        rows: dict[str, ValueSource] = {}
        for row in plan.rows:
            if files is not None and files.holds(row.name):
                rows[row.name] = files
            elif row.name in parameters and parameters[row.name].is_meta:
                bare[row.name] = parameters[row.name]
        buffers: dict[str, ValueSource] = {}
        if files is not None:
            buffers = {row.name: files for row in plan.buffers if files.holds(row.name)}
        with raise_on_all_ranks(self.comm):
            _require(bare, [n for n, b in self.model.named_buffers() if b.is_meta and n not in buffers])
        if len(set(self.comm.all_gather_object(_fingerprint(rows, bare)))) > 1:
            raise RankError(
                "model",
                "must be built alike on every rank",
                got="parameters with memory, or values that constructors computed, that differ between ranks",
                do="Build it with the same code, and the same seed on every rank.",
            )
        # Rank 0's seed, so that values do not depend on how many ranks there are.
        initial = _Initial(recipe.Initial(bare, self.comm.broadcast_object(torch.initial_seed(), 0)))
        return ValueSources({**rows, **dict.fromkeys(bare, initial)}, buffers)

    def finish(self) -> LoadedWeights | None:
        """Close the files; what was read. A call of all ranks."""
        return None if self.files is None else self.files.finish(self.model, self.comm)


def _require_plain(model: nn.Module) -> None:
    spread = [name for name, parameter in model.named_parameters() if is_dtensor(parameter)]
    if spread:
        raise ModelError(
            "weights",
            "must be read where parameters are plain tensors",
            got=f"DTensors: {listed(spread)}",
            do="Load them into the model before `parallelize_module`.",
        )


def _require(bare: dict[str, nn.Parameter], buffers: list[str]) -> None:
    reasons: dict[str, list[str]] = {}
    for name, why in recipe.refusals(bare.items()):
        reasons.setdefault(why, []).append(name)
    problems = Problems()
    for why, names in reasons.items():
        must = "must have first values, from a checkpoint or their own module"
        problems.add(listed(names), must, got=why, do=TODO)
    if buffers:
        problems.add(listed(buffers), "must have values, as buffers", got="the meta device", do=TODO)
    problems.raise_as(ModelError)


def _fingerprint(rows: dict[str, ValueSource], bare: dict[str, nn.Parameter]) -> str:
    """A digest of who fills what, and of what recipes remember of computed values."""
    digest = hashlib.sha256()
    for name in rows:
        digest.update(f"{name} from files\n".encode(errors="surrogatepass"))
    for name, parameter in bare.items():
        digest.update(f"{name} from its module\n".encode(errors="surrogatepass"))
        written = recipe.of(parameter)
        for operation in written.operations if written is not None else ():
            for value in (*operation.args, *operation.kwargs.values()):
                if isinstance(value, torch.Tensor):
                    digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                elif isinstance(value, (bool, int, float, str)):
                    digest.update(repr(value).encode())
    return digest.hexdigest()


class _Initial:
    """First values by recipe; an element that nobody wrote is an error that names its parameter."""

    def __init__(self, recipes: recipe.Initial) -> None:
        self._recipes = recipes

    def exact(self, name: str) -> torch.dtype:
        return self._recipes.exact(name)

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        try:
            self._recipes.fill(name, start, out)
        except recipe.Unwritten as error:
            must = "must be initialized as a whole by its own module"
            raise ModelError(name, must, got="elements that nobody wrote", do=TODO) from error
