"""Documents to blocks of equal length: one after the other and cut, each in a block of its own, or whole ones
together in a block.

Invariant: every token of every document is in one block, is counted as cut, or is in a block that is counted
as left out because nothing in it is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from zerodrift.train.data.blocks import LEARNED, STARTS, Maps
from zerodrift.train.data.report import PartRead
from zerodrift.train.data.tokenizer import Tokens

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

    @staticmethod
    def joined(pieces: Sequence[MarkedTokens]) -> MarkedTokens:
        """One after the other."""
        tokens, marks = [piece.tokens for piece in pieces], [piece.marks for piece in pieces]
        return MarkedTokens(np.concatenate(tokens), np.concatenate(marks))


def _marked(pieces: Iterable[tuple[Tokens, np.ndarray]]) -> Iterator[MarkedTokens]:
    start = STARTS
    for tokens, learned in pieces:
        marks = learned.astype(np.uint8) * LEARNED
        marks[:1] |= start
        start = 0 if len(marks) else start
        yield MarkedTokens(np.asarray(tokens, dtype=np.int64), marks)


class Packer(Protocol):
    """A way to fill blocks."""

    def add(self, document: Iterable[MarkedTokens]) -> None:
        """A document, in pieces."""

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

    def add(self, pieces: Iterable[tuple[Tokens, np.ndarray]]) -> None:
        """A document: its tokens, and which of them are learned."""
        self.documents += 1
        self._packer.add(_marked(pieces))

    def close(self) -> PartRead:
        self._packer.close()
        tokens, learned, blocks, padding = self._read
        return PartRead(self.documents, tokens, learned, blocks, padding)

    def shortened(self, document: Iterable[MarkedTokens]) -> MarkedTokens:
        """What of a document a block has room for."""
        length, count = self.maps.length, 0
        kept: list[MarkedTokens] = []
        for piece in document:
            if count < length:
                kept.append(piece)
            count += len(piece)
        self.cut += count > length
        self.cut_tokens += max(0, count - length)
        whole = MarkedTokens.joined(kept)
        return MarkedTokens(whole.tokens[:length], whole.marks[:length])

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

    def add(self, document: Iterable[MarkedTokens]) -> None:
        for piece in document:
            self._pieces.append(piece)
            self._held += len(piece)
            if self._held >= OPEN * self._writer.maps.length:
                self._flush()

    def _flush(self) -> None:
        """Write what is whole; the rest waits for more."""
        length = self._writer.maps.length
        whole = MarkedTokens.joined(self._pieces)
        tokens, marks = whole.tokens, whole.marks
        count = len(tokens) // length * length
        for first in range(0, count, OPEN * length):
            last = min(first + OPEN * length, count)
            self._writer.write(
                [
                    MarkedTokens(tokens[at : at + length], marks[at : at + length])
                    for at in range(first, last, length)
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

    def add(self, document: Iterable[MarkedTokens]) -> None:
        self._writer.write([self._writer.shortened(document)])

    def close(self) -> None:
        pass


class _Together:
    """Each goes where it leaves the least room, among blocks that wait."""

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
            self._rooms.append(self._writer.maps.length - len(piece))
        fullest = self._rooms.index(min(self._rooms))
        if not self._rooms[fullest] or len(self._rooms) > OPEN:
            self._take(fullest)

    def _take(self, at: int) -> None:
        pieces = self._waiting.pop(at)
        self._rooms.pop(at)
        self._writer.write([MarkedTokens.joined(pieces)])

    def close(self) -> None:
        while self._waiting:
            self._take(0)
