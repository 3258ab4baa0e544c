"""Ordered rules: their matches, and the demands of all rules that match one parameter.

The last match wins, column by column. A tied parameter is matched by each of its names and gets the widest
demand of each column. Values stay text here; `columns.py` converts and completes them.

Invariant: a rule that matches nothing is an error, so that a misspelt pattern is never ignored.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Sequence

from zerodrift import dtypes
from zerodrift.config import RULES, collect_written, schema
from zerodrift.dtypes import DType
from zerodrift.errors import Problems, nearest
from zerodrift.model import ModelSpec, OwningModule, ParameterSpec
from zerodrift.policy.decisions import Columns, ResolvedRule

PIN: tuple[tuple[str, str], ...] = (
    ("storage", "fp32"),
    ("gather", "fp32"),
    ("compute", "fp32"),
    ("accumulate", "fp32"),
    ("reduce.wire", "fp32"),
    ("reduce.sum", "fp32"),
    ("master", "same"),
    ("state", "fp32"),
    ("export", "fp32"),
)
"""The columns of `pin: fp32`: the parameter is never rounded."""


def is_by_rule(why: str) -> bool:
    """Return True if the key of a demand, or a reason, is a rule and not a key for all parameters."""
    return why.startswith(RULES)


_COLUMNS = ("storage", "gather", "compute", "grad", "accumulate", "master", "state", "export", "reduce")
_OPTIONS = ("placement", "optimizer", "frozen")

PRODUCTS = ("forward", "grad_input", "grad_weight")
"""The products of a linear layer, in the order in which they are formed."""
_NARROW = {"fp8": PRODUCTS, "fp8-hp-grad-weight": PRODUCTS[:2]}

Demands = dict[str, tuple[str, str]]


def column_values(block: schema.Precision | schema.Rule) -> tuple[tuple[str, str], ...]:
    """Return the columns that a block sets as (column, value) texts.

    `reduce` is split into its parts, and so is a `compute` that is about products.
    """
    values: dict[str, str] = {}
    for name in (*_COLUMNS, *_OPTIONS):
        value = getattr(block, name, None)
        if isinstance(value, (schema.MatrixProducts, schema.Reduce)):
            values |= {f"{name}.{part}": str(of).lower() for part, of in collect_written(value).items()}
        elif value in _NARROW:
            values |= {f"compute.{part}": str(DType.FP8_ROW) for part in _NARROW[value]}
        elif value is not None:
            values["reduce.wire" if name == "reduce" else name] = str(value)
    return tuple(values.items())


def from_config(rules: Sequence[schema.Rule], substrings: Sequence[str]) -> tuple[ResolvedRule, ...]:
    """Return the rules in order: DeepSpeed's pinned substrings, then `precision.rules`, which win."""
    key = "zero_optimization.fp32_pinned_parameters"
    resolved = [
        ResolvedRule("substring", text, "", PIN, True, None, f"{key}[{number}]: '{text}'")
        for number, text in enumerate(substrings)
    ]
    for number, block in enumerate(rules):
        sets = (dict(PIN) if block.pin is not None else {}) | dict(column_values(block))
        sets.pop("reduce.order", None)  # that of `precision.reduce`, or refused
        pattern, klass = block.match or "", block.class_ or ""
        kind = "+".join(name for name, text in (("glob", pattern), ("class", klass)) if text)
        shown = " and ".join(f"'{text}'" for text in (pattern, klass) if text)
        pinned = block.pin is not None and all(sets[column] == value for column, value in PIN)
        why, values = f"{RULES}[{number}]: {shown}", tuple(sets.items())
        rule = ResolvedRule(kind, pattern, klass, values, pinned, block.output, why)  # type: ignore[arg-type]
        resolved.append(rule)
    return tuple(resolved)


def is_class(klass: str, wanted: str) -> bool:
    """Return True if `wanted` names the dotted class `klass`.

    `torch.nn.Linear` names `torch.nn.modules.linear.Linear`, because users import a class from a parent
    package of its module. A bare `Linear` names any class of that name.
    """
    package, _, name = klass.rpartition(".")
    wanted_package, _, wanted_name = wanted.rpartition(".")
    if name != wanted_name:
        return False
    return not wanted_package or package == wanted_package or package.startswith(wanted_package + ".")


