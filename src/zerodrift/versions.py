"""Version of zerodrift, tested versions of its dependencies, and a warning for others.

Only imported packages are checked. `tools/matrix.py` writes docs/support.md, and a test compares it with
`TESTED`.

Invariant: an untested version causes one line for all ranks and no error.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Mapping

__version__ = "0.2.0"

DEEPSPEED = "0.19.6"
"""Version of DeepSpeed that the drop-in imitates."""

TESTED: Mapping[str, tuple[str, str]] = {
    "python": ("3.10", "3.13"),
    "torch": ("2.13", "2.15"),
    "transformers": ("4.57", "5.24"),
    "deepspeed": ("0.19.6", "0.19.8"),
}
"""Package -> the first and the last version. Further numbers do not count: 2.15.1 is 2.15."""


def imported_versions() -> dict[str, str]:
    """Return package -> version for the packages of TESTED that this process has imported."""
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in TESTED}
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, **{name: str(v) for name, v in imported.items() if v}}


def warning(versions: Mapping[str, str]) -> str:
    """Return a warning about untested versions, or `""`."""
    untested = []
    for name, version in versions.items():
        first, last = TESTED[name]
        if not numbers(first) <= numbers(version, first) or not numbers(version, last) <= numbers(last):
            untested.append(f"{name} {version} (tested: {first} to {last})")
    return f"zerodrift: not tested with {' and '.join(untested)}: check results" if untested else ""


@functools.cache
def warn() -> None:
    """Log one line about untested versions, on the first rank."""
    text = warning(imported_versions())
    if text and os.environ.get("RANK") in (None, "0"):
        logging.getLogger("zerodrift").warning(text)


def numbers(version: str, like: str | None = None) -> tuple[int, ...]:
    """Return the leading numbers of a version, at most as many as `like` has, or (-1,)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(map(int, match[0].split("."))) if match else (-1,)
    return numbers if like is None else numbers[: len(like.split("."))]
