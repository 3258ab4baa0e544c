"""zerodrift's own version; which versions of what it stands on it was tested with, and one line where others
are at work.

What is not imported is not at work, and not asked about. What ran where is in docs/versions.md, which
`tools/matrix.py` writes; a test compares it with `TESTED`.

Invariant: another version is one warning in a process, never silence and never an error by itself.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Mapping

__version__ = "0.1.0"

DEEPSPEED = "0.19.6"
"""The version of DeepSpeed whose surface the drop-in has."""

TESTED: Mapping[str, tuple[str, str]] = {
    "python": ("3.10", "3.13"),
    "torch": ("2.13", "2.15"),
    "transformers": ("4.57", "5.24"),
    "deepspeed": ("0.19.6", "0.19.8"),
}
"""Package -> the first and the last version. What stands behind these numbers does not matter: 2.15.1 is
2.15."""


def at_work() -> dict[str, str]:
    """Package of the table -> its version, of those that this process has imported."""
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in TESTED}
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, **{name: str(v) for name, v in imported.items() if v}}


def warning(versions: Mapping[str, str]) -> str:
    """What to say of the versions outside of the table; nothing where there are none."""
    untested = []
    for name, version in versions.items():
        first, last = TESTED[name]
        if not numbers(first) <= numbers(version, first) or not numbers(version, last) <= numbers(last):
            untested.append(f"{name} {version} (tested: {first} to {last})")
    return f"zerodrift is not tested with {' and '.join(untested)}: check results" if untested else ""


@functools.cache
def warn() -> None:
    """To be called by what a user calls; the warning shows the line of whoever called that."""
    text = warning(at_work())
    if text:
        warnings.warn(text, stacklevel=3)


def numbers(version: str, like: str | None = None) -> tuple[int, ...]:
    """The leading numbers of a version, as many as another one has; (-1,) where there are none."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(map(int, match[0].split("."))) if match else (-1,)
    return numbers if like is None else numbers[: len(like.split("."))]
