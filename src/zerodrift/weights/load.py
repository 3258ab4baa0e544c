"""Load weights from safetensors files straight into the slices that ranks own.

The ranks that share one copy of the model read each byte once between them. `initial_values` chooses the
source of each value of a new engine: files, the model's own memory, or the initialization of its module.

Invariant: master weights have the bits of the files, and storage has them rounded once. A parameter that is
not in the files keeps every bit. No rank holds more of the files than the reader's buffer.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from zerodrift.checkpoint import kind_at
from zerodrift.comm import Collectives, raise_on_all_ranks
from zerodrift.engine import Engine, SegmentShard, ValueSource, ValueSources
from zerodrift.errors import ModelError, Problems, RankError, first_of
from zerodrift.kernels import PackedRun, narrow
from zerodrift.model import ModelSpec, describe, is_dtensor, list_tensors, listed, recipe
from zerodrift.plan import Plan, part, whole_row
from zerodrift.weights.boxes import Box, within
from zerodrift.weights.matching import (
    ExpectedTensor,
    Strict,
    TensorPlaces,
    dtypes,
    expected_tensors,
    match,
)
from zerodrift.weights.quantised import copy_codes, decode_quantised, has_whole_blocks
from zerodrift.weights.reader import ProgressBar, SafetensorsReader

WINDOW = 1 << 20
"""Number of elements that are compared at a time if files hold a tied parameter twice."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights that were loaded from safetensors: how many bytes, how fast, and which names did not match."""

    path: str
    bytes: int
    """Bytes read by all ranks together, headers not counted."""
    most: int
    """Bytes read by the rank that read most."""
    seconds: float
    """Time of the slowest rank."""
    peak: int
    """Peak of resident bytes, of the rank with the highest."""
    missing: tuple[str, ...]
    """Names that kept the model's own values."""
    unexpected: tuple[str, ...]
    """Names in the files that were not read."""

    def __str__(self) -> str:
        rate = self.bytes / self.seconds if self.seconds else 0.0
        text = (
            f"weights     {_size(self.bytes)} of {self.path} in {self.seconds:.1f} s, {_size(rate)}/s; "
            f"peak memory {_size(self.peak)} per rank"
        )
        if self.missing:
            text += f"\n            {first_of(self.missing, 3)} not in the files: the model's own values"
        if self.unexpected:
            text += f"\n            {first_of(self.unexpected, 3)} in the files not read"
        return text


