"""From a file or dict to a checked block of keys: every key used, ignored with its reason, or an error.

The text is read in `read`, made plain in `plain`; the words of a message come from `fields`, the fate of
a key that is not of the schema from a table, which may be empty. Here a tree is walked once, key by key, and
what the schema knows goes to pydantic, whose findings are told in our words. Configs and jobs are read alike;
what is their own is in `Keys`.

Invariant: every key of a tree is used, or in `uses` as ignored, or in the problems.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from zerodrift.config import deepspeed, fields
from zerodrift.config.mistakes import Steps, Telling, name_of
from zerodrift.config.plain import Tree, join, plain, shown
from zerodrift.config.read import WrittenBlock, read
from zerodrift.config.schema import KeyUse
from zerodrift.errors import ConfigError, Problems

NULL = "null is the same as leaving it out"
EMPTY = "an empty block says nothing"
MAX_UNKNOWN = 20
"""Unknown keys that are named: a file with more of them is another kind of file."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What may be written in a tree."""

    name: str
    """What the tree is: `config`, say."""
    root: type[BaseModel]
    owner: str
    """Whose keys they are, in the message about one that is not."""
    suggestion: Callable[[str, type[BaseModel] | None, str], str]
    """(key, block that it is in, path of that) -> a sentence about an unknown key."""
    table: Mapping[str, deepspeed.Entry] = field(default_factory=dict)
    """Keys that the schema does not know, each with its fate."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """What to do about a value that is not accepted, where more can be said than what is."""
    empty_is_absent: bool = False
    """Whether an empty block is the same as none."""
    free: str = "a block of arguments"
    """What a block of names that the schema does not know is called."""


def tree_of(source: object, what: str) -> tuple[str, Tree, Problems]:
    """What to call a source in messages, and its plain tree; `what` it is to be: a `config`, say."""
    problems = Problems()
    if isinstance(source, Mapping):
        return what, plain(source, problems), problems
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(what, "must be a path or a dict", got=shown(source))
    heading = os.fsdecode(source)
    written = read(source)
    if not isinstance(written, dict):
        got = "nothing but comments" if written is None else shown(written)
        raise ConfigError(heading, "must hold a block of keys at its top", got=got)
    return heading, plain(written, problems), problems


# --- the walk ---------------------------------------------------------------------------------------


class TreeReader:
    """One pass over a tree: sorts its keys by fate and keeps the tree of those that are used."""

    def __init__(self, keys: Keys, problems: Problems) -> None:
        self._keys = keys
        self.uses: list[KeyUse] = []
        self.written: dict[str, str] = {}
        """Path in the schema -> path as written, where an alias makes them differ."""
        self.doubtful: set[str] = set()
        """Blocks with an unknown key: what is missing in them was probably misspelt."""
        self._problems = problems
        self._unknown = 0

    def used(self, tree: Tree) -> Tree:
        """The part of a tree that the schema knows."""
        used = self._block(tree, self._keys.root, "", "")
        self._count_the_rest()
        return used

    def _block(self, tree: Tree, block: type[BaseModel] | None, path: str, name: str) -> Tree:
        """The used part of a block. `path` is as written, `name` as schema and table spell it."""
        known_fields = fields.fields(block) if block is not None else {}
        used: Tree = {}
        for key, value in tree.items():
            here, there, target = join(path, key), join(name, key), key
            entry = self._entry(there)
            if entry is not None and entry.fate == "alias":
                there = target = entry.text
                if target in tree:
                    self._problems.add(
                        here,
                        f"must not come with `{target}`, which it stands for",
                        got="both",
                        do="Keep one.",
                    )
                    continue
            if target in known_fields:
                self._known(used, target, value, known_fields[target], here, there)
            elif entry is not None or deepspeed.is_block(there, self._keys.table):
                self._table(entry, value, here, there)
            else:
                self.doubtful.add(name)
                self._unknown_key(key, block, path, name)
        return used

    def _known(self, used: Tree, key: str, value: Any, kind: Any, path: str, name: str) -> None:
        """A key of the schema."""
        inner, item = fields.block_of(kind), fields.item_of(kind)
        self.written[name] = path
        if value is None:
            self._ignore(path, value, NULL)
        elif self._is_another(value, kind):
            self._other_kind(value, kind, path)
        elif value == {} and inner is not None and self._keys.empty_is_absent:
            self._ignore(path, value, EMPTY)
        elif isinstance(value, dict) and inner is not None:
            below = self._block(value, inner, path, name)
            if below or not self._keys.empty_is_absent:
                used[key] = below
        elif isinstance(value, dict) and fields.is_free(kind):
            used[key] = self._arguments(value, path, name)
        elif isinstance(value, list) and value and item is not None and fields.block_of(item) is not None:
            used[key] = [self._item(part, item, join(path, i), join(name, i)) for i, part in enumerate(value)]
        else:
            used[key] = value
            self._use(path, value)

    def _item(self, value: Any, kind: Any, path: str, name: str) -> Any:
        """An item of a list of blocks; a wrong one is left to the validation."""
        self.written[name] = path
        inner = fields.block_of(kind)
        if self._is_another(value, kind):
            self._other_kind(value, kind, path)
            self.doubtful.add(name)
        return self._block(value, inner, path, name) if isinstance(value, dict) else value

    def _is_another(self, value: Any, kind: Any) -> bool:
        """Whether a typed block stands where another one belongs: what they have in common could pass."""
        typed = isinstance(value, WrittenBlock) and value.kind is not None
        return typed and value.kind is not fields.block_of(kind) and not fields.is_free(kind)

    def _other_kind(self, value: WrittenBlock, kind: Any, path: str) -> None:
        inner = fields.block_of(kind)
        do = f"Write `{inner.__name__}(...)`, or a dict." if inner is not None else ""
        self._problems.add(
            path, fields.must(kind, value), got=f"a `{getattr(value.kind, '__name__', '')}`", do=do
        )

    def _arguments(self, tree: Tree, path: str, name: str) -> Tree:
        """Free names, such as an optimizer's arguments: all used but those the table singles out."""
        if not tree:
            self._ignore(path, tree, EMPTY)
        used: Tree = {}
        for key, value in tree.items():
            here = join(path, key)
            entry = self._entry(join(name, key))
            if entry is None or entry.fate == "used":
                used[key] = value
                self._use(here, value)
            else:
                self._fate(entry, value, here)
        return used

    def _table(self, entry: deepspeed.Entry | None, value: Any, path: str, name: str) -> None:
        """A key that only the table of DeepSpeed's keys knows, or a block of such keys."""
        own = entry is not None and entry.key == name
        if isinstance(value, dict) and value and not own:
            self._block(value, None, path, name)
        elif entry is not None:
            self._fate(entry, value, path)
        elif value is None or value == {}:
            self._ignore(path, value, NULL if value is None else EMPTY)
        else:
            self._problems.add(path, "must be a block of keys", got=shown(value))

    def _fate(self, entry: deepspeed.Entry, value: Any, path: str) -> None:
        if entry.fate == "ignored" or value in entry.without_effect:
            self._ignore(path, value, entry.text)
        elif is_harmless(entry, value):
            self._ignore(path, value, f"off, as here: {entry.text}")
        else:
            must = f"must be {off_values(entry) or 'left out'}: {entry.text}"
            self._problems.add(path, must, got=shown(value), do=entry.instead)

    def _entry(self, name: str) -> deepspeed.Entry | None:
        return deepspeed.find(name, self._keys.table)

    def _use(self, path: str, value: Any) -> None:
        self.uses.append(KeyUse(path=path, value=value, status="used"))

    def _ignore(self, path: str, value: Any, because: str) -> None:
        self.uses.append(KeyUse(path=path, value=value, status="ignored", because=because))

    def _unknown_key(self, key: str, block: type[BaseModel] | None, path: str, name: str) -> None:
        self._unknown += 1
        if self._unknown <= MAX_UNKNOWN:
            owner = f"`{path}`" if path else self._keys.owner
            todo = self._keys.suggestion(key, block, name)
            self._problems.add(join(path, key), f"must be a key of {owner}", do=todo)

    def _count_the_rest(self) -> None:
        """One line for the unknown keys that were not named."""
        if self._unknown > MAX_UNKNOWN:
            rest = f"{self._unknown - MAX_UNKNOWN:,} more unknown keys"
            self._problems.add(
                self._keys.name, "must hold known keys", got=rest, do="Is it the file you meant?"
            )

    def validated(self, used: Tree) -> Any:
        """The used part as its block; None where there is a problem."""
        keys = self._keys
        try:
            return keys.root.model_validate(used)
        except ValidationError as error:
            telling = Telling(keys.root, self._written, frozenset(self.doubtful), keys.remedies, keys.free)
            telling.tell(error, used, self._problems)
        return None

    def _written(self, steps: Steps) -> str:
        """A place as it was written."""
        path = ""
        for index, step in enumerate(steps):
            path = self.written.get(name_of(steps[: index + 1]), join(path, step))
        return path


def is_harmless(entry: deepspeed.Entry, value: Any) -> bool:
    """Whether a refused key asks for nothing at this value. 1 and true are not the same."""
    return value in (None, "auto") or any(
        value == off and isinstance(value, bool) == isinstance(off, bool) for off in entry.harmless
    )


def off_values(entry: deepspeed.Entry) -> str:
    """The values at which a refused key is accepted, in words; blocks are not worth a word."""
    accepted = (*entry.harmless, *entry.without_effect)
    values = [value for value in accepted if not isinstance(value, dict)]
    return fields.either([json.dumps(value) for value in values])
