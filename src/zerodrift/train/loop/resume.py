"""Resume from a checkpoint with a job that may have changed, and report each difference once.

Learning rates, betas and weight decay are those of the job from the first step on. Weights and moments are
those of the checkpoint. A changed key of the job that decides initial weights is reported as without effect.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerodrift.checkpoint import MANIFEST, Allowed, CheckpointFolder, Checkpoints, Loaded, read_plan
from zerodrift.checkpoint import state as states
from zerodrift.config import Config, Reduce
from zerodrift.engine import Engine
from zerodrift.errors import CheckpointError, nearest_path
from zerodrift.policy import KEY, ORDER, Order
from zerodrift.train.job import Job
from zerodrift.train.loop.run_folder import JOB, STEP, RunFolder

_ALLOWED: tuple[Allowed, ...] = ("schedule", "loss_scale")
"""Differences in which this run's config holds."""
_LOCATION = ("run.folder", "run.resume")
_DECIDED = {
    "model.source": "the checkpoint's weights hold",
    "model.weights": "the checkpoint's weights hold",
    "model.seed": "the checkpoint's weights hold",
    "config.fp16.initial_scale_power": "the checkpoint's scale continues",
}
"""Keys without effect once a checkpoint is loaded."""
_BY_KEYS = ("optimizer block", "scheduler block", "schedule", "loss_scale")
"""Differences of the plan that are reported by their keys."""
_WITHOUT_EFFECT = ("random numbers", "client state", "plan")
"""Differences without effect: random numbers depend only on the step, and a layout changes no values."""


@dataclass(frozen=True, slots=True)
class Change:
    """A difference between the job that saved the checkpoint and this one."""

    what: str
    was: str
    now: str
    holds: str
    """Which of the two values is used, in words."""

    def __str__(self) -> str:
        return f"{self.what}: was {self.was}, is {self.now}; {self.holds}"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The step and the checkpoint that a run begins with."""

    step: int
    """Steps tried before; 0 for a new run."""
    checkpoint: Path | None
    changes: tuple[Change, ...] = ()


def checkpoint_to_resume(wanted: str, folder: RunFolder) -> Path | None:
    """Return the checkpoint that `run.resume` names; None for a new run. Called on one rank."""
    own = CheckpointFolder(folder.checkpoints)
    if wanted == "auto":
        return own.newest()
    must = "must be `auto`, `never`, the tag of a checkpoint, or a path to a run or a checkpoint"
    if not wanted:
        raise CheckpointError("run.resume", must, got="no name")
    path = Path(wanted).expanduser()
    if wanted in own.tags() or not (path.exists() or "/" in wanted):
        return own.find(wanted)
    if not path.exists():
        got = f"{wanted!r}, which does not exist (looked for in {Path.cwd()})"
        raise CheckpointError("run.resume", must, got=got, do=nearest_path(wanted))
    if (path / MANIFEST).is_file():
        there = path
    else:
        below = RunFolder(path).checkpoints
        there = CheckpointFolder(below if below.is_dir() else path).find("latest")
    # `run.resume` says where a run begins. Started again, the run goes on with its own checkpoints.
    newest = None if there.parent.resolve() == own.path.resolve() else own.newest()
    return there if newest is None else newest


def with_order_of_run(config: Config, wanted: str, folder: RunFolder) -> Config:
    """Return the config with the order of sums of the run that is resumed, unless the config names one.

    The order is kept if it was named in the job of that run. It is also kept if the run is of a version whose
    plan did not decide the default.
    """
    if wanted == "never" or getattr(config.precision.reduce, "order", None) is not None:
        return config
    path = checkpoint_to_resume(wanted, folder)
    with contextlib.suppress(CheckpointError):  # of another version: its order is not known
        before = None if path is None else read_plan(path)
        updates = () if before is None else [segment.columns.update for segment in before.segments]
        order = next((update.reduce.order for update in updates if update is not None), None)
        decided = () if before is None else before.policy.decisions
        if order and KEY in next((each.why for each in decided if each.key == ORDER), KEY):
            return with_order(config, order)
    return config


def with_order(config: Config, order: Order) -> Config:
    reduce = config.precision.reduce
    if not isinstance(reduce, Reduce):
        reduce = Reduce(wire=reduce)
    reduce = reduce.model_copy(update={"order": order})
    return config.model_copy(update={"precision": config.precision.model_copy(update={"reduce": reduce})})


def load(checkpoints: Checkpoints, path: Path, job: Job, engine: Engine) -> tuple[Loaded, tuple[Change, ...]]:
    """Load a checkpoint, restore the job's own numbers, and return the differences."""
    own = copy.deepcopy(states.groups(engine))
    try:
        is_aside = path.name.startswith(".")  # its run ended while it replaced this checkpoint
        loaded = (
            checkpoints.resume(allow=_ALLOWED) if is_aside else checkpoints.load(path.name, allow=_ALLOWED)
        )
        assert loaded is not None
    except CheckpointError as error:
        if not error.problems:
            raise
        another = "Set it as it was, or start another run with another `run.folder`."
        optimizer = "Set `config.optimizer.type` as it was. For a new optimizer, begin another run: another "
        optimizer += "`run.folder`, and `model.source` the `export` of this one."
        problems = [
            replace(problem, do=optimizer if problem.where == "optimizer" else another)
            if "allow=" in problem.do
            else problem
            for problem in error.problems
        ]
        raise CheckpointError.of(problems, f"{path} cannot be resumed from") from error
    _restore_numbers(engine, own, any(difference.what == "schedule" for difference in loaded.differences))
    engine.seed = job.run.seed
    client = loaded.client if isinstance(loaded.client, dict) else {}
    saved = json.loads(client[JOB]) if isinstance(client.get(JOB), str) else None
    keys = tuple(_key_changes(saved, job, int(client[STEP]))) if isinstance(saved, dict) else ()
    return loaded, (*keys, *_plan_changes(loaded, keys))