class SafetensorsWeights:
    """The tensors of one checkpoint as a source of values."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        want: Sequence[ExpectedTensor],
        strict: Strict,
        sharing: int = 0,
    ) -> None:
        """Read the headers and match them with the model, without reading a weight.

        A progress bar is shown unless `sharing`, the number of ranks that share the reading, is 0.
        """
        where = Path(path).expanduser()
        kind_at(where)
        self.match = match(where, list_tensors(where), model, want, strict)
        total = sum(tensor.stop - tensor.start for tensor in self.match.tensors)
        self._bar = ProgressBar(f"weights of {where}", total // max(1, sharing), sharing > 0)
        self._reader = SafetensorsReader(self._bar)
        self._begin = time.monotonic()

    def holds(self, name: str) -> bool:
        return name in self.match.filled

    def exact(self, name: str) -> torch.dtype:
        return self.match.filled[name].exact.torch

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read the elements of a parameter from `start` on into flat memory, cast to its dtype."""
        filled = self.match.filled[name]
        self._read(filled.boxes, start, out)
        for other in filled.again:
            self._compare(name, filled, other, start, out.numel())

    def _read(self, boxes: tuple[Box, ...], start: int, out: torch.Tensor) -> None:
        for box in within(boxes, start, start + out.numel()):
            quantised = self.match.quantised.get(box.number)
            if quantised is not None:
                decode_quantised(quantised, self._reader, box, out, start)
            else:
                self._reader.read(self.match.tensors[box.number], box, out, start)

    def fill_packed(self, name: str, start: int, run: PackedRun, at: int, numel: int) -> bool:
        """Copy `numel` codes and their scales into a run from element `at` on, if the files hold them."""
        filled, form = self.match.filled[name], narrow.form_of(run.dtype)
        if filled.again or not has_whole_blocks(filled.boxes):
            return False
        sources = [self.match.quantised.get(box.number) for box in filled.boxes]
        if not all(source and form.keeps(source.form, source.shape[-1]) for source in sources):
            return False
        for box in within(filled.boxes, start, start + numel):
            place = at + box.start - start
            copy_codes(self.match.quantised[box.number], self._reader, box.origin, run, place, box.numel)
        return True

    def _compare(
        self, name: str, filled: TensorPlaces, other: tuple[Box, ...], start: int, numel: int
    ) -> None:
        """Raise if the files hold a tied parameter twice with different values."""
        dtype = torch.float32 if filled.exact.is_floating else filled.exact.torch
        for first in range(start, start + numel, WINDOW):
            count = min(WINDOW, start + numel - first)
            one, two = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
            self._read(filled.boxes, first, one)
            self._read(other, first, two)
            if not torch.equal(one, two):
                second = self.match.tensors[other[0].number].name
                must = f"must have the values of `{second}`, which the model ties to it"
                do = "Build the model untied, or remove the wrong one."
                raise ModelError(name, must, got="others in the files", do=do)

    def close(self) -> None:
        self._reader.close()
        self._bar.close()

    def finish(self, model: nn.Module, comm: Collectives) -> LoadedWeights:
        """Close the files, and sum up what all ranks read."""
        self.close()
        if hasattr(model, "base_model_prefix"):  # `from_pretrained` sets it too, to save in the same form
            model._weight_conversions = self.match.conversions  # type: ignore[assignment]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        mine = (self._reader.count, time.monotonic() - self._begin, peak)
        counts, seconds, peaks = zip(*comm.all_gather_object(mine), strict=True)
        names = tuple(self.match.missing), tuple(self.match.unexpected)
        return LoadedWeights(self.match.path, sum(counts), max(counts), max(seconds), max(peaks), *names)


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


# --- into a new engine -----------------------------------------------------------------------------------


def open_weights(
    model: nn.Module,
    weights: str | os.PathLike[str] | None,
    strict: Strict,
    comm: Collectives,
    shown: bool = False,
) -> tuple[ModelSpec, SafetensorsWeights | None]:
    """Describe the model with the dtypes of its files, and open these. `shown` adds a progress bar.
    Collective."""
    with raise_on_all_ranks(comm):
        spec = describe(model)
        if weights is None:
            return spec, None
        if spread := [name for name, value in model.named_parameters() if is_dtensor(value)]:
            must = "must be read where parameters are plain tensors"
            got, do = f"DTensors: {listed(spread)}", "Load them before `parallelize_module`."
            raise ModelError("weights", must, got=got, do=do)
        want = expected_tensors(spec.parameters, spec.buffers, model)
        sharing = comm.mesh.size("shard") if shown else 0
        files = SafetensorsWeights(weights, model, want, strict, sharing)
        return replace(spec, checkpoint=tuple(dtypes(files.match).items())), files


