"""Compare a checkpoint with the run that loads it.

A difference that changes the meaning of values, such as another model or optimizer, is refused unless
`allow` names it. One that changes only how values are stored, such as another stage or dtype, is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from zerodrift.checkpoint.manifest import Manifest, SavedParameter
from zerodrift.errors import CheckpointError, Problem, Problems, did_you_mean, first_of, several
from zerodrift.model import listed
from zerodrift.plan import Boundary, Plan
from zerodrift.policy import BY_RANK, ORDER

Allowed = Literal["model", "optimizer", "groups", "schedule", "loss_scale", "buffers"]
"""Differences that may be allowed. The subject then stays as it is in the run. `model` allows parameters that
only one side has; shapes and ties of all others must still agree."""

SHOWN = 20
_EXECUTION = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that change how a step runs, not its result."""


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """One difference between a checkpoint and the run. `effect` is a clause for messages."""

    what: str
    saved: str
    now: str
    effect: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: {self.saved} -> {self.now}"
        return f"{text} ({self.effect})" if self.effect else text


@dataclass(frozen=True, slots=True)
class CurrentRun:
    """The parts of the loading run that are compared with the checkpoint."""

    plan: Plan
    kind: str
    group_of: Mapping[str, int]
    groups: Sequence[Mapping[str, Any]]
    schedule: str
    versions: tuple[tuple[str, str], ...]


def check_allowed(allow: Collection[Allowed]) -> frozenset[Allowed]:
    known = get_args(Allowed)
    if isinstance(allow, str) or not isinstance(allow, Collection):
        must = "must be several names, such as ('model',)"
        raise CheckpointError("allow", must, got=repr(allow))
    for word in allow:
        if word not in known:
            do = did_you_mean(word, known)
            raise CheckpointError("allow", f"must be of {', '.join(known)}", got=repr(word), do=do)
    return frozenset(allow)


def check_model(
    entries: Sequence[SavedParameter], plan: Plan, where: str, strict: bool = True
) -> list[CheckpointDifference]:
    """Raise unless the checkpoint has the plan's parameters. If not `strict`, return those that only one side
    has."""
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
    do = "`allow=('model',)` loads the parameters that both have."
    if missing and strict:
        problems.add(where, "must hold every parameter of the model", got=f"no {listed(missing)}", do=do)
    if extra and strict:
        problems.add(where, "must hold no parameter that the model does not have", got=listed(extra), do=do)
    problems.raise_as(CheckpointError, f"`{where}` is of another model")
    unmatched = ((missing, "missing", "they stay as they are"), (extra, "more", "they are not read"))
    return [
        CheckpointDifference("model", f"{len(names)} parameters {what}", listed(names), effect)
        for names, what, effect in unmatched
        if names
    ]


def check_buffers(
    saved: Mapping[str, Sequence[int]], here: Mapping[str, Sequence[int]], persistent: Collection[str]
) -> list[Problem]:
    """Compare the shapes of buffers. The checkpoint may lack buffers that are not `persistent`."""
    problems = []
    do = "`allow=('buffers',)` does not change buffers."
    for name in sorted({*saved, *here}):
        mine, theirs = here.get(name), saved.get(name)
        if mine != theirs and (name in persistent or mine is None):
            must = "must not be there" if mine is None else f"must have shape {list(mine)}"
            got = "none" if theirs is None else str(list(theirs))
            problems.append(Problem(f"buffer {name}", must, got=got, do=do))
    return problems


def check_meaning(
    manifest: Manifest, entries: Sequence[SavedParameter], state: Mapping[str, Any], now: CurrentRun
) -> dict[Allowed, list[Problem]]:
    """Find differences that change the meaning of the optimizer's state, by the word of `allow` for each."""
    found: dict[Allowed, list[Problem]] = {"optimizer": [], "groups": [], "schedule": [], "loss_scale": []}

    def add(word: Allowed, where: str, must: str, got: str, do: str) -> None:
        found[word].append(Problem(where, f"must {must}, as when it was saved", got=got or "none", do=do))

    if manifest.optimizer != now.kind:
        do = "Give the same, or `allow=('optimizer',)` to begin with new moments."
        add("optimizer", "optimizer", f"be {manifest.optimizer or 'none'}", now.kind, do)
    elif now.kind:
        found["groups"] += _check_groups(entries, state["groups"], now)
    if manifest.schedule != now.schedule:
        do = "Give the same, or `allow=('schedule',)` to start the schedule from step 0."
        add("schedule", "schedule", f"be {manifest.schedule or 'none'}", now.schedule, do)
    was_scaled, is_scaled = state["scaler"] is not None, now.plan.policy.loss_scale is not None
    if was_scaled != is_scaled:
        do = "Train in the same mode, or `allow=('loss_scale',)` to begin as this run's config says."
        must = "be there" if was_scaled else "not be there"
        add("loss_scale", "loss scale", must, "one" if is_scaled else "", do)
    return found


