"""Going on from a checkpoint with a job that may have changed: what is other than it was, and which holds.

The job's numbers hold wherever they can: rates and weight decay are those that the screen shows, from the
first step on. What only the checkpoint can say, weights and moments, is the checkpoint's, and a key that
would have decided it is told as one without effect.

Invariant: every difference between the job that saved the checkpoint and this one is told, once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerodrift.errors import CheckpointError
from zerodrift.io.checkpoint import state as states
from zerodrift.io.checkpoint.checkpoints import Checkpoints, Loaded
from zerodrift.io.checkpoint.differences import Allowed
from zerodrift.io.checkpoint.folder import CheckpointFolder
from zerodrift.io.checkpoint.manifest import MANIFEST
from zerodrift.train.loop.job import Job
from zerodrift.train.loop.run_folder import RunFolder

if TYPE_CHECKING:
    from zerodrift.engine.engine import Engine

JOB, STEP, PLACE, BASE = "job", "step", "data", "base"
"""What a run's checkpoints carry beside the engine's state: keys of their `client`."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is other than when the checkpoint was saved."""

    what: str
    """A key of the job, or what else it is."""
    was: str
    now: str
    holds: str
    """Which of the two, in words."""

    def __str__(self) -> str:
        return f"{self.what}: was {self.was}, is {self.now}; {self.holds}"


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run begins."""

    step: int
    """Steps that were tried before; 0 for a new run."""
    checkpoint: Path | None
    """What it goes on from."""
    changes: tuple[Change, ...] = ()


def beginning(wanted: str, folder: RunFolder) -> Path | None:
    """The checkpoint that `run.resume` names, or None for a run that begins. Called on one rank."""
    own = CheckpointFolder(folder.checkpoints)
    if wanted == "auto":
        return own.newest()
    path = Path(wanted).expanduser()
    if not wanted:
        raise CheckpointError("run.resume", _RESUME, got="no name")
    if wanted in own.tags() or not (path.exists() or "/" in wanted):
        return own.find(wanted)
    if not path.exists():
        got = f"{wanted!r}, which is not there (looked for in {Path.cwd()})"
        raise CheckpointError("run.resume", _RESUME, got=got)
    there = _checkpoint_at(path)
    # Where a run begins is said once. Started again, by a launcher or by hand, it goes on with its own.
    newest = None if there.parent.resolve() == own.path.resolve() else own.newest()
    return there if newest is None else newest


_RESUME = "must be `auto`, `never`, the tag of a checkpoint, or a path to a run or a checkpoint"


def _checkpoint_at(path: Path) -> Path:
    """A checkpoint by its own path, or the newest of a run, or of a folder of checkpoints."""
    if (path / MANIFEST).is_file():
        return path
    below = RunFolder(path).checkpoints
    return CheckpointFolder(below if below.is_dir() else path).find("latest")


def load(checkpoints: Checkpoints, path: Path, job: Job, engine: Engine) -> tuple[Loaded, tuple[Change, ...]]:
    """Load a checkpoint, put the job's own numbers back, and tell what is other than it was."""
    own = copy.deepcopy(states.groups(engine))
    try:
        aside = path.name.startswith(".")  # one that was about to be replaced when its run ended
        loaded = checkpoints.resume(allow=_TAKEN) if aside else checkpoints.load(path.name, allow=_TAKEN)
        assert loaded is not None
    except CheckpointError as error:
        raise _for_a_job(error, path) from error
    _put_own_numbers(engine, own, schedule_is_new=any(d.what == "schedule" for d in loaded.differences))
    engine.seed = job.run.seed  # a job's is written down, and may be changed there
    before = _saved_job(loaded)
    step = int(loaded.client[STEP]) if isinstance(loaded.client, dict) else loaded.step
    keys = tuple(_of_keys(before, job, step)) if before is not None else ()
    return loaded, (*keys, *_of_the_plan(loaded, keys))


_TAKEN: tuple[Allowed, ...] = ("schedule", "loss_scale")
"""What this run's config says, where the checkpoint has another kind of it."""


