"""Documents to blocks of equal length: one after the other and cut, each in a block of its own, or whole ones
together in a block.

Invariant: every token of every document is in one block, is counted as cut, or is in a block that is counted
as left out because nothing in it is learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from zerodrift.train.blocks import LEARNED, STARTS, Maps
from zerodrift.train.reading import PartRead
from zerodrift.train.tokens import Tokens

OPEN = 64
"""Blocks that wait for documents that fit, where documents are kept whole."""

Way = Literal["stream", "alone", "whole"]
"""How documents come into blocks: cut out of one stream, one in each, or several whole ones in each."""


@dataclass
class MarkedTokens:
    """Tokens for the start of a block, or all of it."""

    tokens: Tokens
    marks: np.ndarray
    """`LEARNED` and `STARTS` of each."""

    def __len__(self) -> int:
        return len(self.tokens)


class Packer(Protocol):
    """A way to fill blocks."""

    def add(self, piece: MarkedTokens) -> None: ...

    def close(self) -> None: ...


@dataclass
class PartWriter:
    """Writes one part of the maps, and counts what became of its documents."""

    maps: Maps
    part: str
    way: Way
    end: int
    """The token that fills up."""
    documents: int = 0
    cut: int = 0
    cut_tokens: int = 0
    empty_blocks: int = 0
    _read: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    _packer: Packer = field(init=False)

    def __post_init__(self) -> None:
        ways: dict[Way, Callable[[PartWriter], Packer]]
        ways = {"stream": _Stream, "alone": _Alone, "whole": _Together}
        self._packer = ways[self.way](self)

    def add(self, tokens: Tokens, learned: np.ndarray) -> None:
        """A document."""
        marks = learned.astype(np.uint8) * LEARNED
        marks[:1] |= STARTS
        self.documents += 1
        self._packer.add(MarkedTokens(np.asarray(tokens, dtype=np.int64), marks))

    def close(self) -> PartRead:
        self._packer.close()
        tokens, learned, blocks, padding = self._read
        return PartRead(self.documents, tokens, learned, blocks, padding)

    def shortened(self, piece: MarkedTokens) -> MarkedTokens:
        """What of a document a block has room for."""
        length = self.maps.length
        if len(piece) <= length:
            return piece
        self.cut += 1
        self.cut_tokens += len(piece) - length
        return MarkedTokens(piece.tokens[:length], piece.marks[:length])

    def write(self, pieces: list[MarkedTokens]) -> None:
        """Blocks of which each is whole or is filled up."""
        if not pieces:
            return
        length = self.maps.length
        rooms = [length - len(piece) for piece in pieces]
        tokens = np.stack(
            [np.append(p.tokens, np.full(room, self.end)) for p, room in zip(pieces, rooms, strict=True)]
        )
        marks = np.stack(
            [np.append(p.marks, np.zeros(room, np.uint8)) for p, room in zip(pieces, rooms, strict=True)]
        )
        kept = self.maps.write(self.part, tokens, marks)
        self.empty_blocks += int((~kept).sum())
        padding = int(np.array(rooms)[kept].sum())
        whole = int(kept.sum())
        learned = int((marks[kept] & LEARNED).astype(bool).sum())
        for at, count in enumerate((whole * length - padding, learned, whole, padding)):
            self._read[at] += count


class _Stream:
    """One document after the other, cut where a block is full."""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._pieces: list[MarkedTokens] = []
        self._held = 0

    def add(self, piece: MarkedTokens) -> None:
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held >= OPEN * self._writer.maps.length:
            self._flush()

    def _flush(self) -> None:
        """Write what is whole; the rest waits for more."""
        length = self._writer.maps.length
        tokens = np.concatenate([piece.tokens for piece in self._pieces])
        marks = np.concatenate([piece.marks for piece in self._pieces])
        count = len(tokens) // length * length
        self._writer.write(
            [
                MarkedTokens(tokens[at : at + length], marks[at : at + length])
                for at in range(0, count, length)
            ]
        )
        self._pieces = [MarkedTokens(tokens[count:], marks[count:])] if count < len(tokens) else []
        self._held = len(tokens) - count

    def close(self) -> None:
        if self._held:
            self._flush()
        self._writer.write(self._pieces)


class _Alone:
    """A block for each."""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer

    def add(self, piece: MarkedTokens) -> None:
        self._writer.write([self._writer.shortened(piece)])

    def close(self) -> None:
        pass


class _Together:
    """Each goes where it leaves the least room, among blocks that wait."""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._waiting: list[list[MarkedTokens]] = []
        self._rooms: list[int] = []

    def add(self, piece: MarkedTokens) -> None:
        piece = self._writer.shortened(piece)
        fitting = [(room, at) for at, room in enumerate(self._rooms) if room >= len(piece)]
        if fitting:
            _, at = min(fitting)
            self._waiting[at].append(piece)
            self._rooms[at] -= len(piece)
        else:
            self._waiting.append([piece])
            self._rooms.append(self._writer.maps.length - len(piece))
        fullest = self._rooms.index(min(self._rooms))
        if not self._rooms[fullest] or len(self._rooms) > OPEN:
            self._take(fullest)

    def _take(self, at: int) -> None:
        pieces = self._waiting.pop(at)
        self._rooms.pop(at)
        tokens = np.concatenate([piece.tokens for piece in pieces])
        self._writer.write([MarkedTokens(tokens, np.concatenate([piece.marks for piece in pieces]))])

    def close(self) -> None:
        while self._waiting:
            self._take(0)