def initial_values(
    plan: Plan, model: nn.Module, files: SafetensorsWeights | None, comm: Collectives
) -> ValueSources:
    """Return the sources of the parameters and buffers that the model has no memory for. Collective.

    All ranks raise one error if any has no source, with the names of all, or if ranks have other sources.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rows: dict[str, ValueSource] = {}
    bare: dict[str, nn.Parameter] = {}
    for row in plan.rows:
        if files is not None and files.holds(row.name):
            rows[row.name] = files
        elif row.name in parameters and parameters[row.name].is_meta:
            bare[row.name] = parameters[row.name]
    buffers: dict[str, ValueSource] = {}
    if files is not None:
        buffers = {row.name: files for row in plan.buffers if files.holds(row.name)}
    with raise_on_all_ranks(comm):
        _check_sources(bare, [n for n, b in model.named_buffers() if b.is_meta and n not in buffers])
    if len(set(comm.all_gather_object(_fingerprint(rows, bare)))) > 1:
        got = "parameters with memory, or values that constructors computed, that differ between ranks"
        do = "Build it with the same code, and the same seed on every rank."
        raise RankError("model", "must be the same on every rank", got=got, do=do)
    # Rank 0's seed, so that values do not depend on the number of ranks.
    seed = comm.broadcast_object(torch.initial_seed(), 0)
    return {**rows, **dict.fromkeys(bare, recipe.RecipeValues(bare, seed)), **buffers}


def _check_sources(bare: dict[str, nn.Parameter], buffers: list[str]) -> None:
    reasons: dict[str, list[str]] = {}
    for name, why in recipe.list_obstacles(bare.items()):
        reasons.setdefault(why, []).append(name)
    problems = Problems()
    for why, names in reasons.items():
        must = "must have first values, from a checkpoint or their own module"
        problems.add(listed(names), must, got=why, do=recipe.TODO)
    if buffers:
        problems.add(listed(buffers), "must have values, as buffers", got="the meta device", do=recipe.TODO)
    problems.raise_as(ModelError)


def _fingerprint(rows: dict[str, ValueSource], bare: dict[str, nn.Parameter]) -> str:
    """Return a digest of the source of each parameter, and of the values that constructors computed."""
    digest = hashlib.sha256()
    for name in rows:
        digest.update(f"{name} from files\n".encode(errors="surrogatepass"))
    for name, parameter in bare.items():
        digest.update(f"{name} from its module\n".encode(errors="surrogatepass"))
        written = recipe.find_recipe(parameter)
        for operation in written.operations if written is not None else ():
            for value in (*operation.args, *operation.kwargs.values()):
                if isinstance(value, torch.Tensor):
                    digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                elif isinstance(value, (bool, int, float, str)):
                    digest.update(repr(value).encode())
    return digest.hexdigest()


# --- into an engine that runs -----------------------------------------------------------------------------


def load_weights(
    engine: Engine, path: str | os.PathLike[str], strict: bool | Sequence[str] = True, *, quiet: bool = False
) -> LoadedWeights:
    """Replace the weights of an engine with those of safetensors files. Moments and the step count stay.

    Every rank calls it and reads its own slices. Names that do not match are an error unless `strict` is
    False or has a glob for them.
    """
    comm, plan, model = engine.comm, engine.plan, engine.whole
    shown = engine.mesh.rank() == 0 and not quiet
    with raise_on_all_ranks(comm):
        want = expected_tensors(plan.rows, plan.buffers, model)
        sharing = engine.mesh.size("shard") * engine.mesh.size("pipeline") if shown else 0
        files = SafetensorsWeights(path, model, want, strict, sharing)
    # Pipeline stages read their own segments. All ranks take part in one check of errors after each segment.
    most = max(len(part(plan, rank).segments) for rank in range(plan.mesh.pipeline))
    try:
        with torch.no_grad():
            engine.executor.drop()
            pieces = engine.pieces()
            for _ in range(most):
                _replace(engine, files, next(pieces, None))
            engine.sync_storage()
            _replace_buffers(engine, files)
        result = files.finish(model, comm)
    finally:
        files.close()
    if shown:
        print(result, flush=True)
    return result


def _replace(engine: Engine, files: SafetensorsWeights, piece: SegmentShard | None) -> None:
    """Replace the weights of one piece, of which each rank reads its share."""
    # A copy of the master weights, or storage itself if there are none.
    values = torch.empty(0) if piece is None else piece.weights()
    with raise_on_all_ranks(engine.comm):
        for span in () if piece is None else piece.filled:
            name = whole_row(engine.plan, span.row).name
            if files.holds(name):
                files.fill(name, span.start, values[span.place])
    if piece is not None and any(files.holds(whole_row(engine.plan, row).name) for row in piece.rows):
        piece.set_filled(values, engine.comm)
        piece.set_feedback(None)


def _replace_buffers(engine: Engine, files: SafetensorsWeights) -> None:
    """Read the buffers of this pipeline stage on one data rank, and broadcast them."""
    buffers = dict(engine.module.named_buffers())
    rows = [row for row in engine.plan.buffers if row.name in buffers and files.holds(row.name)]
    with raise_on_all_ranks(engine.comm):
        for row in rows:
            if engine.mesh.rank("data") == 0:
                flat = torch.empty(row.numel, dtype=row.storage.torch)
                files.fill(row.name, 0, flat)
                buffers[row.name].copy_(flat.view(row.shape))
    for row in rows:
        engine.comm.broadcast(buffers[row.name], 0, "data")
