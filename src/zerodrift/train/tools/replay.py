"""Replay steps of a run from one of its checkpoints, and compare them with the digests that it recorded.

`replay` starts the processes; in each, `replay_here` runs the steps, and rank 0 compares. The run stays as it
is: ranks write into the folder `replay` in it. "The same bits" means that every recorded digest of these
steps was computed anew and is equal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerodrift.checkpoint.folder import CheckpointFolder
from zerodrift.checkpoint.manifest import read_manifest
from zerodrift.errors import ConfigError, Problems, several
from zerodrift.plan.schedule import rank_micro_batches
from zerodrift.plan.table import Plan
from zerodrift.record import decode, encode
from zerodrift.train.loop.launcher import Launcher, RankFailedError
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.report.metrics import read as read_metrics

Lines = Sequence[Mapping[str, Any]]
DIFFERENT = 3
"""Exit code for different bits."""
OUTSIDE = "what is in no block"
"""The unit of a plan without a name."""
SHOWN = 4
"""Names of a list that are written out."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The steps that the ranks replay."""

    run: str
    """Folder of the run."""
    last: int
    """The last step, counted from 1."""
    result: str
    """The file for the result."""


@dataclass(frozen=True, slots=True)
class StepDifference:
    """A recorded step with different bits."""

    step: int
    since: int
    """The last step before it that was compared, with the same bits."""
    losses: tuple[int, ...]
    """Numbers of micro-batches."""
    gradients: tuple[str, ...]
    """Units, in the order of the plan."""
    state: tuple[str, ...]
    units: int
    """Units of the plan."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay."""

    first: int
    """The first step, counted from 1."""
    compared: int
    """Recorded steps that were compared."""
    difference: StepDifference | None
    computed_by: tuple[str, ...] = ()
    """Circumstances that affect bits and differ from those of the run."""


# --- the command ------------------------------------------------------------------------------------------


def replay(run: Path, first: int | None, last: int | None, nproc: int | None, debug: bool) -> int:
    """Replay the steps after `first` up to `last` on `nproc` processes; return the exit code."""
    folder = RunFolder(run)
    job, lines, plan = folder.load_job(), read_metrics(folder.metrics), folder.load_plan()
    recorded = _recorded(folder, lines)
    began, start = _start(folder, first)
    end = max(recorded) if last is None else last
    steps = [step for step in recorded if began < step <= end]
    if not steps:
        got = f"steps {began + 1} to {end}"
        todo = f"Steps {min(recorded)} to {max(recorded)} have digests, as `run.digest_every` asked for."
        raise ConfigError("--from and --to", "must have a recorded step between them", got=got, do=todo)
    count = nproc or plan.mesh.world
    overrides = [*_batch(plan, count), *folder.separate_run(job, folder.replay, start)]
    result = folder.replay / "found.json"
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    request = asdict(ReplayRequest(str(folder.path), max(steps), str(result)))
    last_step = max(steps)
    ranks = several(count, "rank")
    print(f"replay of {folder.path}: steps {began + 1} to {last_step} on {ranks}", flush=True)
    starts = [line for line in lines if line["kind"] == "start"]
    threads = starts[-1].get("threads") if starts else None  # the bits of some operations depend on it
    logs = folder.replay / "logs"
    try:
        launcher = Launcher(str(folder.job), overrides, count, logs, debug, threads=threads, replay=request)
        code = launcher.wait()
    except RankFailedError as error:
        print(error, file=sys.stderr)
        code = 2
    if code:
        return code
    found = decode(ReplayResult, json.loads(result.read_text(encoding="utf-8")))
    print("\n".join(result_lines(found, plan, count)), flush=True)
    return 0 if found.difference is None else DIFFERENT


def _recorded(folder: RunFolder, lines: Lines) -> dict[int, Mapping[str, Any]]:
    """Return the recorded steps with their lines."""
    recorded = {line["step"]: line for line in lines if line["kind"] == "digest"}
    if not recorded:
        must, todo = "must have digests to compare with", "Train with `run.digest_every`."
        raise ConfigError(str(folder.metrics), must, got="none", do=todo)
    return recorded


def _start(folder: RunFolder, first: int | None) -> tuple[int, str]:
    """Return the step after which the replay begins, and its checkpoint.

    It is the newest checkpoint before `first`, or the oldest without it. Step 0 needs none.
    """
    there = {0: ""}
    for tag in CheckpointFolder(folder.checkpoints).tags():
        path = folder.checkpoints / tag
        manifest = read_manifest(path)
        there[manifest.step + manifest.skipped] = str(path)
    wanted = min((step for step in there if step), default=0) if first is None else first
    step = max(step for step in there if step <= wanted)
    return step, there[step]


def _batch(plan: Plan, ranks: int) -> list[str]:
    """Return overrides for another number of ranks, or say why they cannot have the plan's micro-batches.

    A pipeline stays one if its stages have equally many ranks, and is left out otherwise.
    """
    batch, mesh = plan.policy.batch, plan.mesh
    if ranks == mesh.world:
        return []
    problems = Problems()
    if not plan.policy.tree:
        must = f"must be {mesh.world}, as the run had: its gradients were summed in the order of ranks"
        todo = "Train with `precision.reduce: {order: tree}`, whose bits are the same on any number."
        problems.add("--nproc", must, got=ranks, do=todo)
    total = batch.accumulation * mesh.data
    stages = 1 if ranks % mesh.pipeline else mesh.pipeline
    data = ranks // stages
    if total % data:
        each = "" if stages == 1 else f", {stages} processes for each"
        problems.add("--nproc", f"must divide the {total} micro-batches of a step{each}", got=ranks)
    problems.raise_as(ConfigError)
    numbers: dict[str, object] = {
        "train_batch_size": batch.micro * total,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": total // data,
        "sharding.replicate": 1,
    }
    if stages > 1:
        numbers["pipeline.micro_batches"] = total // data
    elif mesh.pipeline > 1:
        numbers["pipeline"] = "null"
    return [f"config.{key}={number}" for key, number in numbers.items()]


