"""Read JSON objects from files, or report where the mistake is: configs, indexes and tensor headers.

Invariant: every key of a returned object occurs once in its text.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from zerodrift.errors import Problems
from zerodrift.files import opened

NAMES_SHOWN = 50
"""Most names that one message lists; the others are counted."""


def read(path: Path, problems: Problems) -> dict[str, Any] | None:
    """Read the JSON object in a file."""
    try:
        with opened(path) as file:
            data = file.read()
    except OSError as error:
        problems.add(str(path), "must be a file that can be read", got=error.strerror or str(error))
        return None
    return parse(data, str(path), problems)


def parse(data: bytes, where: str, problems: Problems) -> dict[str, Any] | None:
    """Parse the JSON object in `data`; messages call the data `where`."""
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated.extend(key for key, count in counts.items() if count > 1)
        return built

    must, got = "must be JSON", ""
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        got = f"{error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError as error:
        must, got = "must be JSON in UTF-8", f"the byte {data[error.start]:#04x} at {error.start}"
    except (ValueError, RecursionError) as error:
        must, got = "must be JSON of ordinary depth and numbers", str(error)
    if got:
        problems.add(where, must, got=got)
        return None
    if not isinstance(document, dict):
        problems.add(where, "must be a JSON object", got=type(document).__name__)
        return None
    if repeated:
        problems.add(where, "must name every key once", got=f"{listed(repeated)} more than once")
        return None
    return document


def listed(names: list[str]) -> str:
    """List names for a message: the first fifty in backticks, then a count."""
    shown = ", ".join(f"`{name}`" for name in names[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