@functools.lru_cache(maxsize=256)
def glob(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """Compile a glob on parameter names; `*` also crosses dots."""
    return re.compile(fnmatch.translate(pattern)).match


def matches(rule: ResolvedRule, name: str, owner: OwningModule) -> bool:
    """Return True if a rule matches a parameter by one of its names."""
    if rule.kind == "substring":
        return rule.pattern in name
    if rule.pattern and not glob(rule.pattern)(name):
        return False
    return not rule.klass or is_class(owner.klass, rule.klass)


def demands(
    base: Demands, rules: Sequence[ResolvedRule], parameter: ParameterSpec
) -> tuple[Demands, tuple[ResolvedRule, ...]]:
    """Return the demands on a parameter and the rules that matched it, over all its names."""
    per_name: list[Demands] = []
    matched: dict[ResolvedRule, None] = {}
    for name, owner in zip(parameter.names, parameter.owners, strict=True):
        mine = dict(base)
        for rule in rules:
            if matches(rule, name, owner):
                matched[rule] = None
                if any(column == "compute" for column, _ in rule.sets):
                    mine = {column: of for column, of in mine.items() if not column.startswith("compute.")}
                mine |= {column: (value, rule.why) for column, value in rule.sets}
        per_name.append(mine)
    return functools.reduce(_wider, per_name), tuple(matched)


_WIDTH = {
    "8bit": -1,
    "split": 1,
    "bf16-stochastic": 2,
    "every": 1,
    "matrices": 1,
    "whole": 2,
    "AdamW": 1,
    "true": 1,
}
"""Order of the values of a column that are not dtypes; all other values have 0."""


def _wider(left: Demands, right: Demands) -> Demands:
    """Merge the demands of two names of a tied parameter; the wider value of each column wins."""
    out = {**left, **right, **left}  # in the order of the left
    for column in left.keys() & right.keys():
        (one, one_why), (other, other_why) = left[column], right[column]
        if one != other:
            if {one, other} <= DType._value2member_map_.keys():
                wide = str(dtypes.widest((DType(one), DType(other))))
            elif "fp32" in (one, other):
                wide = "fp32"
            else:
                wide = max(one, other, key=lambda value: _WIDTH.get(value, 0))
            why = other_why if wide == other else one_why if wide == one else f"{one_why}; {other_why}"
            out[column] = (wide, f"{why} (widest of tied names)")
    return out


def require_matches(rules: Iterable[ResolvedRule], model: ModelSpec, problems: Problems) -> None:
    """Refuse rules that match no parameter, and suggest the nearest names."""
    pending = list(rules)
    for parameter in model.parameters:
        if not pending:
            return
        names = list(zip(parameter.names, parameter.owners, strict=True))
        pending = [rule for rule in pending if not any(matches(rule, *name) for name in names)]
    for rule in pending:
        must = f"must match a parameter of {model.source}"
        problems.add(rule.why, must, got="no match", do=_hint(rule, model))


TORCH_MODULES = "torch.nn.modules."
"""Class prefix of modules whose forward needs all their parameters in one dtype."""


def require_one_compute(
    model: ModelSpec, columns: Sequence[Columns], rules: Sequence[ResolvedRule], problems: Problems
) -> None:
    """Refuse a module of torch whose parameters compute in different dtypes, with the rule to write instead.

    Modes with autocast skip this check, because autocast casts for each operation.
    """
    held: dict[str, dict[str, DType]] = {}
    by_rule: dict[str, ResolvedRule] = {}
    known = {rule.why: rule for rule in rules}
    for parameter, cells in zip(model.parameters, columns, strict=True):
        for name, owner in zip(parameter.names, parameter.owners, strict=True):
            if owner.klass.startswith(TORCH_MODULES) and cells.compute.is_floating:
                held.setdefault(owner.path, {})[name.rpartition(".")[2]] = cells.compute
                if (rule := known.get(cells.reasons()["compute"])) is not None:
                    by_rule[owner.path] = rule
    mixed = [path for path, dtypes in held.items() if len(set(dtypes.values())) > 1]
    if mixed:
        path, more = mixed[0], f" and {len(mixed) - 1} more" if len(mixed) > 1 else ""
        must = "must leave all parameters of a module one `compute` dtype"
        got = f"{', '.join(f'{name} {dtype}' for name, dtype in held[path].items())} in `{path}`{more}"
        rule, folded = by_rule.get(path), re.sub(r"[0-9]+", "*", path)
        alike = [other for other in mixed if re.sub(r"[0-9]+", "*", other) == folded]
        pattern = f"{folded if len(alike) > 1 else path}.*"
        instead = f'{{match: "{pattern}", {_written(rule)}}}' if rule is not None else pattern
        where = "precision.rules" if rule is None else rule.why
        problems.add(where, must, got=got, do=f"Match them together: `{instead}`.")


def _written(rule: ResolvedRule) -> str:
    """Write the columns of a rule as they stand in a config."""
    sets = {key: value for key, value in rule.sets if not rule.pin or (key, value) not in PIN}
    parts = ["pin: fp32"] if rule.pin else []
    parts += [f"{key}: {value}" for key, value in sets.items() if "." not in key]
    for block in ("compute", "reduce"):
        inner = [
            f"{key.partition('.')[2]}: {value}" for key, value in sets.items() if key.startswith(f"{block}.")
        ]
        parts += [f"{block}: {{{', '.join(inner)}}}"] if inner else []
    return ", ".join([*parts, f"output: {rule.output}"] if rule.output is not None else parts)


def _hint(rule: ResolvedRule, model: ModelSpec) -> str:
    classes = sorted({owner.klass for p in model.parameters for owner in p.owners if owner.klass})
    if rule.klass and not classes:
        return "This source has no module classes: plan from the module or an HF config instead."
    if rule.klass and not any(is_class(klass, rule.klass) for klass in classes):
        by_name = {klass.rpartition(".")[2]: klass for klass in classes}
        near = [by_name[name] for name in nearest(rule.klass.rpartition(".")[2], by_name)]
        return f"Classes here: {', '.join(near or classes[:4])}."
    names = [name for parameter in model.parameters for name in parameter.names]
    shapes = {re.sub(r"\d+", "*", name): None for name in names}
    words = [word for word in re.split(r"[.*]+", rule.pattern) if word]
    inside = [name for name in shapes if words and all(word in name for word in words)]
    parts = {part for name in names for part in name.split(".")}
    # A component of the pattern that no name has may be misspelt.
    odd = next((near for word in reversed(words) if word not in parts if (near := nearest(word, parts))), [])
    by_word = [name for name in shapes if any(part in name.split(".") for part in odd)]
    close = inside or nearest(rule.pattern.strip("*"), shapes, count=3) or by_word or list(shapes)
    glob_only = "`match` is a glob, no regular expression. " if set(rule.pattern) & set("\\^$|(){}+") else ""
    return f"{glob_only}Nearest: " + ", ".join(f"`{name}`" for name in close[:3]) + "."
