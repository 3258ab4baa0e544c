"""Search for parameters by name or glob, with the nearest names if there is no match.

Globs match the full name and `*` crosses dots, as in `precision.rules`. A misspelt name is compared by
components, because comparing it with tens of thousands of names takes seconds.

Invariant: a search without a match is an error.
"""

from __future__ import annotations

import fnmatch
import re

from zerodrift.errors import ModelError, nearest
from zerodrift.plan.table import Plan
from zerodrift.report.rows import template

_OFFERED = 3
"""Most names in a message."""


def matching(plan: Plan, pattern: str, where: str) -> tuple[int, ...]:
    """Return indices of the rows with a name that the glob matches. `where` names the argument in errors."""
    match = re.compile(fnmatch.translate(pattern)).match
    indices = tuple(index for index, row in enumerate(plan.rows) if any(map(match, row.names)))
    if not indices:
        wider = f"*{pattern.strip('*.')}*"
        names = (name for row in plan.rows for name in row.names)
        if any(fnmatch.fnmatchcase(name, wider) for name in names):
            todo = f"A glob matches the full name: try `{wider}`."
        else:
            todo = _offer(plan, pattern) or "A glob matches the full name: try `*` at both ends."
        raise ModelError(where, f"must match a parameter of {plan.source}", got=repr(pattern), do=todo)
    return indices


def index_of(plan: Plan, name: str) -> int:
    """Return the index of the row that has this name."""
    for index, row in enumerate(plan.rows):
        if name in row.names:
            return index
    todo = _offer(plan, name) or "`zerodrift plan` lists all of them."
    raise ModelError(name, f"must be a parameter of {plan.source}", got="no such name", do=todo)


def _offer(plan: Plan, query: str) -> str:
    """Return a sentence with names or patterns near the query, or `""`."""
    names = [name for row in plan.rows for name in row.names]
    offered = _mended(query, names) or _containing(query, names) or _similar(query, names)
    if not offered:
        return ""
    return "Did you mean " + " or ".join(f"`{name}`" for name in offered[:_OFFERED]) + "?"


def _mended(query: str, names: list[str]) -> list[str]:
    """Replace each unknown component by the nearest known one, if the result matches a name."""
    known = {part for name in names for part in name.split(".")}
    words = {part for part in known if not part.isdecimal()}
    parts = []
    for part in query.split("."):
        plain = part.strip("*")
        near = nearest(plain, words) if plain and plain not in known else []
        parts.append(part.replace(plain, near[0]) if near else part)
    mended = ".".join(parts)
    return [mended] if mended != query and fnmatch.filter(names, mended) else []


def _containing(query: str, names: list[str]) -> list[str]:
    """Return the first, the middle and the last name that contains the query."""
    word = query.strip("*.")
    if not word or "*" in word:
        return []
    containing = [name for name in names if word in name]
    if not containing:
        return []
    return list(dict.fromkeys([containing[0], containing[len(containing) // 2], containing[-1]]))


def _similar(query: str, names: list[str]) -> list[str]:
    """Return the first name of each template that resembles the query."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(template(name), name)
    return [first[text] for text in nearest(template(query), first, count=_OFFERED)]