def _put_own_numbers(engine: Engine, own: Sequence[Mapping[str, Any]], schedule_is_new: bool) -> None:
    """Rates, betas and weight decay as this run's config has them, at the place of its schedule where the
    checkpoint was saved; and a loss scale that is not found by itself."""
    if engine.optimizer is not None:
        for group, options in zip(engine.optimizer.param_groups, own, strict=True):
            group.update(options)
    if engine.schedule is not None and engine.global_steps:
        here = {"last_batch_iteration": engine.global_steps - 1}
        engine.schedule.load_state_dict(here if schedule_is_new else engine.schedule.state_dict())
    scale = engine.plan.policy.loss_scale
    if scale is not None and not scale.dynamic:
        engine.scaler.scale = scale.initial


def _for_a_job(error: CheckpointError, path: Path) -> CheckpointError:
    """The same refusal, with what somebody can do who has a job and not an engine."""
    problems = [
        replace(problem, do=_DO.get(problem.where, _ANOTHER) if "allow=" in problem.do else problem.do)
        for problem in error.problems
    ]
    return CheckpointError.of(problems, f"{path} cannot be gone on from") if problems else error


_ANOTHER = "Set it as it was, or begin another run with another `run.folder`."
_DO = {
    "optimizer": (
        "Set `config.optimizer.type` as it was. For a new optimizer, begin another run: another "
        "`run.folder`, and `model.source` the `export` of this one."
    )
}


# --- what is other than it was ----------------------------------------------------------------------------


def _saved_job(loaded: Loaded) -> Mapping[str, Any] | None:
    """The job by which a checkpoint was saved; None where nothing says it."""
    client = loaded.client if isinstance(loaded.client, dict) else {}
    if isinstance(client.get(JOB), str):
        saved = json.loads(client[JOB])
        return saved if isinstance(saved, dict) else None
    return None


def packed(job: Job) -> str:
    """What a checkpoint keeps of its job."""
    return json.dumps(job.model_dump(mode="json", by_alias=True), sort_keys=True)


def flattened(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; a list is one value."""
    if isinstance(tree, Mapping) and (tree or not path):
        for key, value in tree.items():
            yield from flattened(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


_NOT_TOLD = ("run.folder", "run.resume")
"""Where a run is, and not what it is."""

_DECIDED = {
    "model.source": "the checkpoint's weights hold",
    "model.weights": "the checkpoint's weights hold",
    "model.seed": "the checkpoint's weights hold",
    "config.fp16.initial_scale_power": "the checkpoint's scale goes on",
}
"""Keys whose work is done when a checkpoint is loaded."""


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(key, was, is) of every key that is not the same in two jobs."""
    old, new = dict(flattened(before)), dict(flattened(now))
    for key in dict.fromkeys([*old, *new]):
        if key not in _NOT_TOLD and old.get(key) != new.get(key):
            yield key, _shown(old, key), _shown(new, key)


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    value = leaves.get(key)
    if value is None or value == "":
        return "not given"
    return value if isinstance(value, str) else json.dumps(value)


def _of_keys(before: Mapping[str, Any], job: Job, step: int) -> Iterator[Change]:
    for key, was, now in differing(before, json.loads(packed(job))):
        yield Change(key, was, now, _DECIDED.get(key, f"the job's holds from step {step + 1} on"))


_OF_KEYS = ("optimizer block", "scheduler block", "schedule", "loss_scale")
"""What is told by the keys that it comes from."""
_OF_NO_EFFECT = ("random numbers", "client state", "plan")
"""Random numbers are those of a step, whatever came before it; and a layout is no meaning."""


def _of_the_plan(loaded: Loaded, keys: Sequence[Change]) -> Iterator[Change]:
    """What has changed by something else than a key, or follows from one."""
    written = {change.what.removeprefix("config.") for change in keys}
    written |= {change.what.rpartition(".")[2] for change in keys if change.what.startswith("config.")}
    if any(difference.what == "ranks" for difference in loaded.differences):
        written |= {"averaging", "batch"}  # they count ranks
    for difference in loaded.differences:
        what = difference.what
        if what in _OF_NO_EFFECT or what in written or (keys and what in _OF_KEYS):
            continue
        holds = difference.effect or "this run's holds"
        if what in ("optimizer block", "scheduler block"):
            holds = "the job's holds"
        yield Change(what, difference.saved, difference.now, holds)
        written.add(what)
