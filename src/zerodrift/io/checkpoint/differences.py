"""What differs between a checkpoint and the run that loads it: what is refused, and what is only said.

Another stage, world size, master scheme or dtype changes where and how values rest, not what they mean: it
is said. Another model, optimizer, grouping or schedule would give the values another meaning: it is refused
with every name at once, and can be allowed by its word.

Invariant: a load that neither raises nor says anything continues the run bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from zerodrift.errors import CheckpointError, Problem, Problems, did_you_mean
from zerodrift.io.checkpoint.manifest import Manifest, SavedParameter
from zerodrift.plan.table import Boundary, Plan, Row

Allowed = Literal["model", "optimizer", "groups", "schedule", "loss_scale", "buffers"]
"""Differences that are refused unless they are allowed; what they are about then stays as the run has it.
`model`: parameters that only one side has; of those on both sides shapes and ties must agree all the same."""

SHOWN = 20
"""Names that an error or a note lists; the rest is a number."""

_EXECUTION = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that say how, not what."""


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """One thing that is not as it was when the checkpoint was saved."""

    what: str
    saved: str
    now: str
    effect: str = ""
    """What follows, a clause."""

    def __str__(self) -> str:
        text = f"{self.what}: {self.saved} -> {self.now}"
        return f"{text} ({self.effect})" if self.effect else text


@dataclass(frozen=True, slots=True)
class Running:
    """The run that loads, as far as it is compared."""

    plan: Plan
    kind: str
    """Of its optimizer, `""` without one."""
    group_of: Mapping[str, int]
    groups: Sequence[Mapping[str, Any]]
    schedule: str
    versions: tuple[tuple[str, str], ...]


def check_allowed(allow: Collection[Allowed]) -> frozenset[Allowed]:
    for word in allow:
        if word not in get_args(Allowed):
            known = get_args(Allowed)
            todo = did_you_mean(word, known)
            raise CheckpointError("allow", f"must be of {', '.join(known)}", got=repr(word), do=todo)
    return frozenset(allow)


# --- the model --------------------------------------------------------------------------------------------


def check_model(
    entries: Sequence[SavedParameter], plan: Plan, where: str, strict: bool = True
) -> list[CheckpointDifference]:
    """The checkpoint must be of this model: the same parameters, shapes and ties. Unless `strict`, those
    that only one side has are returned."""
    problems = Problems()
    known = {name: entry for entry in entries for name in entry.names}
    missing: list[str] = []
    for row in plan.rows:
        saved = known.get(row.name)
        if saved is None:
            missing.append(row.name)
        elif saved.shape != row.whole_shape:
            problems.add(row.name, f"must have shape {list(row.whole_shape)}", got=str(list(saved.shape)))
        elif set(saved.names) != set(row.names):
            must = f"must be one parameter under the names {', '.join(row.names)}"
            problems.add(row.name, must, got=", ".join(saved.names), do="Tie as the saved model did.")
    here = {name for row in plan.rows for name in row.names}
    extra = [entry.name for entry in entries if not here & set(entry.names)]
    todo = "`allow=('model',)` loads what both have."
    if missing and strict:
        problems.add(where, "must hold every parameter of the model", got=f"no {_list(missing)}", do=todo)
    if extra and strict:
        problems.add(where, "must hold no parameter that the model does not have", got=_list(extra), do=todo)
    problems.raise_as(CheckpointError, f"`{where}` is of another model")
    names_by_fault = (("missing", missing, "they stay as they are"), ("more", extra, "they are not read"))
    return [
        CheckpointDifference("model", f"{len(names)} parameters {what}", _list(names), effect)
        for what, names, effect in names_by_fault
        if names
    ]


