"""Fill blocks of equal length with documents.

Documents are cut out of one stream, put one in each block, or put whole and several in each block. Every
token of every document is in one block, is counted as cut, or is in a block without a learned token, which is
counted as left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from zerodrift.train.data.blocks import LEARNED, STARTS, BlockWriter
from zerodrift.train.data.report import PartCounts
from zerodrift.train.data.tokenizer import Tokens

OPEN = 64
"""Blocks that wait for documents that fit, where documents are kept whole."""

Packing = Literal["stream", "alone", "whole"]


@dataclass
class MarkedTokens:
    """Tokens with their `LEARNED` and `STARTS` marks."""

    tokens: Tokens
    marks: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> MarkedTokens:
        return MarkedTokens(self.tokens[part], self.marks[part])

    @staticmethod
    def joined(pieces: Sequence[MarkedTokens]) -> MarkedTokens:
        tokens, marks = [piece.tokens for piece in pieces], [piece.marks for piece in pieces]
        return MarkedTokens(np.concatenate(tokens), np.concatenate(marks))


def _marked(pieces: Iterable[tuple[Tokens, np.ndarray]]) -> Iterator[MarkedTokens]:
    start = STARTS
    for tokens, learned in pieces:
        marks = learned.astype(np.uint8) * LEARNED
        marks[:1] |= start
        start = 0 if len(marks) else start
        yield MarkedTokens(np.asarray(tokens, dtype=np.int64), marks)


@dataclass
class PartWriter:
    """Writes the documents of one part (`train`, `validation`), and counts what becomes of them."""

    blocks: BlockWriter
    part: str
    packing: Packing
    end: int
    """The token that pads."""
    documents: int = 0
    cut: int = 0
    cut_tokens: int = 0
    empty_blocks: int = 0
    _counts: np.ndarray = field(default_factory=lambda: np.zeros(4, np.int64))
    _packer: _StreamPacker | _SinglePacker | _WholePacker = field(init=False)

    def __post_init__(self) -> None:
        packers: dict[Packing, type[_StreamPacker | _SinglePacker | _WholePacker]]
        packers = {"stream": _StreamPacker, "alone": _SinglePacker, "whole": _WholePacker}
        self._packer = packers[self.packing](self)

    def add(self, pieces: Iterable[tuple[Tokens, np.ndarray]]) -> None:
        """Add a document: its tokens, and which of them are learned."""
        self.documents += 1
        self._packer.add(_marked(pieces))

    def close(self) -> PartCounts:
        self._packer.close()
        return PartCounts(self.documents, *map(int, self._counts))

    def shortened(self, document: Iterable[MarkedTokens]) -> MarkedTokens:
        """Return as much of a document as fits a block."""
        length, count = self.blocks.length, 0
        kept: list[MarkedTokens] = []
        for piece in document:
            if count < length:
                kept.append(piece)
            count += len(piece)
        self.cut += count > length
        self.cut_tokens += max(0, count - length)
        return MarkedTokens.joined(kept)[:length]

    def write(self, pieces: list[MarkedTokens]) -> None:
        """Write a block for each piece, padded to its length."""
        if not pieces:
            return
        length = self.blocks.length
        lengths = np.array([len(piece) for piece in pieces])
        tokens = np.full((len(pieces), length), self.end, np.int64)
        marks = np.zeros((len(pieces), length), np.uint8)
        for row, piece in enumerate(pieces):
            tokens[row, : len(piece)], marks[row, : len(piece)] = piece.tokens, piece.marks
        kept = self.blocks.write(self.part, tokens, marks)
        self.empty_blocks += int((~kept).sum())
        used, whole = lengths[kept].sum(), kept.sum()
        learned = (marks[kept] & LEARNED).astype(bool).sum()
        self._counts += np.array([used, learned, whole, whole * length - used])


class _StreamPacker:
    """Documents one after the other, cut where a block is full."""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._pieces: list[MarkedTokens] = []
        self._count = 0

    def add(self, document: Iterable[MarkedTokens]) -> None:
        for piece in document:
            self._pieces.append(piece)
            self._count += len(piece)
            if self._count >= OPEN * self._writer.blocks.length:
                self._flush()

    def _flush(self) -> None:
        """Write whole blocks; the rest waits for more."""
        length, whole = self._writer.blocks.length, MarkedTokens.joined(self._pieces)
        count = len(whole) // length * length
        for first in range(0, count, OPEN * length):
            last = min(first + OPEN * length, count)
            self._writer.write([whole[at : at + length] for at in range(first, last, length)])
        self._pieces = [whole[count:]] if count < len(whole) else []
        self._count = len(whole) - count

    def close(self) -> None:
        if self._count:
            self._flush()
        self._writer.write(self._pieces)


class _SinglePacker:
    """A block for each document."""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer

    def add(self, document: Iterable[MarkedTokens]) -> None:
        self._writer.write([self._writer.shortened(document)])

    def close(self) -> None:
        pass


class _WholePacker:
    """Best fit: a document goes into the waiting block that it leaves the least room in."""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._waiting: list[list[MarkedTokens]] = []
        self._rooms: list[int] = []

    def add(self, document: Iterable[MarkedTokens]) -> None:
        piece = self._writer.shortened(document)
        fitting = [(room, at) for at, room in enumerate(self._rooms) if room >= len(piece)]
        if fitting:
            _, at = min(fitting)
            self._waiting[at].append(piece)
            self._rooms[at] -= len(piece)
        else:
            self._waiting.append([piece])
            self._rooms.append(self._writer.blocks.length - len(piece))
        fullest = self._rooms.index(min(self._rooms))
        if not self._rooms[fullest] or len(self._rooms) > OPEN:
            self._write(fullest)

    def _write(self, at: int) -> None:
        self._rooms.pop(at)
        self._writer.write([MarkedTokens.joined(self._waiting.pop(at))])

    def close(self) -> None:
        while self._waiting:
            self._write(0)
