"""Report what was read: how much, from which files, what was left out and why, and what deserves a look.

The counts are made while documents become blocks, and are kept beside the blocks. Whatever is read is in
blocks, was cut, or was left out, and is counted once. Warnings change nothing.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zerodrift.errors import first_line, several
from zerodrift.train.data.blocks import damaged
from zerodrift.train.data.documents import Document
from zerodrift.train.data.tokenizer import Tokenizer, Tokens

LONG, NOTHING = "cut at the end of a block", "with nothing to learn"
TRAINED_ON, TWICE = "trained on as well", "like another one"
SPELLED = "with `{}` in the text, which becomes the mark that it spells"
UNTEMPLATED = "written with `<|role|>` in front of each turn: the tokenizer has no chat template"

DIGESTS = "documents"
"""File with the digest of each training document."""
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class PartCounts:
    """Counts of one part: training or validation."""

    documents: int = 0
    tokens: int = 0
    """Tokens in blocks, without padding."""
    learned: int = 0
    blocks: int = 0
    padding: int = 0


@dataclass(frozen=True, slots=True)
class DataCounts:
    """Counts of one set of data. The field names are those of the index of blocks."""

    kind: str
    """`text`, `chat` or `tokens`."""
    files: int
    block: int
    train: PartCounts
    held: PartCounts = PartCounts()
    forms: Mapping[str, int] = field(default_factory=dict)
    """Source of documents -> how many."""
    left: Mapping[str, int] = field(default_factory=dict)
    """Reason why documents were left out -> how many."""
    cut: int = 0
    """Documents longer than a block."""
    cut_tokens: int = 0
    noted: Mapping[str, int] = field(default_factory=dict)
    """Warning -> how many documents."""
    empty_blocks: int = 0
    """Blocks left out because nothing in them is learned."""
    unread: tuple[str, ...] = ()
    """Columns that are not read, and not empty."""
    beside: tuple[str, ...] = ()
    """Other files in the folders, in words."""

    @property
    def noun(self) -> str:
        return "conversation" if self.kind == "chat" else "document"

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> DataCounts:
        parts = {name: PartCounts(**values[name]) for name in ("train", "held")}
        lists = {name: tuple(values[name]) for name in ("unread", "beside")}
        return DataCounts(**{**values, **parts, **lists})

    def reasons(self) -> list[str]:
        """Say what was cut and left out of the files that were read."""
        cut = f"{several(self.cut, self.noun)} {LONG}, by {self.cut_tokens:,} tokens in all"
        empty = f"{several(self.empty_blocks, 'block')} {NOTHING}"
        left = [f"{several(count, self.noun)} {why}" for why, count in self.left.items()]
        return [*([cut] if self.cut else []), *left, *([empty] if self.empty_blocks else [])]

    def notes(self) -> list[str]:
        """Return the warnings with their counts."""
        return [f"{several(count, self.noun)} {warning}" for warning, count in self.noted.items()]

    def facts(self) -> list[tuple[str, str]]:
        """Return labelled facts; the first is a summary of all."""
        train, held = self.train, self.held
        tokens = train.tokens + held.tokens
        summary = [several(self.files, "file"), f"{tokens:,} tokens"]
        if self.kind != "tokens":
            documents = train.documents + held.documents + sum(self.left.values())
            summary.insert(1, several(documents, self.noun))
        if self.kind == "chat":
            summary.append(f"{train.learned + held.learned:,} of them learned")
        facts = [("data", ", ".join(summary))]
        is_plain = all(form.startswith(("a text", "`text`")) for form in self.forms)
        if self.forms and (self.kind == "chat" or len(self.forms) > 1 or not is_plain):
            facts.append(("made of", ", ".join(f"{form} ({count:,})" for form, count in self.forms.items())))
        padding = (
            f", {train.padding / (train.blocks * self.block):.1%} of it padding" if train.padding else ""
        )
        facts.append(("blocks", f"{several(train.blocks, 'block')} of {self.block:,} tokens{padding}"))
        if held.blocks:
            documents_held = several(held.documents, self.noun) if held.documents else "the last blocks"
            share = f" ({held.tokens / tokens:.1%})" if tokens else ""
            in_blocks = f"{held.tokens:,} tokens{share} in {several(held.blocks, 'block')}"
            facts.append(("held out", f"{documents_held}, {in_blocks}"))
        if reasons := [*self.reasons(), *self.beside]:
            facts.append(("left out", "; ".join(reasons)))
        if notes := self.notes():
            facts.append(("look at", "; ".join(notes)))
        if self.unread:
            more = f" and {len(self.unread) - 6} more" if len(self.unread) > 6 else ""
            facts.append(("not read", f"columns {', '.join(f'`{name}`' for name in self.unread[:6])}{more}"))
        return facts

    def line(self) -> str:
        """Return the facts in one line, without the rarely needed ones."""
        facts = [(label, text) for label, text in self.facts() if label not in ("made of", "not read")]
        plain = ("data", "blocks")
        texts = [text if label in plain else f"{label} {text.replace('; ', ', ')}" for label, text in facts]
        return "; ".join(texts)


# --- warnings -------------------------------------------------------------------------------------------


class DocumentWatch:
    """Counts warnings while documents become blocks."""

    def __init__(self, tokenizer: Tokenizer, noted: Counter[str], seed: int) -> None:
        self._noted, self._marks, self._seed = noted, tokenizer.marks, seed
        self._numbers = np.array(sorted(self._marks.values()), np.int64)
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)))
        self._has_template = tokenizer.has_template
        self._digests = array("Q")

    def is_held_out(self, document: Document, share: float) -> bool:
        """Return True for a `share` of all documents, by their content; record the digests of the others."""
        number = document.number(self._seed)
        is_held = number / 2**64 < share
        if not is_held:
            self._digests.append(number)
        return is_held

    def watched(
        self, document: Document, pieces: Iterable[tuple[Tokens, Tokens]]
    ) -> Iterator[tuple[Tokens, Tokens]]:
        """Pass on a document's tokens."""
        mark = ""
        if document.talk is not None:
            self._noted[UNTEMPLATED] += not self._has_template
            contents = (turn["content"] or "" for turn in document.talk.messages) if self._marks else ()
            mark = next((match[0] for text in contents if (match := self._spelled.search(text))), "")
        for tokens, learned in pieces:
            # One token alone is the start or the end, which is not in the text.
            if document.talk is None and not mark and len(tokens) > 1:
                there = np.intersect1d(tokens, self._numbers)
                mark = next((name for name, number in self._marks.items() if number in there), "")
            yield tokens, learned
        if mark:
            self._noted[SPELLED.format(mark)] += 1

    def close(self, folder: Path) -> None:
        """Write the digests of training documents, and count the documents that are there twice."""
        (folder / DIGESTS).write_bytes(self._digests.tobytes())
        self._noted[TWICE] += len(self._digests) - len(np.unique(self._digests))
        for warning in [warning for warning, count in self._noted.items() if not count]:
            del self._noted[warning]


def shared_documents(held: tuple[Path, int], trained: Sequence[tuple[Path, int]]) -> int:
    """Count the documents of a folder that others have too; each folder with its number of documents."""
    (digests, *others) = (_digests(folder, count) for folder, count in (held, *trained))
    found = np.zeros(len(digests), dtype=bool)
    for other in others:
        for first in range(0, len(other), _AT_ONCE):
            found |= np.isin(digests, other[first : first + _AT_ONCE])
    return int(found.sum())


def _digests(folder: Path, count: int) -> np.ndarray:
    try:
        digests = np.memmap(folder / DIGESTS, np.uint64, "r")
    except (OSError, ValueError) as error:
        raise damaged(folder, first_line(error)) from None
    if len(digests) != count:
        raise damaged(folder, f"numbers of {len(digests):,} documents for {count:,}")
    return digests