# --- in words ---------------------------------------------------------------------------------------------


def result_lines(found: ReplayResult, plan: Plan, ranks: int) -> list[str]:
    """Return the result in words; `plan` is that of the run."""
    difference, before = found.difference, plan.mesh.world
    where = f"on {several(ranks, 'rank')}"
    where += f", where {before} recorded them" if ranks != before else ", as they were recorded"
    if difference is None:
        return [f"the same bits in {several(found.compared, 'recorded step')}, {where}"]
    losses = "the same"
    if difference.losses:
        numbers = [f"{number} (rank {_rank_of(plan, number)})" for number in difference.losses]
        losses = f"other in micro-batch {_few(numbers)}"
    lines = [
        f"step {difference.step}: other bits {where}",
        f"  losses     {losses}",
        f"  gradients  {_units(difference.gradients, difference.units)}",
        f"  state      {_units(difference.state, difference.units)}",
    ]
    if found.computed_by:
        lines.append(f"  {'computed':10} {'; '.join(found.computed_by)}")
    if difference.losses:
        lines.append("Look at the data of these micro-batches, what draws random numbers, and that rank.")
    elif difference.gradients:
        unit = difference.gradients[-1] or OUTSIDE
        lines.append(f"The backward comes to {unit} first: that is where bits begin to differ.")
    elif difference.state:
        lines.append("Gradients are the same: it is in the update, or in memory since the step before.")
    if difference.step - difference.since > 1:
        lines.append(
            f"It may have begun after step {difference.since}: those between have no digest. A run with "
            "`run.digest_every: 1` has all."
        )
    return lines


def _units(names: Sequence[str], of: int) -> str:
    if not names:
        return "the same"
    return f"other in {len(names)} of {several(of, 'unit')}: {_few([name or OUTSIDE for name in names])}"


def _few(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _rank_of(plan: Plan, number: int) -> int:
    """Return the data rank of a micro-batch in the run."""
    return next(rank for rank in range(plan.mesh.data) if number in rank_micro_batches(plan, rank))


# --- a rank -----------------------------------------------------------------------------------------------


def replay_here(source: str, overrides: Sequence[str], request: ReplayRequest) -> None:
    """Replay the steps on this rank."""
    from zerodrift.comm.mesh import started
    from zerodrift.engine.digest import computed_by
    from zerodrift.train.job_file import read_job
    from zerodrift.train.loop.session import assemble
    from zerodrift.train.loop.step import StepDigests, run_step
    from zerodrift.train.report.display import Display, clock

    rank, _ = started()
    job, config = read_job(source, overrides)
    folder = RunFolder(Path(request.run))
    lines = read_metrics(folder.metrics)
    recorded = _recorded(folder, lines)
    session = assemble(job, config, Display())
    engine = session.engine
    try:
        first = session.resume().step
        same, compared, difference = first, 0, None
        began = time.perf_counter()
        for step in range(first, request.last):
            digests = StepDigests(engine)
            tried = run_step(engine, session.feed, job.run.seed, step, digests)
            if step + 1 not in recorded:
                continue
            line = digests.line(step + 1, tried.losses)
            compared += 1
            difference = _compared(recorded[step + 1], line, same)
            left = (time.perf_counter() - began) / (step + 1 - first) * (request.last - step - 1)
            if rank == 0:
                verdict = "the same" if difference is None else "other bits"
                print(f"  step {step + 1} of {request.last}  {verdict}  ({clock(left)} left)", flush=True)
            if engine.comm.broadcast_object(difference is not None, 0):
                break
            same = step + 1
        if rank == 0:
            now = computed_by(engine.mesh.device)
            changed = () if difference is None else _circumstances(lines, difference.step - 1, now)
            found = ReplayResult(first + 1, compared, difference, changed)
            Path(request.result).write_text(json.dumps(encode(found)), encoding="utf-8")
    finally:
        session.close()


def _circumstances(lines: Lines, step: int, now: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the step after `step` was computed by, if it differs from `now`."""
    starts = [line for line in lines if line["kind"] == "start" and line["step"] <= step]
    before = starts[-1] if starts else {}
    changed = [what for what in now if what in before and before[what] != now[what]]
    return tuple(f"by {what} {before[what]}, here {now[what]}" for what in changed)


def _compared(recorded: Mapping[str, Any], now: Mapping[str, Any], since: int) -> StepDifference | None:
    before, after = recorded["losses"], now["losses"]
    if len(before) != len(after):
        must = "must have been recorded with the batch that the run has now"
        there = several(len(before), "micro-batch", "micro-batches")
        todo = "Replay the steps after the batch was changed: `--from STEP`."
        raise ConfigError(f"step {now['step']}", must, got=f"{there}, where there are {len(after)}", do=todo)
    losses = tuple(n for n, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
    gradients, state = (
        tuple(unit for unit in now[part] if recorded[part].get(unit) != now[part][unit])
        for part in ("gradients", "state")
    )
    if not (losses or gradients or state):
        return None
    return StepDifference(now["step"], since, losses, gradients, state, len(now["state"]))
