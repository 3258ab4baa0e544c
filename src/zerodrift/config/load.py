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

from zerodrift.config import deepspeed, fields, known
from zerodrift.config.plain import Tree, override
from zerodrift.config.schema import Block, Config, Rule
from zerodrift.config.tree import Keys, TreeReader, tree_of
from zerodrift.errors import ConfigError, Problems

_REMEDIES = {
    "zero_optimization": 'Write `{"stage": 1}` for true, `{"stage": 0}` for false.',
    "zero_optimization.load_from_fp32_weights": "Masters always start from the model's own bits: remove it.",
    "zero_optimization.offload_optimizer.device": "There is no offload to NVMe.",
    "communication_data_type": "Leave it out for the dtype of the mode.",
    "precision.rules[].pin": "For another dtype, set the columns one by one.",
}


def _suggestion(key: str, block: type[Block] | None, name: str) -> str:
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


def load(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config, overrides: Sequence[str] = ()
) -> Config:
    """The config in a JSON or YAML file or a dict, after `overrides`, texts such as `bf16.enabled=true`."""
    if isinstance(source, Config):
        if overrides:
            raise ConfigError("overrides", "must come with a file or dict", got="a Config")
        return source
    heading, tree, problems = tree_of(source, "config")
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
    return config.model_copy(update={"keys": tuple(walk.uses)})


# --- rules ------------------------------------------------------------------------------------------


def _check_rules(used: Tree, doubtful: Collection[str], problems: Problems) -> None:
    """What a rule must have, which types cannot say."""
    precision = used.get("precision")
    rules = precision.get("rules") if isinstance(precision, dict) else None
    for number, rule in enumerate(rules if isinstance(rules, list) else ()):
        where = f"precision.rules[{number}]"
        if not isinstance(rule, dict) or where in doubtful:
            continue
        subjects = {"match", "class"}
        if not subjects & rule.keys():
            problems.add(where, "must say which parameters it is for", got="neither `match` nor `class`")
        if not fields.fields(Rule).keys() & rule.keys() - subjects:
            problems.add(
                where,
                "must set something: a column, `pin` or `output`",
                got="nothing",
                do="As in `pin: fp32`.",
            )
