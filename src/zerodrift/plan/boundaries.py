"""The dtype boundaries of a forward: modules that compute in a dtype of their own, and the dtype they return.

Section 2 of `docs/architecture.md` says what a boundary is. A module without a forward, such as a
`ModuleList`, is never called, so its children have boundaries instead. A plan from files says in a note that
it knows only names, and the engine follows the plan or refuses it.

Invariant: a pure function of policy and model; no boundary lies inside another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from zerodrift.dtypes import DType
from zerodrift.model import ModelSpec
from zerodrift.plan.stages import names_of
from zerodrift.plan.table import Boundary, Plan
from zerodrift.policy import HEADS, Columns, Mode, Output, Policy, matches

PROJECTIONS = re.compile(
    r"(.*_)?(proj|projection|query|key|value|qkv|kv|dense|attn|fc\d*)|w?[qkvo]|w[123]|up|down|out|c_fc|lin\d*"
)
"""Last names of projections in attention and feed-forward layers, whose results are combined with others."""


def find_boundaries(policy: Policy, model: ModelSpec, columns: Sequence[Columns]) -> tuple[Boundary, ...]:
    """Find the boundaries of a model in the order of its parameters; `columns` has one item per parameter."""
    own = [has_own_dtype(cells, policy.mode) for cells in columns]
    if not any(own):
        return ()
    mixed: set[str] = set()
    """Modules with a parameter of the usual dtype inside."""
    inside: dict[str, list[int]] = {}
    """Module -> its other parameters, once per name."""
    for index, parameter in enumerate(model.parameters):
        # Without autocast an integer parameter has no dtype of its own.
        is_usual = not own[index] and (policy.mode.autocast or columns[index].compute.is_floating)
        for path in (path for name in parameter.names for path in enclosing_modules(name)):
            if is_usual:
                mixed.add(path)
            else:
                inside.setdefault(path, []).append(index)
    finder = _BoundaryFinder(policy, model, columns)
    decided: dict[str, Boundary | None] = {}
    for name in (name for index, p in enumerate(model.parameters) if own[index] for name in p.names):
        for path in (path for path in reversed(list(enclosing_modules(name))) if path not in mixed):
            if path not in decided:
                decided[path] = finder.find(path, inside[path])
            if decided[path] is not None:
                break
    return tuple(boundary for boundary in decided.values() if boundary is not None)


def boundaries_of_piece(plan: Plan, piece: int) -> tuple[Boundary, ...]:
    """Return the boundaries of modules that have a parameter in one piece of a pipeline."""
    here = {path for name in names_of(plan, piece) for path in enclosing_modules(name)}
    return tuple(boundary for boundary in plan.boundaries if boundary.path in here)


def enclosing_modules(name: str) -> Iterator[str]:
    """List the paths of the modules around a parameter, innermost first, without the model itself."""
    while True:
        name = name.rpartition(".")[0]
        if not name:
            return
        yield name


def has_own_dtype(cells: Columns, mode: Mode) -> bool:
    """Return True if a parameter computes in another dtype than the mode's.

    Under autocast each operation chooses its dtype, and only a pin excludes a parameter.
    """
    if mode.autocast:
        return cells.pinned
    return cells.compute.is_floating and cells.compute is not mode.dtype


class _BoundaryFinder:
    def __init__(self, policy: Policy, model: ModelSpec, columns: Sequence[Columns]) -> None:
        self._policy = policy
        self._model = model
        self._columns = columns
        self._first_path = dict(model.shared)
        self._has_classes = model.has_classes

    def find(self, path: str, inside: Sequence[int]) -> Boundary | None:
        floating = [self._columns[index] for index in inside if self._columns[index].compute.is_floating]
        dtypes = {cells.compute for cells in floating}
        if len(dtypes) != 1 or not self._is_called(path, inside):
            return None
        by_rule = self._by_rule(inside)
        output, why = by_rule or self._by_default(path, inside, floating[0].compute)
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
        """Return the output that rules set for the parameters, and its reason; `keep` wins over `input`."""
        by_output = {self._columns[index].output: index for index in reversed(inside)}
        output: Output | None = "keep" if "keep" in by_output else "input" if "input" in by_output else None
        if output is None:
            return None
        parameter = self._model.parameters[by_output[output]]
        names = list(zip(parameter.names, parameter.owners, strict=True))
        rules = (rule for rule in reversed(self._policy.rules) if rule.output == output)
        return output, next(rule.why for rule in rules if any(matches(rule, *name) for name in names))

    def _by_default(self, path: str, inside: Sequence[int], dtype: DType) -> tuple[Output, str]:
        """Return the default output and its reason.

        A router or a head keeps its dtype: it holds one matrix and is not named as a projection. A norm holds
        no matrix, a block several, and a convolution a stack; they return the dtype of their input.
        """
        shapes = [self._model.parameters[index].shape for index in inside]
        matrices = [shape for shape in shapes if len(shape) > 1]
        if len(matrices) != 1:
            return "input", "several matrices, as a block" if matrices else "no matrix, as a norm"
        name = self._first_path.get(path, path).rpartition(".")[2]
        if PROJECTIONS.fullmatch(name):
            return "input", "a projection, by its name"
        if len(matrices[0]) > 2 and name not in HEADS:
            return "input", "a stack of matrices, as a convolution"
        if not dtype.holds(self._policy.mode.dtype):
            return "input", "narrower than the mode"
        return "keep", "one matrix, as a router or a head"


def note_unused_outputs(policy: Policy, found: Sequence[Boundary]) -> Iterator[str]:
    """Name the rules whose `output` decides nothing."""
    used = {dict(boundary.why)["output"] for boundary in found}
    for rule in policy.rules:
        if rule.output is not None and rule.why not in used:
            yield f"{rule.why}: `output: {rule.output}` has no effect: no boundary depends on it"


def note_missing_classes(policy: Policy, model: ModelSpec, columns: Sequence[Columns]) -> Iterator[str]:
    if model.has_classes or not any(has_own_dtype(cells, policy.mode) for cells in columns):
        return
    yield (
        "this source has no module classes: boundaries take every tensor for a parameter, and a module whose "
        "parts are numbered for a list; plan from the module or an HF config to see the engine's"
    )