def _restore_numbers(engine: Engine, own: Sequence[Mapping[str, Any]], schedule_is_new: bool) -> None:
    """Restore the learning rates, betas, weight decay and constant loss scale of this run's config.

    The schedule continues at the step of the checkpoint.
    """
    if engine.optimizer is not None:
        for group, options in zip(engine.optimizer.param_groups, own, strict=True):
            group.update(options)
    if engine.schedule is not None and engine.global_steps:
        here = {"last_batch_iteration": engine.global_steps - 1}
        engine.schedule.load_state_dict(here if schedule_is_new else engine.schedule.state_dict())
    scale = engine.plan.policy.loss_scale
    if scale is not None and not scale.dynamic:
        engine.scaler.scale = scale.initial


def packed(job: Job) -> str:
    return json.dumps(job.model_dump(mode="json", by_alias=True), sort_keys=True)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf; a list is one value."""
    if isinstance(tree, Mapping) and (tree or not path):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def _key_changes(before: Mapping[str, Any], job: Job, step: int) -> Iterator[Change]:

    def shown(value: Any) -> str:
        if value in (None, ""):
            return "not given"
        return value if isinstance(value, str) else json.dumps(value)

    old, new = dict(_leaves(before)), dict(_leaves(json.loads(packed(job))))
    for key in dict.fromkeys([*old, *new]):
        if key not in _LOCATION and old.get(key) != new.get(key):
            holds = _DECIDED.get(key, f"the job's holds from step {step + 1} on")
            yield Change(key, shown(old.get(key)), shown(new.get(key)), holds)


def _plan_changes(loaded: Loaded, keys: Sequence[Change]) -> Iterator[Change]:
    known = {change.what.removeprefix("config.") for change in keys}
    known |= {change.what.rpartition(".")[2] for change in keys if change.what.startswith("config.")}
    if any(difference.what == "ranks" for difference in loaded.differences):
        known |= {"averaging", "batch"}  # they count ranks
    for difference in loaded.differences:
        what = difference.what
        if what in _WITHOUT_EFFECT or what in known or (keys and what in _BY_KEYS):
            continue
        was, now, holds = difference.saved, difference.now, difference.effect or "this run's holds"
        if what == ORDER:
            was, now = was.partition(":")[0], now.partition(":")[0]
            if was == now:
                continue
            keeps = f"; `config.{KEY}: tree` keeps them" if was.startswith("tree") else ""
            holds = f"losses will differ in their last bits{keeps}"
        if what in ("optimizer block", "scheduler block"):
            holds = "the job's holds"
        yield Change(what, was, now, holds)
        known.add(what)
