"""Read a file or dict into a checked block of keys: every key is used, ignored with a reason, or an error.

`TreeReader` walks a plain tree once, key by key. Keys of the schema go to pydantic, and a value that it does
not accept becomes a problem of our own. Every other key has its fate in a table, which may be empty, or is
unknown. Configs, jobs and clusters are read alike, and so are the arguments of a `Block`, the base of every
block of keys. `Keys` holds the differences.

Invariant: every key of a tree is used, or in `uses` as ignored, or in the problems. A constructor refuses
what `load` refuses, in the same words, and no message is in pydantic's.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from zerodrift import dtypes
from zerodrift.config import deepspeed, fields
from zerodrift.config.parser import SourceBlock, read
from zerodrift.config.plain_tree import Tree, join, plain, shown
from zerodrift.errors import ConfigError, Problems, did_you_mean, listed, nearest

NULL = "null is the same as leaving it out"
EMPTY = "an empty block says nothing"
MAX_UNKNOWN = 20
"""Most unknown keys that messages name: a file with more of them is another kind of file."""


@dataclass(frozen=True, slots=True)
class KeyUse:
    """The use of one written key."""

    path: str
    """Dotted path, as written."""
    value: Any
    """The value, as written."""
    status: Literal["used", "ignored"]
    """A refused key has no use: it is an error."""
    because: str = ""
    """Reason of an ignored key."""


MAX_WORDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The keys that a tree may have."""

    name: str
    root: type[BaseModel]
    owner: str
    """Owner of the keys, for the message about an unknown key."""
    pages: str
    """Advice about an unknown key that is like no other: the pages that list every key."""
    elsewhere: tuple[str, ...] = ()
    """Paths of keys that belong to another file, to be suggested."""
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


class Block(BaseModel):
    """A block of keys: unknown keys are errors, fields keep their docstrings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True
    )

    if not TYPE_CHECKING:  # type checkers take the fields for the arguments

        def __init__(self, /, *values, **given) -> None:
            name = type(self).__name__
            if values:
                raise ConfigError(name, "must get its fields by name", got=f"{len(values)} without")
            spelled = ((word, fields.spell_field(word, of)) for word, of in type(self).model_fields.items())
            aliases = {word: deepspeed.Entry(word, "alias", key) for word, key in spelled if word != key}
            problems = Problems()
            reader = TreeReader(Keys(name, type(self), f"`{name}`", "", table=aliases), problems)
            used = reader.select_used(plain(given, problems))
            is_alone = [problem.where for problem in problems] == [name]
            problems.raise_as(ConfigError, "" if is_alone else name)
            super().__init__(**used)

        # Nested blocks are validated with the outer one.
        __init__.__pydantic_base_init__ = True

        def __setattr__(self, name, value) -> None:
            if name in type(self).model_fields:
                where = f"{type(self).__name__}.{name}"
                must = "must be given when it is made"
                raise ConfigError(where, must, got="an assignment", do="Make another one.")
            super().__setattr__(name, value)

    @classmethod
    def check(cls, written: Tree, where: str, problems: Problems) -> None:
        """Check the conditions that types cannot express."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Return the written fields."""
        return (
            (name, getattr(self, name)) for name in type(self).model_fields if name in self.model_fields_set
        )


@functools.lru_cache(maxsize=8)
def paths_of(keys: Keys) -> tuple[str, ...]:
    """List the paths of all keys that are used or ignored."""
    ignored = (key for key, entry in keys.table.items() if entry.fate == "ignored")
    known = (key.path for key in fields.every_key(keys.root))
    return (*known, *(key for key in ignored if not key.endswith(".*")), *keys.elsewhere)


@functools.lru_cache(maxsize=8)
def _by_last_part(keys: Keys) -> dict[str, list[str]]:
    """Map the last part of a path, in lower case, to the paths that end in it."""
    paths: dict[str, list[str]] = {}
    for path in paths_of(keys):
        paths.setdefault(path.rpartition(".")[2].lower(), []).append(path)
    return paths


def _suggest_key(keys: Keys, key: str, block: type[BaseModel] | None, name: str) -> str:
    """Return a sentence about a key that is unknown in the block called `name`."""
    if not name and "." in key and (deepspeed.find(key, keys.table) or key in paths_of(keys)):
        return f"Nest it: `{key.replace('.', '` > `')}`."
    here = {*(fields.fields(block) if block is not None else ())}
    here |= deepspeed.names_in(name) if keys.table is deepspeed.ENTRIES else set()
    lower, elsewhere = {word.lower(): word for word in sorted(here)}, _by_last_part(keys)
    word = key.lower()
    paths = [lower[word]] if word in lower else []
    paths += [path for path in elsewhere.get(word, ()) if path != join(name, key)]
    close = difflib.get_close_matches(word, lower, MAX_WORDS, cutoff=0.7)
    paths += [lower[near] for near in close or (() if paths else nearest(word, lower))]
    if not paths:
        paths = [path for near in nearest(word, elsewhere) for path in elsewhere[near]]
    if not paths:
        return keys.pages
    words = [f"`{p}`{'' if '.' in p or p in here else ' at top level'}" for p in dict.fromkeys(paths)]
    return f"Did you mean {' or '.join(words[:MAX_WORDS])}?"


