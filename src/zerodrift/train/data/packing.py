"""Pack documents into blocks of equal length, write the blocks, and count every document.

Blocks are cut out of one stream of all documents (`stream`), hold one document each (`alone`), or hold
several whole documents (`whole`). Every token is in one block, or is counted as cut, or is in a block without
a learned token, which is counted and left out. The counts are stored with the blocks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from zerodrift.errors import ConfigError, first_of, several
from zerodrift.train.data.blocks import LEARNED, MARK, STARTS, checksums, token_dtype
from zerodrift.train.data.tokenizer import Tokenizer, Tokens


@dataclass
class PartCounts:
    documents: int = 0
    tokens: int = 0
    learned: int = 0
    blocks: int = 0
    padding: int = 0


@dataclass
class DataCounts:
    """Counts of one set of data, made while it is read. The field names are those of the index of blocks."""

    kind: str
    """`text`, `chat` or `tokens`."""
    files: int
    block: int
    train: PartCounts = field(default_factory=PartCounts)
    held: PartCounts = field(default_factory=PartCounts)
    forms: dict[str, int] = field(default_factory=Counter)
    """Source of documents, in words -> how many."""
    left: dict[str, int] = field(default_factory=Counter)
    """Reason why documents were left out -> how many."""
    cut: int = 0
    """Documents longer than a block."""
    cut_tokens: int = 0
    longest: int = 0
    """Tokens of the longest document. 0 where documents are cut out of one stream, or if it is not known."""
    noted: dict[str, int] = field(default_factory=Counter)
    """Warning -> how many documents."""
    empty_blocks: int = 0
    unread: list[str] = field(default_factory=list)
    """Columns that are not read, and not empty."""
    beside: Sequence[str] = ()
    """Other files in the folders, in words."""

    @property
    def noun(self) -> str:
        return "conversation" if self.kind == "chat" else "document"

    def reasons(self) -> list[str]:
        """Say what was left out of the files that were read."""
        empty = f"{several(self.empty_blocks, 'block')} with nothing to learn"
        left = [f"{several(count, self.noun)} {why}" for why, count in self.left.items()]
        return [*left, *([empty] if self.empty_blocks else [])]

    def cuts(self) -> list[str]:
        """Say how many documents were cut; nothing if none was."""
        longest = f"; the longest has {self.longest:,}" if self.longest else ""
        cut = f"{several(self.cut, self.noun)} cut at the end of a block, by {self.cut_tokens:,} tokens"
        return [f"{cut} in all{longest}"] if self.cut else []

    def facts(self) -> list[tuple[str, str]]:
        """Return labelled facts; the first is a summary of all."""
        train, held = self.train, self.held
        tokens, documents = train.tokens + held.tokens, train.documents + held.documents
        summary = [several(self.files, "file"), f"{tokens:,} tokens"]
        if self.kind != "tokens":
            summary.insert(1, several(documents + sum(self.left.values()), self.noun))
        if self.kind == "chat":
            summary.append(f"{train.learned + held.learned:,} of them learned")
        facts = [("data", ", ".join(summary))]
        is_plain = all(form.startswith(("a text", "`text`")) for form in self.forms)
        if self.forms and (self.kind == "chat" or len(self.forms) > 1 or not is_plain):
            facts.append(("made of", ", ".join(f"{form} ({count:,})" for form, count in self.forms.items())))
        share = train.padding / (train.blocks * self.block) if train.padding else 0.0
        padding = f", {share:.1%} of it padding" if train.padding else ""
        facts.append(("blocks", f"{several(train.blocks, 'block')} of {self.block:,} tokens{padding}"))
        if held.blocks:
            documents_held = several(held.documents, self.noun) if held.documents else "the last blocks"
            of_all = f" ({held.tokens / tokens:.1%})" if tokens else ""
            in_blocks = f"{held.tokens:,} tokens{of_all} in {several(held.blocks, 'block')}"
            facts.append(("held out", f"{documents_held}, {in_blocks}"))
        facts += [("too long", cut) for cut in self.cuts()]
        if reasons := [*self.reasons(), *self.beside]:
            facts.append(("left out", "; ".join(reasons)))
        notes = [f"{several(count, self.noun)} {warning}" for warning, count in self.noted.items()]
        if 2 * self.cut > documents:
            notes.insert(0, f"most {self.noun}s are cut, {self.cut:,} of {documents:,}: raise `data.block`")
        if notes:
            facts.append(("look at", "; ".join(notes)))
        if self.unread:
            facts.append(("not read", f"columns {first_of([f'`{name}`' for name in self.unread], 6)}"))
        return facts

    def line(self) -> str:
        """Return the facts in one line, without the rarely needed ones."""
        facts = [(label, text) for label, text in self.facts() if label not in ("made of", "not read")]
        plain = ("data", "blocks")
        texts = [text if label in plain else f"{label} {text.replace('; ', ', ')}" for label, text in facts]
        return "; ".join(texts)


# --- blocks ---------------------------------------------------------------------------------------------


OPEN = 64
"""Most blocks that stay open for further documents when documents are kept whole."""

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
    """Writes the documents of one part (`train`, `validation`) as blocks, and counts them."""

    def __init__(
        self,
        stem: Path,
        tokenizer: Tokenizer,
        packing: Packing,
        separate_documents: bool,
        counts: DataCounts,
        part: PartCounts,
    ) -> None:
        """`stem` is the path of its files without suffix, `part` the half of `counts` for this part."""
        self._tokenizer, self._packing, self._length = tokenizer, packing, counts.block
        self._separate_documents = separate_documents
        self._counts, self._part = counts, part
        self._paths = {what: stem.with_suffix(f".{what}") for what in ("tokens", "marks", "counts", "sums")}
        self._files = [self._paths[what].open("wb") for what in ("tokens", "marks")]
        self._labels: list[np.ndarray] = []
        self._sums: list[np.ndarray] = []
        self._is_marked = False
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
        """Close all files, even if the last bytes of one do not fit on the disk."""
        with contextlib.ExitStack() as stack:
            for file in self._files:
                stack.callback(file.close)

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
        self._counts.longest = max(self._counts.longest, count)
        self._counts.cut_tokens += max(0, count - length)
        return np.concatenate(kept)[:length]

    def _fit(self, document: np.ndarray) -> None:
        """Put a document into the fullest open block that has room for it."""
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
        # The first token of a block, and of a separate document, is predicted from nothing.
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
