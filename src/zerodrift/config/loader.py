"""Load a config file or dict into a checked `Config`.

`tree` reads the blocks of keys. Only configs have DeepSpeed's keys with their fates, and rules with
conditions that types cannot express. Nothing is decided in this file: see `policy`.

Invariant: one ConfigError lists every mistake, and no key of the file is missing from `Config.keys`.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from zerodrift.config import deepspeed, fields
from zerodrift.config.plain_tree import collect_written, join, override
from zerodrift.config.schema import RULES, Config, check_rule
from zerodrift.config.tree import Keys, TreeReader, tree_of
from zerodrift.errors import ConfigError, nearest

_REMEDIES = {
    "zero_optimization": 'Write `{"stage": 1}` for true, `{"stage": 0}` for false.',
    "zero_optimization.load_from_fp32_weights": "Masters always start from the model's own bits: remove it.",
    "zero_optimization.offload_optimizer.device": "There is no offload to NVMe.",
    "communication_data_type": "Leave it out for the dtype of the mode.",
    "precision.rules[].pin": "For another dtype, set the columns one by one.",
}


MAX_WORDS = 3


def _suggest_key(key: str, block: type[BaseModel] | None, name: str) -> str:
    """Return a sentence about a key that is unknown in the block called `name`."""
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
        return "docs/config.md and docs/deepspeed.md list every key."
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


_OWNER = "zerodrift or DeepSpeed"
KEYS = Keys("config", Config, _OWNER, _suggest_key, deepspeed.ENTRIES, _REMEDIES, empty_is_absent=True)

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config
"""A config as it may be passed: the path of a YAML or JSON file, a dict, or a `Config`."""


def load(source: ConfigSource | None, overrides: Sequence[str] = ()) -> Config:
    """Read a config from a YAML or JSON file, a dict or a `Config`, and check it.

    `overrides` are texts such as `bf16.enabled=true`, applied in order. `Config.keys` then lists every
    written key as used, or as ignored with the reason. One ConfigError lists every mistake.
    """
    if isinstance(source, Config) and source.was_loaded:
        if overrides:
            must, got = "must come with the file or dict", "a Config that was loaded already"
            raise ConfigError("overrides", must, got=got, do="Pass them to `load`.")
        return source
    if source is None:
        do = "Pass the path of a YAML or JSON file, a dict, or a `zerodrift.Config`."
        raise ConfigError("config", "must be given", got="none", do=do)
    written = collect_written(source) if isinstance(source, Config) else source
    heading, tree, problems = tree_of(written, "config")
    override(tree, [overrides] if isinstance(overrides, str) else overrides, problems)
    walk = TreeReader(KEYS, problems)
    used = walk.select_used(tree)
    precision = used.get("precision")
    rules = precision.get("rules") if isinstance(precision, dict) else None
    for number, rule in enumerate(rules if isinstance(rules, list) else ()):
        where = f"{RULES}[{number}]"
        if isinstance(rule, dict) and where not in walk.doubtful:
            check_rule(rule, where, problems)
    config = walk.validate(used)
    problems.raise_as(ConfigError, heading)
    assert config is not None, "a config that is not valid has a problem"
    return config.with_keys(walk.uses)