class TreeReader:
    """Walks one tree, sorts its keys by fate, and keeps the tree of the used keys."""

    def __init__(self, keys: Keys, problems: Problems) -> None:
        self._keys = keys
        self.uses: list[KeyUse] = []
        self._problems = problems
        self._unknown = 0

    def select_used(self, tree: Tree) -> Tree:
        """Return the part of a tree that the schema has, and record a use or a problem for every key.

        Without a problem the part is valid.
        """
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
        has_unknown = False
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
                has_unknown = True
                self._unknown += 1
                if self._unknown <= MAX_UNKNOWN:
                    must = f"must be a key of {f'`{path}`' if path else self._keys.owner}"
                    self._problems.add(here, must, do=_suggest_key(self._keys, key, block, name))
        # In a block with an unknown key, what is missing was probably misspelt.
        if block is not None and not has_unknown:
            if used or not self._keys.empty_is_absent:
                self._require_given(block, tree, path)
            if issubclass(block, Block):
                block.check(used, path or self._keys.name, self._problems)
        return used

    def _require_given(self, block: type[BaseModel], tree: Tree, path: str) -> None:
        for name, of in block.model_fields.items():
            key = fields.spell_field(name, of)
            here = join(path, key)
            if not of.is_required() or tree.get(key) is not None:
                continue
            # A value that could not be read at all has its problem already.
            if all(problem.where != here for problem in self._problems):
                do = " ".join((of.description or "").split())
                self._problems.add(here, f"must be given: {fields.admits(fields.fields(block)[key])}", do=do)

    def _known(self, used: Tree, key: str, value: Any, kind: Any, path: str, name: str) -> None:
        may_be_absent = self._keys.empty_is_absent and fields.block_of(kind) is not None
        if value is None or (value == {} and may_be_absent):
            self._record(path, value, NULL if value is None else EMPTY)
            return
        read = self._value(value, kind, path, name)
        if read != {} or not may_be_absent:
            used[key] = read

    def _value(self, value: Any, kind: Any, path: str, name: str) -> Any:
        """Return the used part of a value, and refuse a value that its key does not admit."""
        inner, item = fields.block_of(kind), fields.item_of(kind)
        if isinstance(value, dict) and fields.is_free(kind):
            return self._arguments(value, path, name)
        if isinstance(value, dict) and inner is not None and _class_of(value) in (None, inner):
            return self._block(value, inner, path, name)
        if isinstance(value, list) and value and item is not None and fields.block_of(item) is not None:
            return [self._value(part, item, join(path, i), join(name, i)) for i, part in enumerate(value)]
        self._record(path, value)
        self._require_admitted(value, kind, path, name)
        return value

    def _require_admitted(self, value: Any, kind: Any, path: str, name: str) -> None:
        item = fields.item_of(kind)
        if isinstance(value, list) and item is not None:
            for number, part in enumerate(value):
                self._require_admitted(part, item, join(path, number), join(name, number))
            return
        typed = _class_of(value)  # of another block, whose common fields could pass validation
        if typed is None:
            with contextlib.suppress(ValidationError):
                fields.adapter(kind).validate_python(value)
                return
        must = fields.must(kind, value).replace("a block of arguments", self._keys.free)
        do = self._keys.remedies.get(re.sub(r"\[\d+\]", "[]", name)) or _remedy(kind, value)
        got = shown(value) if typed is None else f"a `{typed.__name__}`"
        self._problems.add(path, must, got=got, do=do)

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


def _class_of(value: Any) -> type | None:
    """Return the class of a typed block that became a dict; None for any other value."""
    return value.kind if isinstance(value, SourceBlock) else None


def _remedy(kind: Any, value: Any) -> str:
    admitted, block = fields.admits(kind), fields.block_of(kind)
    if not isinstance(value, str):
        if admitted.startswith("a list") and not isinstance(value, (list, dict)):
            return "Write a list, even for one item."
        is_other = block is not None and _class_of(value) is not None
        return f"Write `{block.__name__}(...)`, or a dict." if block is not None and is_other else ""
    if value == "auto":
        return '"auto" has no meaning here: write the value, or leave the key out.'
    if fields.item_of(kind) is not None:
        return f"Write `[{json.dumps(value)}]`."
    if "true" in admitted:
        word = next((meant for meant, spellings in _FLAGS.items() if value.lower() in spellings), "")
        return f"Write {word} without quotes." if word else ""
    if "number" in admitted or admitted[:1].isdigit():
        with contextlib.suppress(ValueError):
            float(value)
            return f"Write {value.replace('_', '').strip()} without quotes."
        return ""
    return did_you_mean(value, [*fields.choices(kind), *dtypes.spellings(fields.dtypes(kind))])


_FLAGS = {"true": ("yes", "on", "1", "true"), "false": ("no", "off", "0", "false")}


def off_values(entry: deepspeed.Entry) -> str:
    """List the values at which a refused key is accepted, in words, except blocks."""
    accepted = (*entry.harmless, *entry.without_effect)
    return listed((json.dumps(value) for value in accepted if not isinstance(value, dict)), "or")
