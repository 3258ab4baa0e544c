"""Read a file or dict into a checked block of keys: every key is used, ignored with a reason, or an error.

`TreeReader` walks a plain tree once, key by key. Keys of the schema go to pydantic, whose errors `block`
rewords. Every other key has its fate in a table, which may be empty, or is unknown. Configs, jobs and
clusters are read alike, and `Keys` holds their differences.

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
from zerodrift.config.block import Steps, add_errors, name_of
from zerodrift.config.parser import SourceBlock, read
from zerodrift.config.plain_tree import Tree, join, plain, shown
from zerodrift.config.schema import KeyUse
from zerodrift.errors import ConfigError, Problems, listed

NULL = "null is the same as leaving it out"
EMPTY = "an empty block says nothing"
MAX_UNKNOWN = 20
"""Most unknown keys that messages name: a file with more of them is another kind of file."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that a tree may have."""

    name: str
    root: type[BaseModel]
    owner: str
    """Owner of the keys, for the message about an unknown key."""
    suggestion: Callable[[str, type[BaseModel] | None, str], str]
    """(key, its block, path of the block) -> a sentence about an unknown key."""
    table: Mapping[str, deepspeed.Entry] = field(default_factory=dict)
    """Fates of the keys that the schema does not have."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Path of a key -> advice about a value that is not accepted."""
    empty_is_absent: bool = False
    free: str = "a block of arguments"
    """Words for a block of names that the schema does not know."""


def tree_of(source: object, what: str) -> tuple[str, Tree, Problems]:
    """Return a source's name in messages, its plain tree and its problems; `what` is `config` or `job`."""
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


class TreeReader:
    """Walks one tree, sorts its keys by fate, and keeps the tree of the used keys."""

    def __init__(self, keys: Keys, problems: Problems) -> None:
        self._keys = keys
        self.uses: list[KeyUse] = []
        self._paths: dict[str, str] = {}
        """Path in the schema -> path as written, which differs under an alias."""
        self.doubtful: set[str] = set()
        """Blocks with an unknown key. A missing key in such a block was probably misspelt."""
        self._problems = problems
        self._unknown = 0

    def select_used(self, tree: Tree) -> Tree:
        """Return the part of a tree that the schema has, and record a use or a problem for every key."""
        used = self._block(tree, self._keys.root, "", "")
        if self._unknown > MAX_UNKNOWN:
            rest = f"{self._unknown - MAX_UNKNOWN:,} more unknown keys"
            do = "Is it the file you meant?"
            self._problems.add(self._keys.name, "must hold known keys", got=rest, do=do)
        return used

    def _block(self, tree: Tree, block: type[BaseModel] | None, path: str, name: str) -> Tree:
        """Return the used part of a block. `path` is as written, `name` as schema and table spell it."""
        known_fields = fields.fields(block) if block is not None else {}
        used: Tree = {}
        for key, value in tree.items():
            here, there, target = join(path, key), join(name, key), key
            entry = deepspeed.find(there, self._keys.table)
            if entry is not None and entry.fate == "alias":
                there = target = entry.text
                if target in tree:
                    must = f"must not come with `{target}`, which it stands for"
                    self._problems.add(here, must, got="both", do="Keep one.")
                    continue
            if target in known_fields:
                self._known(used, target, value, known_fields[target], here, there)
            elif entry is not None or deepspeed.is_block(there, self._keys.table):
                self._table(entry, value, here, there)
            else:
                self.doubtful.add(name)
                self._unknown += 1
                if self._unknown <= MAX_UNKNOWN:
                    must = f"must be a key of {f'`{path}`' if path else self._keys.owner}"
                    self._problems.add(here, must, do=self._keys.suggestion(key, block, name))
        return used

    def _known(self, used: Tree, key: str, value: Any, kind: Any, path: str, name: str) -> None:
        inner, item = fields.block_of(kind), fields.item_of(kind)
        self._paths[name] = path
        if value is None or (value == {} and inner is not None and self._keys.empty_is_absent):
            self._record(path, value, NULL if value is None else EMPTY)
        elif self._refuse_other_kind(value, kind, path):
            return
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
            self._record(path, value)

    def _item(self, value: Any, kind: Any, path: str, name: str) -> Any:
        """Read an item of a list of blocks; an item of another type is left to pydantic."""
        self._paths[name] = path
        if self._refuse_other_kind(value, kind, path):
            self.doubtful.add(name)
        return self._block(value, fields.block_of(kind), path, name) if isinstance(value, dict) else value

    def _refuse_other_kind(self, value: Any, kind: Any, path: str) -> bool:
        """Refuse a typed block in another's place, whose common fields could pass validation."""
        inner = fields.block_of(kind)
        typed = value.kind if isinstance(value, SourceBlock) else None
        if typed is None or typed is inner or fields.is_free(kind):
            return False
        do = f"Write `{inner.__name__}(...)`, or a dict." if inner is not None else ""
        self._problems.add(path, fields.must(kind, value), got=f"a `{typed.__name__}`", do=do)
        return True

    def _arguments(self, tree: Tree, path: str, name: str) -> Tree:
        """Read free names, such as an optimizer's arguments: all are used, unless the table refuses one."""
        if not tree:
            self._record(path, tree, EMPTY)
        used: Tree = {}
        for key, value in tree.items():
            entry = deepspeed.find(join(name, key), self._keys.table)
            if entry is None or entry.fate == "used":
                used[key] = value
                self._record(join(path, key), value)
            else:
                self._fate(entry, value, join(path, key))
        return used

    def _table(self, entry: deepspeed.Entry | None, value: Any, path: str, name: str) -> None:
        if isinstance(value, dict) and value and (entry is None or entry.key != name):
            self._block(value, None, path, name)
        elif entry is not None:
            self._fate(entry, value, path)
        elif value is None or value == {}:
            self._record(path, value, NULL if value is None else EMPTY)
        else:
            self._problems.add(path, "must be a block of keys", got=shown(value))

    def _fate(self, entry: deepspeed.Entry, value: Any, path: str) -> None:
        # 1 and true are not the same value.
        same = (off for off in entry.harmless if isinstance(value, bool) == isinstance(off, bool))
        if entry.fate == "ignored" or value in entry.without_effect:
            self._record(path, value, entry.text)
        elif value in (None, "auto") or value in tuple(same):
            self._record(path, value, f"off, as here: {entry.text}")
        else:
            must = f"must be {off_values(entry) or 'left out'}: {entry.text}"
            self._problems.add(path, must, got=shown(value), do=entry.instead)

    def _record(self, path: str, value: Any, because: str = "") -> None:
        self.uses.append(KeyUse(path, value, "ignored" if because else "used", because))

    def validate(self, used: Tree) -> Any:
        """Return the used part as its block; None if that adds a problem."""
        keys = self._keys
        try:
            return keys.root.model_validate(used)
        except ValidationError as error:
            path_of, doubtful, problems = self._path_of, self.doubtful, self._problems
            add_errors(problems, error, used, keys.root, path_of, doubtful, keys.remedies, keys.free)
        return None

    def _path_of(self, steps: Steps) -> str:
        path = ""
        for index, step in enumerate(steps):
            path = self._paths.get(name_of(steps[: index + 1]), join(path, step))
        return path


def off_values(entry: deepspeed.Entry) -> str:
    """List the values at which a refused key is accepted, in words, except blocks."""
    accepted = (*entry.harmless, *entry.without_effect)
    return listed((json.dumps(value) for value in accepted if not isinstance(value, dict)), "or")
