"""Load a config file or dict into a checked `Config`.

`tree` reads the blocks of keys. Only configs have DeepSpeed's keys with their fates, and rules with
conditions that types cannot express. Nothing is decided in this file: see `policy`.

Invariant: one ConfigError lists every mistake, and no key of the file is missing from `Config.keys`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from zerodrift.config import deepspeed, suggestions
from zerodrift.config.plain_tree import collect_written, override
from zerodrift.config.schema import Config, check_rule
from zerodrift.config.tree import Keys, TreeReader, tree_of
from zerodrift.errors import ConfigError

_REMEDIES = {
    "zero_optimization": 'Write `{"stage": 1}` for true, `{"stage": 0}` for false.',
    "zero_optimization.load_from_fp32_weights": "Masters always start from the model's own bits: remove it.",
    "zero_optimization.offload_optimizer.device": "There is no offload to NVMe.",
    "communication_data_type": "Leave it out for the dtype of the mode.",
    "precision.rules[].pin": "For another dtype, set the columns one by one.",
}


def _suggestion(key: str, block: type[BaseModel] | None, name: str) -> str:
    return suggestions.suggest_key(key, block, name) or "docs/config.md and docs/deepspeed.md list every key."


_OWNER = "zerodrift or DeepSpeed"
KEYS = Keys("config", Config, _OWNER, _suggestion, deepspeed.ENTRIES, _REMEDIES, empty_is_absent=True)

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
        where = f"precision.rules[{number}]"
        if isinstance(rule, dict) and where not in walk.doubtful:
            check_rule(rule, where, problems)
    config = walk.validate(used)
    problems.raise_as(ConfigError, heading)
    assert config is not None, "a config that is not valid has a problem"
    return config.with_keys(walk.uses)
