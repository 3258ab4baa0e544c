"""What of documents may not be as it was meant, for a person to look at: marks spelled in a text, documents
that are there twice or are validated with and trained on, conversations without a template.

Nothing is changed by it: tokens are those that the tokenizer makes.

Invariant: each document is counted once for each thing that is noted.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from zerodrift.errors import first_line
from zerodrift.train.data.blocks import damaged
from zerodrift.train.data.documents import Document, Seen
from zerodrift.train.data.tokenizer import Tokenizer, Tokens

TRAINED_ON, TWICE = "trained on as well", "like another one"
SPELLED = "with `{}` in the text, which becomes the mark that it spells"
UNTEMPLATED = "written with `<|role|>` in front of each turn: the tokenizer has no chat template"

FILE = "documents"
"""With a number of each document that is trained on."""
_MANY = 1 << 20
"""Documents that are looked at together."""


class DocumentWatch:
    """Looks at documents while they become blocks."""

    def __init__(self, tokenizer: Tokenizer, seen: Seen) -> None:
        self._seen = seen
        self._marks = tokenizer.marks
        self._numbers = np.array(sorted(self._marks.values()), np.int64)
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)))
        self._has_template = tokenizer.has_template
        self._taken = array("Q")

    def take(self, number: int) -> None:
        """The `Document.number` of one that is trained on."""
        self._taken.append(number)

    def watched(
        self, document: Document, pieces: Iterable[tuple[Tokens, Tokens]]
    ) -> Iterator[tuple[Tokens, Tokens]]:
        """A document's tokens, as they come."""
        found = ""
        if document.talk is not None:
            self._seen.noted[UNTEMPLATED] += not self._has_template
            said = (turn["content"] or "" for turn in document.talk.messages) if self._marks else ()
            found = next((match[0] for text in said if (match := self._spelled.search(text))), "")
        for tokens, learned in pieces:
            # One token alone is the start or the end, which is no part of a text.
            if document.talk is None and not found and len(tokens) > 1:
                held = np.intersect1d(tokens, self._numbers)
                found = next((name for name, number in self._marks.items() if number in held), "")
            yield tokens, learned
        if found:
            self._seen.noted[SPELLED.format(found)] += 1

    def close(self, folder: Path) -> None:
        """Write which documents are trained on."""
        (folder / FILE).write_bytes(self._taken.tobytes())
        self._seen.noted[TWICE] += len(self._taken) - len(np.unique(self._taken))
        self._seen.noted = +self._seen.noted


def shared(held: tuple[Path, int], trained: Sequence[tuple[Path, int]]) -> int:
    """How many documents of some blocks others have too; of each the folder, and how many it has."""
    numbers = np.sort(_numbers(*held))
    found = np.zeros(len(numbers), dtype=bool)
    for folder, count in trained:
        others = _numbers(folder, count)
        for first in range(0, len(others), _MANY):
            found |= np.isin(numbers, others[first : first + _MANY])
    return int(found.sum())


def _numbers(folder: Path, count: int) -> np.ndarray:
    try:
        numbers = np.memmap(folder / FILE, np.uint64, "r")
    except (OSError, ValueError) as error:
        raise damaged(folder, first_line(error)) from None
    if len(numbers) != count:
        raise damaged(folder, f"numbers of {len(numbers):,} documents for {count:,}")
    return numbers
