"""Numeric values that may be "auto": the caller's number, or a problem that says what to pass.

A number that is passed for a key which is not auto would be dropped without a word, so that is a problem
too.

Invariant: after `require_all_used`, every passed number stands in for exactly one written "auto".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zerodrift.errors import Problems, did_you_mean

AutoValues = Mapping[str, float | Sequence[float]]
"""What stands in for a numeric "auto", by dotted key; `optimizer.params.betas` takes a pair."""


class Numbers:
    """The numbers that the caller passed for keys that are "auto"."""

    def __init__(self, given: AutoValues, problems: Problems) -> None:
        self._given = given
        self._problems = problems
        self._asked: set[str] = set()

    def _auto(self, key: str) -> Any:
        self._asked.add(key)
        if key in self._given:
            return self._given[key]
        self._problems.add(
            key,
            "must be a number here: it is auto and nothing was passed for it",
            "'auto'",
            f"Pass --auto {key}=... on the command line, or auto={{'{key}': ...}} in Python.",
        )
        return None

    def _auto_number(self, key: str) -> float | None:
        """The caller's value for a key that takes one number."""
        found = self._auto(key)
        if found is None or (isinstance(found, (int, float)) and not isinstance(found, bool)):
            return found
        self._problems.add(key, "must be one number", repr(found), "Pass another.")
        return None

    def number(self, key: str, value: float | str | None, default: float) -> float:
        if value == "auto":
            value = self._auto_number(key)
        return default if value is None else float(value)

    def whole(self, key: str, value: int | str | None) -> int | None:
        if value != "auto":
            return None if value is None else int(value)
        found = self._auto_number(key)
        if found is not None and (found != int(found) or found < 1):
            self._problems.add(key, "must be a whole number of at least 1", repr(found), "Pass another.")
            return None
        return None if found is None else int(found)

    def params(self, where: str, params: Mapping[str, Any]) -> str:
        """A block of arguments with its autos filled in, as JSON text."""
        filled = {
            name: self._auto(f"{where}.{name}") if value == "auto" else value
            for name, value in params.items()
        }
        return json.dumps(filled, sort_keys=True)

    def require_all_used(self) -> None:
        """A value passed for a key that is not auto would be silently dropped: say so instead."""
        for key in self._given:
            if key not in self._asked:
                self._problems.add(
                    key,
                    "must be 'auto' in the config for a passed value to stand in",
                    f"{self._given[key]!r} passed",
                    did_you_mean(key, self._asked) or f"To override the config: --set {key}=...",
                )
