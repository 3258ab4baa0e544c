"""Fill blocks of equal length with documents, and write them.

Documents are cut out of one stream (`stream`), put one in each block (`alone`), or put whole and several in
each block (`whole`). Every token of every document is in one block, is counted as cut, or is in a block
without a learned token, which is counted as left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from zerodrift.errors import ConfigError
from zerodrift.train.data.blocks import LEARNED, MARK, STARTS, checksums, token_dtype
from zerodrift.train.data.report import DataCounts, PartCounts
from zerodrift.train.data.tokenizer import Tokenizer, Tokens

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

    def __init__(
        self,
        stem: Path,
        tokenizer: Tokenizer,
        packing: Packing,
        separate_documents: bool,
        counts: DataCounts,
        part: PartCounts,
    ) -> None:
        """`stem` is the path of the part's files without what each holds. With `separate_documents` the
        documents that share a block do not see each other. `part` is the half of `counts` for this part."""
        self._tokenizer, self._packing, self._length = tokenizer, packing, counts.block
        self._separate_documents = separate_documents
        self._counts, self._part = counts, part
        self._paths = {what: stem.with_suffix(f".{what}") for what in ("tokens", "marks", "counts", "sums")}
        self._files = [self._paths[what].open("wb") for what in ("tokens", "marks")]
        self._labels: list[np.ndarray] = []
        self._sums: list[np.ndarray] = []
        self._is_marked = False
        """Whether some token is not learned."""
        self._stream: list[np.ndarray] = []
        self._count = 0
        """Tokens of the stream that wait."""
        self._open: list[list[np.ndarray]] = []
        """Documents of each block that waits for more."""
        self._rooms: list[int] = []

    def add(self, pieces: Iterable[tuple[Tokens, np.ndarray]]) -> None:
        """Add a document: its tokens, and which of them are learned."""
        self._part.documents += 1
        if self._packing != "stream":
            self._fit(self._shortened(_marked(pieces)))
            return
        for piece in _marked(pieces):
            self._stream.append(piece)
            self._count += len(piece)
            if self._count >= OPEN * self._length:
                self._flush()

    def close(self) -> dict[str, int]:
        """Finish the files, and return what the index says of the part; empty for a part without blocks."""
        if self._count:
            self._flush()
        if self._count:
            self._write(self._stream)
        while self._rooms:
            self._write_open(0)
        self.release()
        if not self._is_marked:
            self._paths["marks"].unlink()
        if not self._part.blocks:
            self._paths["tokens"].unlink()
            return {}
        labels = np.concatenate(self._labels)
        labels.tofile(self._paths["counts"])
        np.concatenate(self._sums).tofile(self._paths["sums"])
        return {"blocks": len(labels), "labels": int(labels.sum())}

    def release(self) -> None:
        for file in self._files:
            file.close()

    def _flush(self) -> None:
        """Write the whole blocks of the stream; the rest waits for more."""
        length, waiting = self._length, np.concatenate(self._stream)
        count = len(waiting) // length * length
        for first in range(0, count, OPEN * length):
            last = min(first + OPEN * length, count)
            self._write([waiting[at : at + length] for at in range(first, last, length)])
        self._stream, self._count = [waiting[count:]], len(waiting) - count

    def _shortened(self, document: Iterable[np.ndarray]) -> np.ndarray:
        """Return as much of a document as fits a block."""
        length, count = self._length, 0
        kept: list[np.ndarray] = []
        for piece in document:
            if count < length:
                kept.append(piece)
            count += len(piece)
        self._counts.cut += count > length
        self._counts.cut_tokens += max(0, count - length)
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
            self._rooms.append(self._length - len(document))
        fullest = self._rooms.index(min(self._rooms))
        if not self._rooms[fullest] or len(self._rooms) > (OPEN if self._packing == "whole" else 0):
            self._write_open(fullest)

    def _write_open(self, at: int) -> None:
        self._rooms.pop(at)
        self._write([np.concatenate(self._open.pop(at))])

    def _write(self, pieces: list[np.ndarray]) -> None:
        """Write a block for each piece that has a label, padded to its length."""
        if not pieces:
            return
        tokens = np.full((len(pieces), self._length), self._tokenizer.end, np.int64)
        marks = np.zeros_like(tokens)
        for row, piece in enumerate(pieces):
            tokens[row, : len(piece)], marks[row, : len(piece)] = piece.T
        vocabulary = self._tokenizer.vocabulary
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            must, got = f"must make tokens from 0 to {vocabulary - 1}", f"{tokens.min()} to {tokens.max()}"
            raise ConfigError("data.tokenizer", must, got=got)
        learned = marks & LEARNED
        if self._separate_documents:
            marks = np.where(marks & STARTS, STARTS, marks)
        else:
            marks = learned
        # The first token of a block, and of a separate document, follows from nothing.
        labels = (marks[:, 1:] & LEARNED).sum(axis=1, dtype=np.int32)
        kept: np.ndarray = labels > 0
        tokens, marks = tokens[kept].astype(token_dtype(vocabulary)), marks[kept].astype(MARK)
        labels = labels[kept]
        for file, values in zip(self._files, (tokens, marks), strict=True):
            file.write(values.tobytes())
        sums = [checksums(*block) for block in zip(tokens, marks, labels.tolist(), strict=True)]
        self._labels.append(labels)
        self._sums.append(np.array(sums, np.uint32).reshape(-1, 2))
        self._is_marked |= bool((marks != LEARNED).any())
        used = int(np.array([len(piece) for piece in pieces])[kept].sum())
        self._counts.empty_blocks += len(pieces) - len(labels)
        self._part.tokens += used
        self._part.learned += int(learned[kept].sum())
        self._part.blocks += len(labels)
        self._part.padding += len(labels) * self._length - used