def _list(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(f"`{name}`" for name in names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def check_buffers(
    saved: Mapping[str, Sequence[int]], here: Mapping[str, Sequence[int]], persistent: Collection[str]
) -> list[Problem]:
    """Buffers that a state dict holds must fit; what a model only computes may come and go."""
    problems = []
    for name in sorted({*saved, *here}):
        mine, theirs = here.get(name), saved.get(name)
        if mine == theirs or not (name in persistent or mine is None):
            continue
        must = "must not be there" if mine is None else f"must have shape {list(mine)}"
        got = "none" if theirs is None else str(list(theirs))
        problems.append(
            Problem(f"buffer {name}", must, got=got, do="`allow=('buffers',)` leaves buffers as they are.")
        )
    return problems


# --- the optimizer and what goes with it ------------------------------------------------------------------


def check_meaning(
    manifest: Manifest, entries: Sequence[SavedParameter], state: Mapping[str, Any], now: Running
) -> dict[Allowed, list[Problem]]:
    """What would change the meaning of the optimizer's state, by the word that allows it."""
    problems_of: dict[Allowed, list[Problem]] = {
        "optimizer": [],
        "groups": [],
        "schedule": [],
        "loss_scale": [],
    }
    if manifest.optimizer != now.kind:
        got = now.kind or "none"
        todo = "Give the same, or `allow=('optimizer',)` to begin with new moments."
        must = f"must be {manifest.optimizer or 'none'}, as when it was saved"
        problems_of["optimizer"].append(Problem("optimizer", must, got=got, do=todo))
    elif now.kind:
        problems_of["groups"] += _groups(entries, state["groups"], now)
    if manifest.schedule != now.schedule:
        todo = "Give the same, or `allow=('schedule',)` to begin the schedule anew."
        must = f"must be {manifest.schedule or 'none'}, as when it was saved"
        problems_of["schedule"].append(Problem("schedule", must, got=now.schedule or "none", do=todo))
    scaled = now.plan.policy.loss_scale is not None
    if (state["scaler"] is not None) != scaled:
        todo = "Train in the same mode, or `allow=('loss_scale',)` to begin as this run's config says."
        must = f"must {'be there' if state['scaler'] is not None else 'not be there'}, as when it was saved"
        got = "one" if scaled else "none"
        problems_of["loss_scale"].append(Problem("loss scale", must, got=got, do=todo))
    return problems_of


def _groups(
    entries: Sequence[SavedParameter], saved: Sequence[Mapping[str, Any]], now: Running
) -> list[Problem]:
    todo = "Build the same groups, or `allow=('groups',)` to take those of this run."
    if len(saved) != len(now.groups):
        return [Problem("parameter groups", f"must be {len(saved)}", got=str(len(now.groups)), do=todo)]
    problems = []
    frozen = {row.name for row in now.plan.rows if not row.trained}
    moved = [
        f"`{entry.name}` (saved in {entry.group}, now in {_group(now, entry)})"
        for entry in entries
        if entry.group >= 0 and entry.name not in frozen and _group(now, entry) != entry.group
    ]
    if moved:
        more = f" and {len(moved) - SHOWN} more" if len(moved) > SHOWN else ""
        got = ", ".join(moved[:SHOWN]) + more
        problems.append(
            Problem("parameter groups", "must hold the parameters that they held", got=got, do=todo)
        )
    for number, (old, new) in enumerate(zip(saved, now.groups, strict=True)):
        for key in sorted(old.keys() & new.keys()):
            switched = isinstance(old[key], (bool, str)) and key not in _EXECUTION
            # Without momentum there is no moment for it.
            switched = switched or (key == "momentum" and bool(old[key]) != bool(new[key]))
            if switched and old[key] != new[key]:
                where = f"parameter group {number}, {key}"
                problems.append(Problem(where, f"must be {old[key]!r}", got=repr(new[key]), do=todo))
    return problems


def _group(now: Running, entry: SavedParameter) -> int:
    return next((now.group_of[name] for name in entry.names if name in now.group_of), -1)


# --- what is only said ------------------------------------------------------------------------------------


def differences(
    manifest: Manifest, entries: Sequence[SavedParameter], plan: dict[str, Any] | None, now: Running
) -> list[CheckpointDifference]:
    """Everything else that is not as it was."""
    changes: list[CheckpointDifference] = []

    def compare(what: str, saved: object, here: object, effect: str = "") -> None:
        if saved != here:
            changes.append(CheckpointDifference(what, str(saved), str(here), effect))

    versions = dict(now.versions)
    for package, version in manifest.versions:
        compare(package, version, versions.get(package, "none"), "bits may differ")
    if manifest.digest and manifest.digest == now.plan.digest:
        return changes
    if not manifest.digest:
        return [
            *changes,
            CheckpointDifference("plan", "none", now.plan.digest[:12], "converted from elsewhere"),
        ]
    effect = "" if now.plan.policy.tree else "sums have another order"
    compare("ranks", manifest.mesh, now.plan.mesh, effect)
    compare("stage", manifest.stage, now.plan.policy.sharding.stage)
    compare("mode", manifest.mode, now.plan.policy.mode.value)
    changes += _trained(entries, now.plan)
    before = None if plan is None else _readable(plan)
    known = plan is None or "boundaries" in plan
    """Whether what was written says anything of boundaries."""
    if before is not None:
        changes += _columns(before, now.plan)
        changes += _boundaries(before, now.plan) if known else []
        changes += _decisions(before, now.plan)
    if not changes:
        effect = "layout alone" if known else "layout, or boundaries, which it does not hold"
        changes.append(CheckpointDifference("plan", manifest.digest[:12], now.plan.digest[:12], effect))
    return changes


def _readable(plan: dict[str, Any]) -> Plan | None:
    """The plan, unless another version of zerodrift wrote it in other words; versions are compared too."""
    try:
        return Plan.from_json(plan)
    except (KeyError, TypeError, ValueError):
        return None


def _trained(entries: Sequence[SavedParameter], plan: Plan) -> list[CheckpointDifference]:
    changes = []
    rows = {name: row for row in plan.rows for name in row.names}
    entries = [entry for entry in entries if entry.name in rows]
    kept = [e.name for e in entries if e.moments and not rows[e.name].trained]
    if kept:
        changes.append(
            CheckpointDifference("trained", f"{len(kept)} parameters", "frozen", "their moments are dropped")
        )
    some = any(entry.moments for entry in entries)
    fresh = [e.name for e in entries if some and not e.moments and rows[e.name].trained]
    if fresh:
        what = f"{len(fresh)} parameters such as {fresh[0]}"
        changes.append(CheckpointDifference("moments", f"none of {what}", "zero", "they begin to be trained"))
    return changes


def _columns(before: Plan, now: Plan) -> list[CheckpointDifference]:
    """Columns that changed: how often, and the first by name."""
    rows: dict[str, Row] = {row.name: row for row in before.rows}
    changed: dict[tuple[str, str, str], list[str]] = {}
    for row in now.rows:
        old = rows.get(row.name)
        if old is None:
            continue
        theirs, mine = old.columns.cells(), row.columns.cells()
        for column, cell in mine.items():
            if theirs.get(column) != cell:
                changed.setdefault((column, theirs.get(column, "-"), cell), []).append(row.name)
    return [
        CheckpointDifference(column, old, new, f"{len(names)} parameters, first {names[0]}")
        for (column, old, new), names in changed.items()
    ]


def _boundaries(before: Plan, now: Plan) -> list[CheckpointDifference]:
    """Modules that computed in another dtype or returned another, the first by name."""
    old, new = (
        {boundary.path: replace(boundary, why=()) for boundary in plan.boundaries} for plan in (before, now)
    )
    changed = [path for path in dict.fromkeys([*old, *new]) if old.get(path) != new.get(path)]
    if not changed:
        return []
    count = "1 module" if len(changed) == 1 else f"{len(changed)} modules"
    theirs, mine = (_casts(boundaries.get(changed[0])) for boundaries in (old, new))
    return [CheckpointDifference("boundary", theirs, mine, f"{count}, first {changed[0]}")]


def _casts(boundary: Boundary | None) -> str:
    return "none" if boundary is None else f"{boundary.dtype}, returns {boundary.output}"


def _decisions(before: Plan, now: Plan) -> list[CheckpointDifference]:
    """Choices that are no column: batch sizes, clipping, the optimizer's numbers."""
    old = {decision.key: decision.value for decision in before.policy.decisions}
    new = {decision.key: decision.value for decision in now.policy.decisions}
    changes = [
        CheckpointDifference(key, old.get(key, "none"), new.get(key, "none"))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and key not in ("zero_optimization.stage", "precision.mode")
    ]
    for what, theirs, mine, effect in (
        ("optimizer block", before.policy.optimizer, now.policy.optimizer, "the saved numbers are kept"),
        ("scheduler block", before.policy.schedule, now.policy.schedule, "this run's numbers hold"),
    ):
        if theirs is not None and mine is not None and theirs != mine:
            changes.append(
                CheckpointDifference(
                    what, f"{theirs.type} {theirs.params}", f"{mine.type} {mine.params}", effect
                )
            )
    return changes
