"""Fill blocks of equal length with documents.

Documents are cut out of one stream (`stream`), put one in each block (`alone`), or put whole and several in
each block (`whole`). Every token of every document is in one block, is counted as cut, or is in a block
without a learned token, which is counted as left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from zerodrift.train.data.blocks import LEARNED, STARTS, BlockWriter
from zerodrift.train.data.report import PartCounts
from zerodrift.train.data.tokenizer import Tokens

OPEN = 64
"""Blocks that wait for documents that fit, where documents are kept whole."""

Packing = Literal["stream", "alone", "whole"]


def _marked(pieces: Iterable[tuple[Tokens, np.ndarray]]) -> Iterator[np.ndarray]:
    """Yield tokens beside their `LEARNED` and `STARTS` marks. Shape [tokens, 2]."""
    start = STARTS
    for tokens, learned in pieces:
        marks = learned.astype(np.int64) * LEARNED
        marks[:1] |= start
        start = 0 if len(marks) else start
        yield np.stack([np.asarray(tokens, dtype=np.int64), marks], axis=1)


class PartWriter:
    """Writes the documents of one part (`train`, `validation`), and counts what becomes of them."""

    def __init__(self, blocks: BlockWriter, packing: Packing, end: int) -> None:
        """`end` is the token that pads."""
        self.blocks = blocks
        self.documents = self.cut = self.cut_tokens = self.empty_blocks = 0
        self._packing, self._end = packing, end
        self._counts = np.zeros(4, np.int64)
        self._stream: list[np.ndarray] = []
        self._count = 0
        """Tokens of the stream that wait."""
        self._open: list[list[np.ndarray]] = []
        """Documents of each block that waits for more."""
        self._rooms: list[int] = []

    def add(self, pieces: Iterable[tuple[Tokens, np.ndarray]]) -> None:
        """Add a document: its tokens, and which of them are learned."""
        self.documents += 1
        if self._packing != "stream":
            self._fit(self._shortened(_marked(pieces)))
            return
        for piece in _marked(pieces):
            self._stream.append(piece)
            self._count += len(piece)
            if self._count >= OPEN * self.blocks.length:
                self._flush()

    def close(self) -> PartCounts:
        if self._count:
            self._flush()
        if self._count:
            self._write(self._stream)
        while self._rooms:
            self._write_open(0)
        return PartCounts(self.documents, *map(int, self._counts))

    def _flush(self) -> None:
        """Write the whole blocks of the stream; the rest waits for more."""
        length, waiting = self.blocks.length, np.concatenate(self._stream)
        count = len(waiting) // length * length
        for first in range(0, count, OPEN * length):
            last = min(first + OPEN * length, count)
            self._write([waiting[at : at + length] for at in range(first, last, length)])
        self._stream, self._count = [waiting[count:]], len(waiting) - count

    def _shortened(self, document: Iterable[np.ndarray]) -> np.ndarray:
        """Return as much of a document as fits a block."""
        length, count = self.blocks.length, 0
        kept: list[np.ndarray] = []
        for piece in document:
            if count < length:
                kept.append(piece)
            count += len(piece)
        self.cut += count > length
        self.cut_tokens += max(0, count - length)
        return np.concatenate(kept)[:length]

    def _fit(self, document: np.ndarray) -> None:
        """Put a document into the waiting block that it leaves the least room in."""
        fitting = [(room, at) for at, room in enumerate(self._rooms) if room >= len(document)]
        if fitting:
            _, at = min(fitting)
            self._open[at].append(document)
            self._rooms[at] -= len(document)
        else:
            self._open.append([document])
            self._rooms.append(self.blocks.length - len(document))
        fullest = self._rooms.index(min(self._rooms))
        if not self._rooms[fullest] or len(self._rooms) > (OPEN if self._packing == "whole" else 0):
            self._write_open(fullest)

    def _write_open(self, at: int) -> None:
        self._rooms.pop(at)
        self._write([np.concatenate(self._open.pop(at))])

    def _write(self, pieces: list[np.ndarray]) -> None:
        """Write a block for each piece, padded to its length."""
        if not pieces:
            return
        length, lengths = self.blocks.length, np.array([len(piece) for piece in pieces])
        marked = np.zeros((len(pieces), length, 2), np.int64)
        marked[..., 0] = self._end
        for row, piece in enumerate(pieces):
            marked[row, : len(piece)] = piece
        kept = self.blocks.write(marked[..., 0], marked[..., 1])
        self.empty_blocks += int((~kept).sum())
        used, whole = lengths[kept].sum(), kept.sum()
        learned = (marked[kept, :, 1] & LEARNED).astype(bool).sum()
        self._counts += np.array([used, learned, whole, whole * length - used])
