"""Suggestions for an unknown key: misspelt, in another block, or written flat with dots.

Invariant: a suggestion is a key that `load` accepts in that place.
"""

from __future__ import annotations

import difflib
import functools

from pydantic import BaseModel

from zerodrift.config import deepspeed, fields
from zerodrift.config.plain_tree import join
from zerodrift.config.schema import Config
from zerodrift.errors import nearest

MAX_WORDS = 3


def suggest_key(key: str, block: type[BaseModel] | None, name: str) -> str:
    """Return a sentence about a key that is unknown in the block called `name`, or an empty string."""
    if not name and is_path(key) and "." in key:
        return f"Nest it: `{key.replace('.', '` > `')}`."
    here = {*(fields.fields(block) if block is not None else ()), *deepspeed.names_in(name)}
    lower = {word.lower(): word for word in sorted(here)}
    word = key.lower()
    paths = [lower[word]] if word in lower else []
    paths += [path for path in _elsewhere().get(word, ()) if path != join(name, key)]
    close = difflib.get_close_matches(word, lower, MAX_WORDS, cutoff=0.7)
    paths += [lower[near] for near in close or (() if paths else nearest(word, lower))]
    if not paths:
        paths = [path for near in nearest(word, _elsewhere()) for path in _elsewhere()[near]]
    if not paths:
        return ""
    shown = [f"`{p}`{'' if '.' in p or p in here else ' at top level'}" for p in dict.fromkeys(paths)]
    return f"Did you mean {' or '.join(shown[:MAX_WORDS])}?"


def is_path(key: str) -> bool:
    """Return True if the text is the full path of a known key."""
    return deepspeed.find(key) is not None or key in _paths()


@functools.cache
def _paths() -> tuple[str, ...]:
    ignored = (key for key, entry in deepspeed.ENTRIES.items() if entry.fate == "ignored")
    paths = [key.path for key in fields.every_key(Config)]
    return (*paths, *(key for key in ignored if not key.endswith(".*")))


@functools.cache
def _elsewhere() -> dict[str, tuple[str, ...]]:
    """Map the last part of a path, in lower case, to the paths that end in it."""
    paths: dict[str, tuple[str, ...]] = {}
    for path in _paths():
        last = path.rpartition(".")[2].lower()
        paths[last] = (*paths.get(last, ()), path)
    return paths
