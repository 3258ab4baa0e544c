"""Keys that a command line adds to configs that somebody else passes.

They come by flags, so that is how messages name them. What a config says already is not overridden: whoever
passes it may have decided more by it than the engine is told.

Invariant: an added key decides something, or is an error before anything starts.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerodrift.config.load import load
from zerodrift.config.plain import Tree, join, override, shown
from zerodrift.config.tree import tree_of
from zerodrift.errors import ConfigError, Problem, Problems, ZerodriftError

RULES = "precision.rules"


@dataclass(frozen=True, slots=True)
class Additions:
    """What to add to a config."""

    config: Tree = field(default_factory=dict)
    """Plain values."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Path of a key -> the flag that it came by."""

    @classmethod
    def of(cls, file: str | os.PathLike[str] | None, sets: Sequence[str], pins: Sequence[str]) -> Additions:
        """Of a file, of `key=value` texts, and of globs on parameters to pin, in this order."""
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
        made = cls(tree, flags)
        made._require_uses()
        return made

    def _require_uses(self) -> None:
        """Every key is one that decides something."""
        try:
            keys = load(self.config).keys
        except ZerodriftError as error:
            raise self.flagged(error) from None
        ignored = [
            Problem(
                key.path, "must be a key that decides something here", got=key.because, do="Leave it out."
            )
            for key in keys
            if key.status == "ignored"
        ]
        if ignored:
            raise self.flagged(ConfigError.of(ignored))

    def added_to(self, written: Tree) -> Tree:
        """A config with them; an error where it says something else."""
        problems = Problems()
        tree = copy.deepcopy(written)
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

    def flagged(self, error: ZerodriftError, rules_before: int = 0) -> ZerodriftError:
        """The same error, by the flags of the keys that it is about; of a config that had so many rules
        before."""
        named = [
            replace(problem, where=self._flag(problem.where, rules_before)) for problem in error.problems
        ]
        return error if named == list(error.problems) else type(error).of(named)

    def _flag(self, where: str, rules_before: int = 0) -> str:
        """The flag of a key, or of what it is in; what no flag has brought keeps its name."""
        for path, flag in self.flags.items():
            if path.startswith(f"{RULES}["):
                number = int(path[len(RULES) + 1 : path.index("]")]) + rules_before
                path = f"{RULES}[{number}]{path[path.index(']') + 1 :]}"
            if where == path or where.startswith((f"{path}.", f"{path}[", f"{path}:")):
                return flag
        return where


def _paths(tree: Mapping[str, Any], path: str = "") -> list[str]:
    """Of every key that holds no block."""
    found: list[str] = []
    for key, value in tree.items():
        here = join(path, key)
        if here == RULES and isinstance(value, list):
            found += [join(here, number) for number in range(len(value))]
        else:
            found += _paths(value, here) if isinstance(value, dict) and value else [here]
    return found
