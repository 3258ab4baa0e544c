"""Load a config file or dict into a checked `Config`.

`tree` reads the blocks of keys. Only configs have DeepSpeed's keys with their fates, and rules with
conditions that types cannot express. Nothing is decided in this file: see `policy`.

`Additions` are keys that a command line adds to the configs of a script. A key that a config has already is
never overridden, because the script may have decided more by that key than the engine sees.

Invariant: one ConfigError lists every mistake, and no key of the file is missing from `Config.keys`. An added
key decides something, or is an error before anything starts.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerodrift.config import deepspeed
from zerodrift.config.plain_tree import Tree, collect_written, join, override, shown
from zerodrift.config.schema import RULES, Config
from zerodrift.config.tree import Keys, KeyUse, TreeReader, paths_of, tree_of
from zerodrift.errors import ConfigError, Problems, ZerodriftError
from zerodrift.optimizers import TORCH_OPTIMIZERS, TORCH_SCHEDULES

_REMEDIES = {
    "zero_optimization": 'Write `{"stage": 1}` for true, `{"stage": 0}` for false.',
    "zero_optimization.load_from_fp32_weights": "Masters always start from the model's own bits: remove it.",
    "zero_optimization.offload_optimizer.device": "There is no offload to NVMe.",
    "communication_data_type": "Leave it out for the dtype of the mode.",
    "precision.rules[].pin": "For another dtype, set the columns one by one.",
}


def _is_path(key: str) -> bool:
    """Return True if the text is the full path of a known key."""
    return deepspeed.find(key) is not None or key in paths_of(KEYS)


KEYS = Keys(
    "config",
    Config,
    "zerodrift or DeepSpeed",
    "docs/config.md and docs/deepspeed.md list every key.",
    table=deepspeed.ENTRIES,
    remedies=_REMEDIES,
    empty_is_absent=True,
)

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config
"""A config as it may be passed: the path of a YAML or JSON file, a dict, or a `Config`."""


def load(source: ConfigSource | None, overrides: Sequence[str] = ()) -> Config:
    """Read a config from a YAML or JSON file, a dict or a `Config`, and check it.

    `overrides` are texts such as `bf16.enabled=true`, applied in order. `Config.keys` then lists every
    written key as used, or as ignored with the reason. One ConfigError lists every mistake.
    """
    if isinstance(source, Config) and source.keys:
        if overrides:
            must, got = "must come with the file or dict", "a Config that was loaded already"
            raise ConfigError("overrides", must, got=got, do="Pass them to `load`.")
        return source
    if source is None:
        do = "Pass the path of a YAML or JSON file, a dict, or a `zerodrift.Config`."
        raise ConfigError("config", "must be given", got="none", do=do)
    written = collect_written(source) if isinstance(source, Config) else source
    heading, tree, problems = tree_of(written, "config")
    left_over = nest(tree)
    override(tree, [overrides] if isinstance(overrides, str) else overrides, problems)
    walk = TreeReader(KEYS, problems)
    used = walk.select_used(tree)
    problems.raise_as(ConfigError, heading)
    return Config.model_validate(used).with_keys((*walk.uses, *left_over))


def nest(tree: Tree) -> list[KeyUse]:
    """Move top-level keys such as `zero_optimization.stage`, which accelerate and TRL write, into their
    blocks. Return the keys that are ignored, because their blocks hold other values."""
    ignored = []
    for key in [key for key in tree if "." in key and _is_path(key)]:
        *blocks, last = key.split(".")
        place: Any = tree
        for block in blocks:
            place[block] = place = {} if place.get(block) is None else place[block]
            if not isinstance(place, dict):
                break
        else:
            value = tree.pop(key)
            if place.get(last) in (None, "auto"):
                place[last] = value
            elif place[last] != value:
                because = f"its block has {shown(place[last])}, which holds"
                ignored.append(KeyUse(key, value, "ignored", because))
    return ignored


def without_block(config: Config, name: str, because: str) -> Config:
    """Return a config without its `optimizer` or `scheduler` block, which is listed as ignored."""
    block = getattr(config, name)
    if block is None:
        return config
    uses = [use for use in config.keys if not use.path.startswith(f"{name}.")]
    uses.append(KeyUse(name, block.type, "ignored", because))
    return config.model_copy(update={name: None}).with_keys(uses)


def without_torch_classes(config: Config) -> Config:
    """Return a config as `zerodrift run` plans it: without the blocks whose classes torch makes."""
    for name, only_torch in (("optimizer", TORCH_OPTIMIZERS), ("scheduler", TORCH_SCHEDULES)):
        kind = getattr(getattr(config, name), "type", None)
        if kind in only_torch:
            because = (
                f"`{kind}` is torch's: `zerodrift run` makes and steps it, and the plan does not know it"
            )
            config = without_block(config, name, because)
    return config


# --- keys that a command line adds to the configs of a script -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Additions:
    """Keys to add to a config, with the flags that they came by."""

    config: Tree = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    """Path of a key -> its flag."""

    @classmethod
    def from_flags(
        cls, file: str | os.PathLike[str] | None, sets: Sequence[str], pins: Sequence[str]
    ) -> Additions:
        """Collect the keys of a file, of `key=value` texts, and of globs on parameters to pin, in order."""
        tree: Tree = {}
        flags: dict[str, str] = {}
        if file is not None:
            heading, tree, problems = tree_of(file, "--config")
            problems.raise_as(ConfigError, heading)
            nest(tree)
            flags |= {path: f"--config {heading}: {path}" for path in _written_paths(tree)}
        for text in sets:
            problems = Problems()
            override(tree, [text], problems)
            flag = f"--set {text}"
            if problems:
                raise ConfigError.of([replace(each, where=flag) for each in problems])
            flags[text.partition("=")[0].strip()] = flag
        for pattern in pins:
            rules = tree.setdefault("precision", {}).setdefault("rules", [])
            flags[join(RULES, len(rules))] = f"--pin {pattern}"
            rules.append({"match": pattern, "pin": "fp32"})
        additions = cls(tree, flags)
        ignored = Problems()
        try:
            for key in load(tree).keys:
                if key.status == "ignored":
                    must = "must be a key that decides something here"
                    ignored.add(key.path, must, got=key.because, do="Leave it out.")
            ignored.raise_as(ConfigError)
        except ZerodriftError as error:
            raise additions.name_flags(error) from None
        return additions

    def merge_into(self, config: Tree) -> Tree:
        """Return a copy of a config with the added keys; raise if the config contradicts one of them."""
        problems = Problems()
        tree = copy.deepcopy(config)
        self._add(tree, self.config, "", problems)
        problems.raise_as(ConfigError)
        return tree

    def _add(self, tree: Tree, added: Mapping[str, Any], path: str, problems: Problems) -> None:
        for key, value in added.items():
            here = join(path, key)
            there = tree.get(key)
            if there in (None, "auto", {}):
                tree[key] = copy.deepcopy(value)
            elif isinstance(there, dict) and isinstance(value, dict):
                self._add(there, value, here, problems)
            elif here == RULES and isinstance(there, list):
                tree[key] = [*there, *copy.deepcopy(value)]
            elif there != value:
                problems.add(
                    self._flag(here),
                    "must not contradict the config that the command passes",
                    got=f"`{here}: {shown(there)}` there",
                    do="Change it there, or leave this out.",
                )

    def name_flags(self, error: ZerodriftError, rules_before: int = 0) -> ZerodriftError:
        """Return the error with flags instead of added keys, whose rules follow `rules_before` others."""
        named = [replace(each, where=self._flag(each.where, rules_before)) for each in error.problems]
        return error if named == list(error.problems) else type(error).of(named)

    def _flag(self, where: str, rules_before: int = 0) -> str:
        """Return the flag of a key, or of the block around it; a key of the config keeps its name."""
        for path, flag in self.flags.items():
            if path.startswith(f"{RULES}["):
                number = int(path[len(RULES) + 1 : path.index("]")]) + rules_before
                path = f"{RULES}[{number}]{path[path.index(']') + 1 :]}"
            if where == path or where.startswith((f"{path}.", f"{path}[", f"{path}:")):
                return flag
        return where


def _written_paths(tree: Mapping[str, Any], path: str = "") -> list[str]:
    paths: list[str] = []
    for key, value in tree.items():
        here = join(path, key)
        if here == RULES and isinstance(value, list):
            paths += [join(here, number) for number in range(len(value))]
        else:
            paths += _written_paths(value, here) if isinstance(value, dict) and value else [here]
    return paths
