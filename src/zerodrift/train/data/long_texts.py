"""A text of any length as tokens, window by window: the same tokens as those of the whole.

A tokenizer looks at what is around a place, so a text cannot be cut anywhere. Windows overlap: of each the
tokens near its end wait for the next one, which begins some way before them and must say the same there.

Invariant: what is in memory does not grow with the text, as long as its tokens depend on what is near them.
Where those of a window and of the next one do not meet, more of what came before is looked at; a tokenizer
that does not say where its tokens stand is given the whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from zerodrift.train.data.tokenizer import ByteTokenizer, Tokenizer, Tokens, TransformersTokenizer

WINDOW, OVERLAP = 1 << 18, 1 << 12
"""Characters that are made tokens of at once, and of those at the end of a window that wait for the next."""
ALIKE = 4
"""Tokens that two windows must share, in front of where the second goes on."""


def encoded(pieces: Iterable[str], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """The tokens of a text that comes in pieces."""
    if isinstance(tokenizer, ByteTokenizer):
        yield from map(tokenizer.encode, pieces)
    elif isinstance(tokenizer, TransformersTokenizer) and tokenizer.inner.is_fast:
        yield from _windows(iter(pieces), tokenizer)
    else:
        yield tokenizer.encode("".join(pieces))


def _windows(pieces: Iterator[str], tokenizer: TransformersTokenizer) -> Iterator[Tokens]:
    text, done = "", 0
    """What is looked at, and how many characters of it have been given out as tokens."""
    last = np.zeros(0, np.int64)
    """The last tokens that were given out."""
    window, ended = WINDOW, False
    while not ended:
        while len(text) - done < window and not ended:
            piece = next(pieces, None)
            ended, text = piece is None, text + (piece or "")
        tokens, places = _behind(text, done, last, tokenizer)
        count = len(tokens) if ended else _settled(places, len(text) - OVERLAP)
        window = WINDOW if count else 2 * window
        if count:
            yield tokens[:count]
            last = np.concatenate([last, tokens[:count]])[-ALIKE:]
            done = int(places[count - 1, 1])
        if not ended and done > 2 * WINDOW:
            text, done = text[done - WINDOW :], WINDOW


def _behind(
    text: str, done: int, last: Tokens, tokenizer: TransformersTokenizer
) -> tuple[Tokens, np.ndarray]:
    """The tokens behind a place and where they stand, of as little in front of it as makes them meet those
    that were given out. Where nothing does, in a run of spaces without an end, they begin at that place."""
    met: tuple[Tokens, np.ndarray] | None = None
    for before in (OVERLAP, WINDOW) if done else ():
        first = max(0, text.rfind("\n", 0, max(0, done - before)))
        tokens, places = tokenizer.encode_with_places(text[first:])
        places += first
        cut = int(np.searchsorted(places[:, 0], done))
        alike = min(ALIKE, cut, len(last))
        if not alike or int(places[:cut, 1].max()) > done:
            continue
        met = tokens[cut:], places[cut:]
        if np.array_equal(tokens[cut - alike : cut], last[len(last) - alike :]):
            return met
    if met is not None:
        return met
    tokens, places = tokenizer.encode_with_places(text[done:])
    return tokens, places + done


def _settled(places: np.ndarray, until: int) -> int:
    """How many tokens stand before a place, of characters that no later one has a part of."""
    count = int(np.searchsorted(places[:, 1], until, side="right"))
    while count and count < len(places) and places[count, 0] < places[count - 1, 1]:
        count -= 1
    return count
