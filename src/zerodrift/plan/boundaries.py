"""Where dtypes change in a forward: the modules that compute in a dtype of their own, and what each returns.

A module all of whose parameters compute in one dtype that is not the mode's (a pinned router, norm or head)
is given floating inputs in that dtype, runs with autocast off, and returns its own dtype (`keep`) or its
input's (`input`). The outermost such module has the boundary. One without a forward of its own, such as a
`ModuleList`, is never called, so its parts have theirs.

From files only names are known: there every tensor counts as a parameter, and a module whose parts are all
numbered as a list that is never called. Such a plan says so in a note, and an engine that is given it does as
it says or refuses.

Invariant: a pure function of policy and model; no boundary lies inside another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from zerodrift.model.spec import ModelSpec
from zerodrift.plan.stages import names_of
from zerodrift.plan.table import Boundary, Plan
from zerodrift.policy.nouns import Columns, Mode, Output, Policy
from zerodrift.policy.rules import matches

PROJECTIONS = re.compile(
    r"(.*_)?(proj|projection|query|key|value|qkv|kv|dense|attn|fc\d*)|w?[qkvo]|w[123]|up|down|out|c_fc|lin\d*"
)
"""Last names of modules whose results meet those of others: of attention and of feed-forward layers."""


def boundaries(policy: Policy, model: ModelSpec, columns: Sequence[Columns]) -> tuple[Boundary, ...]:
    """The boundaries of a model whose parameters have these columns, in the order of its parameters."""
    distinct = {id(cells): cells for cells in columns}
    apart = {key for key, cells in distinct.items() if computes_apart(cells, policy.mode)}
    if not apart:
        return ()
    usual = {key for key, cells in distinct.items() if _computes_as_usual(cells, policy.mode)}
    mixed: set[str] = set()
    """Modules around a parameter that computes as the mode does."""
    for parameter, cells in zip(model.parameters, columns, strict=True):
        if id(cells) in usual:
            for name in parameter.names:
                for path in enclosing_modules(name):
                    if path in mixed:
                        break
                    mixed.add(path)
    inside: dict[str, list[int]] = {}
    """Of every other module: its parameters, once per name."""
    for index, parameter in enumerate(model.parameters):
        if id(columns[index]) not in usual:
            for name in parameter.names:
                for path in enclosing_modules(name):
                    if path in mixed:
                        break
                    inside.setdefault(path, []).append(index)
    decide = _Decide(policy, model, columns)
    decided: dict[str, Boundary | None] = {}
    for parameter, cells in zip(model.parameters, columns, strict=True):
        if id(cells) in apart:
            for name in parameter.names:
                for path in reversed([path for path in enclosing_modules(name) if path in inside]):
                    if path not in decided:
                        decided[path] = decide(path, inside[path])
                    if decided[path] is not None:
                        break
    return tuple(boundary for boundary in decided.values() if boundary is not None)


def of_piece(plan: Plan, piece: int) -> tuple[Boundary, ...]:
    """Those of modules that have a parameter in one piece of a pipeline."""
    here = {path for name in names_of(plan, piece) for path in enclosing_modules(name)}
    return tuple(boundary for boundary in plan.boundaries if boundary.path in here)


def enclosing_modules(name: str) -> Iterator[str]:
    """The paths of the modules around a parameter, innermost first; the model itself is none of them."""
    while True:
        name = name.rpartition(".")[0]
        if not name:
            return
        yield name


def computes_apart(cells: Columns, mode: Mode) -> bool:
    """Whether a parameter computes in another dtype than what is around it. Under autocast each operation
    decides, and only a pin takes a parameter out of it."""
    if mode.autocast:
        return cells.pinned
    return cells.compute.is_floating and cells.compute is not mode.dtype


def _computes_as_usual(cells: Columns, mode: Mode) -> bool:
    """An integer parameter says nothing about its module, but that autocast is on around it."""
    return not computes_apart(cells, mode) and (mode.autocast or cells.compute.is_floating)


class _Decide:
    """The boundary at a module that holds no parameter that computes as the mode does, if there is one."""

    def __init__(self, policy: Policy, model: ModelSpec, columns: Sequence[Columns]) -> None:
        self._policy = policy
        self._model = model
        self._columns = columns
        self._first_path = dict(model.shared)
        self._has_classes = model.has_classes

    def __call__(self, path: str, inside: Sequence[int]) -> Boundary | None:
        floating = [self._columns[index] for index in inside if self._columns[index].compute.is_floating]
        dtypes = {cells.compute for cells in floating}
        if len(dtypes) != 1 or not self._is_called(path, inside):
            return None
        by_rule = self._by_rule(inside)
        output, why = by_rule or self._by_default(path, inside)
        mode = self._policy.mode
        lookup = None if mode.autocast or (by_rule and output == "keep") else mode.dtype
        reasons = (("dtype", floating[0].reasons()["compute"]), ("output", why))
        return Boundary(path, dtypes.pop(), output, lookup, reasons)

    def _is_called(self, path: str, inside: Sequence[int]) -> bool:
        if self._has_classes:
            return path not in self._model.containers
        names = (name for index in inside for name in self._model.parameters[index].names)
        return not all(name[len(path) + 1 :].partition(".")[0].isdecimal() for name in names)

    def _by_rule(self, inside: Sequence[int]) -> tuple[Output, str] | None:
        """What rules say of the parameters; `keep` where they say both."""
        said = {self._columns[index].output: index for index in reversed(inside)}
        output: Output | None = "keep" if "keep" in said else "input" if "input" in said else None
        if output is None:
            return None
        parameter = self._model.parameters[said[output]]
        names = list(zip(parameter.names, parameter.owners, strict=True))
        rules = (rule for rule in reversed(self._policy.rules) if rule.output == output)
        return output, next(rule.why for rule in rules if any(matches(rule, *name) for name in names))

    def _by_default(self, path: str, inside: Sequence[int]) -> tuple[Output, str]:
        """A router or a head holds one matrix and has no projection's name, and keeps; a norm holds none and
        a block several, and what comes after those computes in the dtype of what came before."""
        matrices = sum(len(self._model.parameters[index].shape) > 1 for index in inside)
        if matrices != 1:
            return "input", "several matrices, as a block" if matrices else "no matrix, as a norm"
        name = self._first_path.get(path, path).rpartition(".")[2]
        if PROJECTIONS.fullmatch(name):
            return "input", "a projection, by its name"
        return "keep", "one matrix, as a router or a head"


def unknown(policy: Policy, model: ModelSpec, columns: Sequence[Columns]) -> Iterator[str]:
    """What a person should know where names are all that boundaries were found by."""
    if model.has_classes or not any(computes_apart(cells, policy.mode) for cells in columns):
        return
    yield (
        "this source has no module classes: boundaries take every tensor for a parameter, and a module whose "
        "parts are numbered for a list; plan from the module or an HF config to see the engine's"
    )
