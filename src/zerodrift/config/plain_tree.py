"""Copy a config into a plain tree, which holds only the values of JSON, and apply overrides to the tree.

A dict may hold sets, tensors, itself, or numbers beyond 64 bits; a YAML file may share and multiply its
parts. A plain tree is a copy of bounded size with strings as keys, so every later step may walk the tree
safely. A typed block becomes a dict of its written fields, which remembers the class. `join` and `shown`
spell paths and values in messages.

Invariant: a value that is not plain becomes a problem with its path, never an exception.
"""

from __future__ import annotations

import enum
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from zerodrift.config.fields import spell_field
from zerodrift.config.parser import SourceBlock, parse_yaml
from zerodrift.errors import ConfigError, Problems

MAX_DEPTH = 24
"""Most blocks and lists inside one another; configs have five."""

MAX_VALUES = 10_000

Tree = dict[str, Any]

INTERVALS = ("steps_per_print",)
"""Keys that accept infinity, which means never."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_STEP = re.compile(r"([^.\[\]]+)((?:\[\d{1,4}\])*)")


def join(parent: str, part: object) -> str:
    """Append a key or an index to a path: `a.b`, `a[0]`, and `a['odd key']` for a key that is not a name."""
    if isinstance(part, int) and not isinstance(part, bool):
        return f"{parent}[{part}]"
    if isinstance(part, str) and _NAME.fullmatch(part):
        return f"{parent}.{part}" if parent else part
    return f"{parent}[{shown(part)}]"


def shown(value: object) -> str:
    """Spell a value for a message, on one short line, as a config file would."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (Mapping, list, tuple)) and len(value) > 8:
        return "a block of keys" if isinstance(value, Mapping) else f"a list of {len(value)} items"
    try:
        text = repr(value)
    except Exception:  # a foreign object's own __repr__, or an integer too long to print
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def collect_written(block: BaseModel) -> Tree:
    """Return the written fields of a typed block, by their names in a file."""
    return {
        spell_field(name, field): value
        for name, field in type(block).model_fields.items()
        if name in block.model_fields_set and (value := getattr(block, name)) is not None
    }


def plain(value: object, problems: Problems) -> Tree:
    copied = _Copier(problems).copy(value, "", 0)
    return copied if isinstance(copied, dict) else {}


class _Copier:
    """Copies one tree and counts its values."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._left = MAX_VALUES

    def copy(self, value: object, path: str, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            limit = f"{MAX_DEPTH} levels deep" if depth > MAX_DEPTH else f"{MAX_VALUES:,} values"
            must = f"must be at most {limit}"
            self._problems.add("config", must, got="more", do="Is it the file you meant?")
            return None
        if isinstance(value, Mapping):
            return self._block(value, path, depth)
        if isinstance(value, BaseModel):
            made = SourceBlock(self._block(collect_written(value), path, depth))
            made.kind = type(value)
            return made
        if isinstance(value, (list, tuple)):
            copies: list[Any] = []
            for index, item in enumerate(value):
                if self._left < 0:
                    break
                copies.append(self.copy(item, join(path, index), depth + 1))
            return copies
        return self._scalar(value, path)

    def _block(self, block: Mapping[Any, Any], path: str, depth: int) -> Tree:
        for key in block.repeated if isinstance(block, SourceBlock) else ():
            self._problems.add(join(path, key), "must be written once", got="two of them", do="Keep one.")
        tree: Tree = {}
        for key, value in block.items():
            if self._left < 0:
                break
            if not isinstance(key, str):
                self._problems.add(path or "config", "must have strings as keys", got=shown(key))
            elif self._is_text(key, join(path, key)):
                tree[str(key)] = self.copy(value, join(path, key), depth + 1)
        return tree

    def _scalar(self, value: object, path: str) -> Any:
        if isinstance(value, enum.Enum):
            value = value.value
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str(value) if self._is_text(value, path) else None
        if isinstance(value, numbers.Integral):
            whole = int(value)
            if -(2**63) <= whole < 2**63:
                return whole
            self._problems.add(path, "must fit in 64 bits", got=f"a number of {whole.bit_length()} bits")
        elif isinstance(value, numbers.Real):
            if math.isfinite(value) or (path in INTERVALS and value == math.inf):
                return float(value)
            self._problems.add(path, "must be a finite number", got=shown(float(value)))
        else:
            self._problems.add(
                path or "config",
                "must be a string, a number, true, false, null, a list or a block",
                got=f"{shown(value)}, a {type(value).__name__}",
                do="Write it as a string.",
            )
        return None

    def _is_text(self, text: str, path: str) -> bool:
        """Refuse half of a surrogate pair and NUL, which JSON may spell and no path can hold."""
        try:
            is_text = b"\0" not in text.encode()
        except UnicodeEncodeError:
            is_text = False
        if not is_text:
            self._problems.add(path, "must be valid Unicode without NUL", got=shown(text))
        return is_text


def override(tree: Tree, texts: Sequence[str], problems: Problems) -> None:
    """Apply `dotted.path=value` texts in order. The value is YAML, and an empty one is null."""
    for text in texts:
        path, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
        matches = [_STEP.fullmatch(part) for part in path.strip().split(".")]
        if not equals or None in matches:
            problems.add(
                "overrides",
                "must be `dotted.path=value`",
                got=shown(text),
                do="As in `zero_optimization.stage=3` or `precision.rules[0].pin=fp32`.",
            )
            continue
        try:
            parsed = value.strip() if value.lstrip().startswith("*") else parse_yaml(value, "value")
        except ConfigError as error:
            problems.add("overrides", "must have a YAML value", got=shown(text), do=str(error))
            continue
        steps: list[str | int] = []
        for match in filter(None, matches):
            steps += [match.group(1), *map(int, re.findall(r"\d+", match.group(2)))]
        _set(tree, steps, _Copier(problems).copy(parsed, path.strip(), len(steps)), problems)


def _set(tree: Tree, steps: list[str | int], value: Any, problems: Problems) -> None:
    """Set the value at a path. Missing blocks are created, and a list may grow by one item."""
    place: Any = tree
    path = ""
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        inside, path = path, join(path, step)
        if isinstance(step, int):
            if not isinstance(place, list):
                problems.add(inside, "must be a list to have items set", got=shown(place))
                return
            if step > len(place):
                problems.add(path, f"must not lie beyond `{join(inside, len(place))}`, the next place")
                return
            if step == len(place):
                place.append(None)
        elif not isinstance(place, dict):
            problems.add(inside, "must be a block to have keys set", got=shown(place))
            return
        if following is None:
            place[step] = value
            return
        below = place[step] if isinstance(step, int) else place.get(step)
        if below is None:
            below = place[step] = [] if isinstance(following, int) else {}
        place = below