def _check_groups(
    entries: Sequence[SavedParameter], saved: Sequence[Mapping[str, Any]], now: CurrentRun
) -> list[Problem]:
    where, do = "parameter groups", "Build the same groups, or `allow=('groups',)` to take those of this run."
    if len(saved) != len(now.groups):
        return [Problem(where, f"must be {len(saved)}", got=str(len(now.groups)), do=do)]
    problems = []
    frozen = {row.name for row in now.plan.rows if not row.trained}
    moved = []
    for entry in entries:
        group = next((now.group_of[name] for name in entry.names if name in now.group_of), -1)
        if entry.group >= 0 and entry.name not in frozen and group != entry.group:
            moved.append(f"`{entry.name}` (saved in {entry.group}, now in {group})")
    if moved:
        must = "must hold the parameters that were saved in them"
        problems.append(Problem(where, must, got=first_of(moved, SHOWN), do=do))
    for number, (old, new) in enumerate(zip(saved, now.groups, strict=True)):
        for key in sorted(old.keys() & new.keys()):
            # A config may change numbers but no switches. A momentum of 0 is a switch: it has no moment.
            is_switch = isinstance(old[key], (bool, str)) and key not in _EXECUTION
            is_switch |= key == "momentum" and bool(old[key]) != bool(new[key])
            if is_switch and old[key] != new[key]:
                must = f"must be {old[key]!r}"
                problems.append(Problem(f"parameter group {number}, {key}", must, got=repr(new[key]), do=do))
    return problems


def differences(
    manifest: Manifest, entries: Sequence[SavedParameter], before: Plan | None, now: CurrentRun
) -> list[CheckpointDifference]:
    versions = dict(now.versions)
    changes = [
        CheckpointDifference(package, version, versions.get(package, "none"), "bits may differ")
        for package, version in manifest.versions
        if version != versions.get(package, "none")
    ]
    plan, policy = now.plan, now.plan.policy
    if manifest.digest and manifest.digest == plan.digest:
        return changes
    if not manifest.digest:
        return [*changes, CheckpointDifference("plan", "none", plan.digest[:12], "converted from elsewhere")]
    for what, saved, here, effect in (
        ("ranks", manifest.mesh, plan.mesh, "" if policy.tree else "sums have another order"),
        ("stage", manifest.stage, policy.sharding.stage, ""),
        ("mode", manifest.mode, policy.mode.value, ""),
    ):
        if saved != here:
            changes.append(CheckpointDifference(what, str(saved), str(here), effect))
    changes += _compare_trained(entries, plan)
    changes += [] if before is None else _compare_plans(before, plan)
    if not changes:
        changes.append(CheckpointDifference("plan", manifest.digest[:12], plan.digest[:12], "layout alone"))
    return changes


def _compare_trained(entries: Sequence[SavedParameter], plan: Plan) -> list[CheckpointDifference]:
    changes = []
    rows = {name: row for row in plan.rows for name in row.names}
    entries = [entry for entry in entries if entry.name in rows]
    kept = [e.name for e in entries if e.moments and not rows[e.name].trained]
    if kept:
        effect = "their moments are dropped"
        changes.append(CheckpointDifference("trained", f"{len(kept)} parameters", "frozen", effect))
    any_moments = any(entry.moments for entry in entries)
    fresh = [e.name for e in entries if any_moments and not e.moments and rows[e.name].trained]
    if fresh:
        what = f"none of {len(fresh)} parameters such as {fresh[0]}"
        changes.append(CheckpointDifference("moments", what, "zero", "they begin to be trained"))
    return changes


def _compare_plans(before: Plan, now: Plan) -> list[CheckpointDifference]:
    """Return changed columns and boundaries, each with the first name it applies to, and changed choices."""
    changed: dict[tuple[str, str, str], list[str]] = {}
    cells = {row.name: row.columns.cells() for row in before.rows}
    for row in now.rows:
        for column, cell in row.columns.cells().items():
            old = cells[row.name].get(column, "-") if row.name in cells else cell
            if old != cell:
                changed.setdefault((column, old, cell), []).append(row.name)
    changes = [
        CheckpointDifference(*key, f"{len(names)} parameters, first {names[0]}")
        for key, names in changed.items()
    ]
    theirs, mine = ({b.path: replace(b, why=()) for b in plan.boundaries} for plan in (before, now))
    paths = [path for path in dict.fromkeys([*theirs, *mine]) if theirs.get(path) != mine.get(path)]
    if paths:
        both = _casts(theirs.get(paths[0])), _casts(mine.get(paths[0]))
        count = several(len(paths), "module")
        changes.append(CheckpointDifference("boundary", *both, f"{count}, first {paths[0]}"))
    saved, here = ({d.key: d.value for d in plan.policy.decisions} for plan in (before, now))
    saved.setdefault(ORDER, BY_RANK)  # older plans lack this decision, and sum in the order of ranks
    for key in dict.fromkeys([*saved, *here]):
        if saved.get(key) != here.get(key) and key not in ("zero_optimization.stage", "precision.mode"):
            changes.append(CheckpointDifference(key, saved.get(key, "none"), here.get(key, "none")))
    for what, old_block, block, effect in (
        ("optimizer block", before.policy.optimizer, now.policy.optimizer, "the saved numbers are kept"),
        ("scheduler block", before.policy.schedule, now.policy.schedule, "this run's numbers hold"),
    ):
        if old_block is not None and block is not None and old_block != block:
            texts = f"{old_block.type} {old_block.params}", f"{block.type} {block.params}"
            changes.append(CheckpointDifference(what, *texts, effect))
    return changes


def _casts(boundary: Boundary | None) -> str:
    return "none" if boundary is None else f"{boundary.dtype}, returns {boundary.output}"
