"""Weights of a checkpoint into an engine that runs: `zerodrift.load_weights(engine, path)`.

Masters take the bits of the files and storage follows; moments, step and schedule stay as they are. One
segment is on its way at a time: beside the engine a rank holds the fp32 values of what it owns of it.

Invariant: what the files have no value for keeps every bit.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from zerodrift.comm.together import together
from zerodrift.engine import steps
from zerodrift.engine.place import exchange, share_of
from zerodrift.engine.shards import Held, Piece, Shards
from zerodrift.io.matching import Strict, wanted
from zerodrift.io.weights import Files, LoadedWeights

if TYPE_CHECKING:
    from zerodrift.engine.engine import Engine


def load_weights(
    engine: Engine, path: str | os.PathLike[str], strict: Strict = True, *, quiet: bool = False
) -> LoadedWeights:
    """Replace the weights of `engine` by those of safetensors files: one file, an index, or a folder.

    `strict` is as in `initialize`. A call of all ranks. What is wrong with the files is found before
    anything is replaced; if reading fails later, weights are partly replaced and the error says so.
    """
    steps.require_whole_model(engine.held, "load_weights", "Pass `weights` to `initialize_pipeline`.")
    comm, plan, model = engine.comm, engine.plan, engine.module
    shown = engine.mesh.rank() == 0 and not quiet
    files: Files | None = None
    with together(comm):
        files = Files.open(path, model, wanted(plan.rows, plan.buffers, model), strict)
        files.show(shown, engine.mesh.size("shard"))
    if files is None:
        raise AssertionError("unreachable")
    shards = Shards(engine)
    try:
        with torch.no_grad():
            for unit in engine.units:
                unit.release()
            for piece in shards.pieces():
                if isinstance(piece, Piece):
                    _replace(engine, files, piece)
                else:
                    _replace_held(engine, files, piece)
            shards.spread()
            _buffers(engine, files)
        done = files.finish(model, comm)
    finally:
        files.close()
    if shown:
        print(done, flush=True)
    return done


def _replace(engine: Engine, files: Files, piece: Piece) -> None:
    """The rows of one segment."""
    segment = piece.segment
    if not any(files.holds(row.name) for row in segment.rows):
        return
    values = piece.weights()  # a copy of the master; storage itself where there is none
    mine = share_of(segment, segment.rank)
    start = 0 if values.numel() == segment.spec.padded else mine.start
    with together(engine.comm):
        for row in segment.rows:
            low, high = max(row.offset, mine.start), min(row.offset + row.numel, mine.stop)
            if low < high and files.holds(row.name):
                first = segment.first_of(row) + low - row.offset
                files.fill(row.name, first, values[low - start : high - start])
    exchange(segment, values, engine.comm)
    if piece.updated:
        piece.set_weights(values)


def _replace_held(engine: Engine, files: Files, piece: Held) -> None:
    """The same where ranks hold what they own and nothing else: each reads its own."""
    values = piece.weights()
    with together(engine.comm):
        for span in piece.held:
            if files.holds(span.row.name):
                files.fill(span.row.name, span.start, values[span.place])
    piece.set_weights(values)


def _buffers(engine: Engine, files: Files) -> None:
    """Rank 0 reads them, and everybody gets its bits."""
    found = dict(engine.module.named_buffers())
    rows = [row for row in engine.plan.buffers if files.holds(row.name)]
    with together(engine.comm):
        for row in rows:
            if engine.mesh.rank("data") == 0:
                flat = torch.empty(row.numel, dtype=row.storage.torch)
                files.fill(row.name, 0, flat)
                found[row.name].copy_(flat.view(row.shape))
    for row in rows:
        engine.comm.broadcast(found[row.name], 0, "data")
