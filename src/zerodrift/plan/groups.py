"""The groups of `fully_shard`: the modules that it is called on, and the policy of each.

`fully_shard` has one compute dtype, one gradient dtype and one storage dtype per group: a module with
everything below it that is in no other group. So a unit is a group, and modules that differ from the rest of
their unit are groups of their own, as large as possible. Two kinds of parameters in one module are refused.

Groups follow from names alone; `backends/placement.py` replaces containers without a forward with their
children.

Invariant: pure. Every row is in exactly one group, and all rows of a group fit its policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, Problems
from zerodrift.plan.boundaries import enclosing_modules
from zerodrift.plan.table import Plan, Row
from zerodrift.policy import Reduction


@dataclass(frozen=True, slots=True)
class Kind:
    """The dtypes and the reduction that all rows of a group share."""

    compute: DType
    update: tuple[DType, DType, Reduction] | None
    """(storage, accumulate, reduce) of trained parameters; None if all are frozen."""

    def fits(self, row: Row) -> bool:
        columns = row.columns
        if not columns.storage.dtype.is_floating:
            return True
        other = kind_of(row)
        return other.compute is self.compute and other.update in (None, self.update)


@dataclass(frozen=True, slots=True)
class Group:
    """One call of `fully_shard`."""

    unit: int
    paths: tuple[str, ...]
    """Module path; several for a tied parameter whose modules differ from their unit."""
    kind: Kind
    rows: tuple[int, ...]


def kind_of(row: Row) -> Kind:
    update = row.columns.update
    trained = update and (row.columns.storage.dtype, update.accumulate.dtype, update.reduce)
    return Kind(row.columns.compute, trained or None)


def find_groups(plan: Plan) -> tuple[Group, ...]:
    """Return the groups of a plan, unit by unit; ConfigError names all parameters that cannot be grouped."""
    problems = Problems()
    units = {unit.name for unit in plan.units if unit.name}
    for row in plan.rows:
        if not row.shape:
            must = "must have a dimension to be cut on, on backend fsdp2"
            do = "Give it the shape [1], or use the native backend."
            problems.add(row.name, must, got="a parameter without dimensions", do=do)
        in_units = (not units.isdisjoint(enclosing_modules(name)) for name in row.names)
        if plan.units[row.unit].name == "" and all(in_units):
            must = "must have a name outside of the units that it is tied across, on backend fsdp2"
            do = "Name a module that holds all of them in `sharding.units`, or use the native backend."
            problems.add(row.name, must, got=", ".join(row.names), do=do)
    groups: list[Group] = []
    for number in range(len(plan.units)):
        groups += _UnitGroups(plan, number, problems).groups()
    problems.raise_as(ConfigError, "backend fsdp2")
    return tuple(groups)


class _UnitGroups:
    def __init__(self, plan: Plan, number: int, problems: Problems) -> None:
        self._unit, self._rows = plan.units[number], plan.rows
        self._number = number
        self._problems = problems
        self._made: dict[tuple[str, ...], tuple[Kind, list[int]]] = {}

    def groups(self) -> list[Group]:
        unit = self._unit
        owners = {row: tuple(dict.fromkeys(map(_owner, self._rows[row].names))) for row in unit.rows}
        kind = self._main([row for row in unit.rows if owners[row] == (unit.name,)], unit.rows)
        self._made[(unit.name,)] = (kind, [])
        for row in (row for row in unit.rows if len(owners[row]) > 1):
            # A parameter of several modules is in the unit's group, or makes its modules one group.
            own = kind_of(self._rows[row])
            fits = kind.fits(self._rows[row])
            self._made.setdefault((unit.name,) if fits else owners[row], (own, []))[1].append(row)
        self._visit(unit.name, [row for row in unit.rows if len(owners[row]) == 1], (unit.name,), kind)
        return [
            Group(self._number, paths, kind, tuple(sorted(rows)))
            for paths, (kind, rows) in self._made.items()
            if rows or paths == (unit.name,)
        ]

    def _kinds(self, rows: Iterable[int]) -> list[Kind]:
        """List the different kinds among rows. A frozen row counts only if it fits no trained kind."""
        floating = (row for row in rows if self._rows[row].columns.storage.dtype.is_floating)
        kinds = list(dict.fromkeys(kind_of(self._rows[row]) for row in floating))
        trained = [kind for kind in kinds if kind.update is not None]
        computed = {kind.compute for kind in trained}
        return trained + [kind for kind in kinds if kind.update is None and kind.compute not in computed]

    def _main(self, direct: Sequence[int], rows: Sequence[int]) -> Kind:
        """Return the kind of most elements, among those that fit the rows of the unit's own module."""
        kinds = self._kinds(rows)
        fitting = [k for k in kinds if all(k.fits(self._rows[row]) for row in direct)]
        weights = {kind: 0 for kind in fitting or self._kinds(direct) or kinds}
        for row in rows:
            kind = kind_of(self._rows[row])
            if kind in weights:
                weights[kind] += self._rows[row].numel
        return max(weights, key=lambda kind: weights[kind]) if weights else Kind(DType.FP32, None)

    def _visit(self, module: str, below: list[int], path: tuple[str, ...], kind: Kind) -> None:
        """Put the rows below a module into the group at `path`, or into groups of their own."""
        shared = next((paths for paths in self._made if len(paths) > 1 and module in paths), None)
        if shared is not None:
            path, kind = shared, self._made[shared][0]
        if all(kind.fits(self._rows[row]) for row in below):
            self._made[path][1].extend(below)
            return
        kinds = self._kinds(below)
        if len(kinds) == 1 and module not in path:
            self._made[(module,)] = (kinds[0], list(below))
            return
        children: dict[str, list[int]] = {}
        for row in below:
            inner = _owner(self._rows[row].name)[len(module) :].strip(".").partition(".")[0]
            children.setdefault(f"{module}.{inner}".strip("."), []).append(row)
        own = children.pop(module, [])
        direct = self._kinds(own)
        is_own_kind = all(kind.fits(self._rows[row]) for row in own)
        if len(direct) > 1 or (module in path and not is_own_kind):
            self._refuse(module, own, direct if len(direct) > 1 else [kind, *direct])
            return
        if not is_own_kind:
            path, kind = (module,), direct[0]
            self._made[path] = (kind, [])
        self._made[path][1].extend(own)
        for child, rows in children.items():
            self._visit(child, rows, path, kind)

    def _refuse(self, module: str, own: Sequence[int], kinds: list[Kind]) -> None:
        names = ", ".join(self._rows[row].name.rpartition(".")[2] for row in own)
        below = f"{module}.*" if module else "*"
        must = "must hold parameters of one kind: fully_shard has one policy per module"
        do = f"Give all of `{below}` the same columns, or use the native backend."
        got = f"{' and '.join(map(_kind_text, kinds))} among {names}"
        self._problems.add(module or "model", must, got=got, do=do)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _kind_text(kind: Kind) -> str:
    if kind.update is None:
        return f"compute {kind.compute}, frozen"
    storage, accumulate, reduce = kind.update
    text = f"storage {storage}, compute {kind.compute}, accumulate {accumulate}, reduce {reduce.wire}"
    return f"{text} {reduce.when}"
