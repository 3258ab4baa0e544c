"""Numeric values that may be "auto": the caller's number, or a problem that names the number to pass.

Invariant: after `require_all_used`, every passed number replaces exactly one written "auto".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zerodrift.config import Config, fields, join, plain, shown
from zerodrift.errors import Problems, did_you_mean
from zerodrift.policy.arguments import check_arguments

AUTO = "auto"

AutoValues = Mapping[str, float | Sequence[float]]
"""The numbers for keys that are "auto", by dotted key; `optimizer.params.betas` takes a pair."""


class AutoNumbers:
    """The numbers that the caller passed for keys that are "auto"."""

    def __init__(self, given: AutoValues, problems: Problems) -> None:
        if not isinstance(given, Mapping):
            problems.add("auto", "must be a block of numbers by dotted key", got=shown(given))
            given = {}
        self._numbers = plain(given, problems)
        self._problems = problems
        self._auto_keys: set[str] = set()

    def _auto(self, key: str) -> Any:
        self._auto_keys.add(key)
        if key in self._numbers and self._numbers[key] != "auto":
            return self._numbers[key]
        must = "must be a number here: it is auto and nothing was passed for it"
        do = f"Pass --auto {key}=... on the command line, or auto={{'{key}': ...}} in Python."
        self._problems.add(key, must, got="'auto'", do=do)
        return None

    def _auto_number(self, key: str) -> Any:
        """Return the caller's value for a key of the schema, checked as if written in the config."""
        number = self._auto(key)
        kind: Any = fields.kind_at(key.split("."), Config)
        if number is None:
            return None
        try:
            return TypeAdapter(kind).validate_python(number)
        except ValidationError:
            one = not isinstance(number, (list, dict))
            must = fields.must(kind, number).replace(f' or "{AUTO}"', "") if one else "must be one number"
            self._problems.add(key, must, got=shown(number), do="Pass another.")
            return None

    def number(self, key: str, value: float | str | None, default: float) -> float:
        if value == AUTO:
            value = self._auto_number(key)
        return default if value is None else float(value)

    def integer(self, key: str, value: int | str | None) -> int | None:
        if value == AUTO:
            value = self._auto_number(key)
        return None if value is None else int(value)

    def params(self, where: str, kind: str, params: Mapping[str, Any]) -> str:
        """Fill the autos of a block of arguments, check the block, and return it as JSON text."""
        filled = {
            name: self._auto(join(where, name)) if value == AUTO else value for name, value in params.items()
        }
        missing = {name for name, value in filled.items() if params[name] == AUTO and value is None}
        named = {name: value for name, value in filled.items() if name not in missing}
        return json.dumps(check_arguments(where, kind, named, self._problems, missing), sort_keys=True)

    def require_all_used(self) -> None:
        """Refuse a number for a key that is not auto, which would be ignored silently."""
        for key in self._numbers:
            if key not in self._auto_keys:
                must = "must be 'auto' in the config for a passed value to stand in"
                do = did_you_mean(key, self._auto_keys) or f"To override the config: --set {key}=..."
                self._problems.add(key, must, got=f"{shown(self._numbers[key])} passed", do=do)
