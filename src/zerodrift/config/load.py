"""From a config file or dict to a checked `Config`.

How a tree is read is `tree`'s business. Here is what only a config has: DeepSpeed's keys with their fates,
and rules, which must have what types cannot say. Nothing is decided: see `policy`.

Invariant: one ConfigError tells everything that is wrong, and no key of the file is missing from
`Config.keys`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from zerodrift.config import deepspeed, known
from zerodrift.config.plain import Tree, override, written
from zerodrift.config.schema import Config, check_rule
from zerodrift.config.tree import Keys, TreeReader, tree_of
from zerodrift.errors import ConfigError, Problems

_REMEDIES = {
    "zero_optimization": 'Write `{"stage": 1}` for true, `{"stage": 0}` for false.',
    "zero_optimization.load_from_fp32_weights": "Masters always start from the model's own bits: remove it.",
    "zero_optimization.offload_optimizer.device": "There is no offload to NVMe.",
    "communication_data_type": "Leave it out for the dtype of the mode.",
    "precision.rules[].pin": "For another dtype, set the columns one by one.",
}


def _suggestion(key: str, block: type[BaseModel] | None, name: str) -> str:
    return known.suggestion(key, block, name) or "docs/config.md and docs/deepspeed.md list every key."


KEYS = Keys(
    "config",
    Config,
    "zerodrift or DeepSpeed",
    _suggestion,
    deepspeed.ENTRIES,
    _REMEDIES,
    empty_is_absent=True,
)


ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config
"""What may be passed as a config: the path of a YAML or JSON file, a dict, or a `Config`."""


def load(source: ConfigSource | None, overrides: Sequence[str] = ()) -> Config:
    """Read a config from a YAML or JSON file, a dict or a `Config`, and check it.

    `overrides` are texts such as `bf16.enabled=true`, applied in order. `Config.keys` then says of every
    written key whether it is used or ignored, and why. One ConfigError lists everything that is wrong.
    """
    if isinstance(source, Config) and source.was_loaded:
        if overrides:
            raise ConfigError(
                "overrides",
                "must come with the file or dict",
                got="a Config that was loaded already",
                do="Pass them to `load`.",
            )
        return source
    if source is None:
        do = "Pass the path of a YAML or JSON file, a dict, or a `zerodrift.Config`."
        raise ConfigError("config", "must be given", got="none", do=do)
    heading, tree, problems = tree_of(written(source) if isinstance(source, Config) else source, "config")
    if isinstance(overrides, str):
        overrides = [overrides]
    override(tree, overrides, problems)
    walk = TreeReader(KEYS, problems)
    used = walk.used(tree)
    _check_rules(used, walk.doubtful, problems)
    config = walk.validated(used)
    problems.raise_as(ConfigError, heading)
    if config is None:
        raise AssertionError("a config that is not valid must have a problem")
    return config.with_keys(walk.uses)


# --- rules ------------------------------------------------------------------------------------------


def _check_rules(used: Tree, doubtful: Collection[str], problems: Problems) -> None:
    """Every rule whose keys are all known."""
    precision = used.get("precision")
    rules = precision.get("rules") if isinstance(precision, dict) else None
    for number, rule in enumerate(rules if isinstance(rules, list) else ()):
        where = f"precision.rules[{number}]"
        if isinstance(rule, dict) and where not in doubtful:
            check_rule(rule, where, problems)
