"""Keys that a command line adds to the configs of a script.

Messages name an added key by its flag. A key that the config has already is never overridden, because the
script may have decided more by that key than the engine sees.

Invariant: an added key decides something, or is an error before anything starts.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerodrift.config.loader import load
from zerodrift.config.plain_tree import Tree, join, override, shown
from zerodrift.config.schema import RULES
from zerodrift.config.tree import tree_of
from zerodrift.errors import ConfigError, Problems, ZerodriftError


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
            flags |= {path: f"--config {heading}: {path}" for path in _paths(tree)}
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


def _paths(tree: Mapping[str, Any], path: str = "") -> list[str]:
    paths: list[str] = []
    for key, value in tree.items():
        here = join(path, key)
        if here == RULES and isinstance(value, list):
            paths += [join(here, number) for number in range(len(value))]
        else:
            paths += _paths(value, here) if isinstance(value, dict) and value else [here]
    return paths
