"""Weights of a checkpoint into an engine that runs: `zerodrift.load_weights(engine, path)`.

Masters take the bits of the files and storage follows; moments, step and schedule stay as they are. One
segment is on its way at a time: beside the engine a rank holds the fp32 values of what it owns of it. The
stages of a pipeline each read their own, in step.

Invariant: what the files have no value for keeps every bit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.shards import SegmentShard, Shards
from zerodrift.io.safetensors.matching import Strict, expected
from zerodrift.io.safetensors.weights import LoadedWeights, SafetensorsWeights
from zerodrift.plan.stages import named, part
from zerodrift.plan.table import Row

if TYPE_CHECKING:
    from zerodrift.engine.engine import Engine


def load_weights(
    engine: Engine, path: str | os.PathLike[str], strict: Strict = True, *, quiet: bool = False
) -> LoadedWeights:
    """Replace the weights of `engine` by those of safetensors files: one file, an index, or a folder.

    `strict` is as in `initialize`. A call of all ranks. What is wrong with the files is found before
    anything is replaced; if reading fails later, weights are partly replaced and the error says so.
    """
    comm, plan, model = engine.comm, engine.plan, engine.whole
    shown = engine.mesh.rank() == 0 and not quiet
    files: SafetensorsWeights | None = None
    with raise_on_all_ranks(comm):
        files = SafetensorsWeights.open(path, model, expected(plan.rows, plan.buffers, model), strict)
        files.show(shown, engine.mesh.size("shard") * engine.mesh.size("pipeline"))
    if files is None:
        raise AssertionError("unreachable")
    shards = Shards(engine)
    try:
        with torch.no_grad():
            engine.executor.drop()
            for piece in _in_step(engine, shards):
                if piece is not None:
                    _replace(engine, files, piece)
                else:
                    with raise_on_all_ranks(comm):
                        pass
            shards.sync_storage()
            _buffers(engine, files)
        done = files.finish(model, comm)
    finally:
        files.close()
    if shown:
        print(done, flush=True)
    return done


def _in_step(engine: Engine, shards: Shards) -> Iterator[SegmentShard | None]:
    """The pieces of this rank, and None until every stage of a pipeline has had its last: all ranks agree
    after each that it could be read."""
    plan = engine.plan
    most = max(len(part(plan, rank).segments) for rank in range(plan.mesh.pipeline))
    yield from itertools.islice(itertools.chain(shards.pieces(), itertools.repeat(None)), most)


def _name(engine: Engine, row: Row) -> str:
    """What the files are known to have for a row, by the first of its names in the whole plan."""
    return named(engine.plan, row).name


def _replace(engine: Engine, files: SafetensorsWeights, piece: SegmentShard) -> None:
    """The rows of one piece: each rank reads what it fills of them."""
    values = piece.weights()  # a copy of the master; storage itself where there is none
    with raise_on_all_ranks(engine.comm):
        for span in piece.filled:
            name = _name(engine, span.row)
            if files.holds(name):
                files.fill(name, span.start, values[span.place])
    if any(files.holds(_name(engine, row)) for row in piece.rows):
        piece.set_filled(values, engine.comm)


def _buffers(engine: Engine, files: SafetensorsWeights) -> None:
    """One data rank reads them, of a pipeline those of its stage, and the others get its bits."""
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
