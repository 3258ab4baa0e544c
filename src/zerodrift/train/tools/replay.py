"""Steps of a run computed once more, from one of its checkpoints, and compared with what it wrote down.

`replay` starts the processes; in each, `replay_here` takes the steps, and rank 0 compares. Nothing of the run
is changed: what a rank writes goes to the folder `replay` in it.

Invariant: where it says "the same bits", every digest that the run recorded of those steps was computed anew
and is equal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerodrift.errors import ConfigError, Problems, several
from zerodrift.io.checkpoint.folder import CheckpointFolder
from zerodrift.io.checkpoint.manifest import read_manifest
from zerodrift.plan.dealing import dealt
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Batch
from zerodrift.record import decode, encode
from zerodrift.train.loop.job import Job
from zerodrift.train.loop.launcher import Launcher, RankFailedError
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.report import metrics

KIND = "digest"

OTHER = 3
"""Exit code where bits are other than recorded."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the ranks are asked."""

    run: str
    """The folder of the run."""
    last: int
    """The last step, counted from 1."""
    result: str
    """Where rank 0 writes what was found."""


@dataclass(frozen=True, slots=True)
class OtherBits:
    """A recorded step that came out otherwise."""

    step: int
    since: int
    """The last step before it that was compared, and the same."""
    losses: tuple[int, ...]
    """Micro-batches, by number."""
    gradients: tuple[str, ...]
    """Units, in the order of the plan."""
    state: tuple[str, ...]
    units: int
    """Of the plan."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it."""

    first: int
    """The step that was begun with, counted from 1."""
    compared: int
    """Recorded steps."""
    difference: OtherBits | None
    computed_by: tuple[str, ...] = ()
    """What bits depend on beside the job, where it is not as in the run."""


# --- in the process of the command --------------------------------------------------------------------------


def replay(run: Path, first: int | None, last: int | None, nproc: int | None, debug: bool) -> int:
    """Replay the steps after `first` up to `last` on `nproc` processes; returns the exit code."""
    folder = RunFolder(run)
    job, lines, plan = folder.load_job(), metrics.read(folder.metrics), folder.load_plan()
    recorded = _recorded(folder, lines)
    began, start = _start(folder, first)
    end = max(recorded) if last is None else last
    steps = [step for step in recorded if began < step <= end]
    if not steps:
        raise ConfigError(
            "--from and --to",
            "must have a recorded step between them",
            got=f"steps {began + 1} to {end}",
            do=f"Steps {min(recorded)} to {max(recorded)} have digests, as `run.digest_every` asked for.",
        )
    count = nproc or plan.mesh.world
    overrides = [*_batch(plan, count), *_quiet(folder, job, start)]
    result = folder.replay / "found.json"
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    request = Request(str(folder.path), max(steps), str(result))
    print(
        f"replay of {folder.path}: steps {began + 1} to {max(steps)} on {several(count, 'rank')}", flush=True
    )
    logs, threads = folder.replay / "logs", _threads(lines)
    source = str(folder.job)
    code = _code(Launcher(source, overrides, count, logs, debug, threads=threads, replay=asdict(request)))
    if code:
        return code
    found = decode(Found, json.loads(result.read_text(encoding="utf-8")))
    print("\n".join(told(found, plan, count)), flush=True)
    return 0 if found.difference is None else OTHER


def _recorded(folder: RunFolder, lines: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Step -> its line, of those that have digests."""
    recorded = {line["step"]: line for line in lines if metrics.kind_of(line, KIND)}
    if not recorded:
        raise ConfigError(
            str(folder.metrics),
            "must have digests to compare with",
            got="none",
            do="Train with `run.digest_every`.",
        )
    return recorded


def _threads(lines: Sequence[dict[str, Any]]) -> int | None:
    """Of each rank of the run, on which the bits of some operations depend."""
    starts = [line for line in lines if metrics.kind_of(line, "start")]
    return starts[-1].get("threads") if starts else None


def _apart(lines: Sequence[dict[str, Any]], step: int, now: Mapping[str, Any]) -> tuple[str, ...]:
    """What those who took the step after `step` computed with, where it is not what is used now."""
    starts = [line for line in lines if metrics.kind_of(line, "start") and line["step"] <= step]
    before = starts[-1] if starts else {}
    return tuple(
        f"by {what} {before[what]}, here {now[what]}"
        for what in now
        if what in before and before[what] != now[what]
    )


def _code(launcher: Launcher) -> int:
    try:
        return launcher.wait()
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 2


def _start(folder: RunFolder, first: int | None) -> tuple[int, str]:
    """The step after which the replay begins, and what it loads: the newest checkpoint that is early enough;
    without `first` the oldest; step 0 needs none."""
    there = {0: ""}
    for tag in CheckpointFolder(folder.checkpoints).tags():
        path = folder.checkpoints / tag
        manifest = read_manifest(path)
        there[manifest.step + manifest.skipped] = str(path)
    wanted = min((step for step in there if step), default=0) if first is None else first
    step = max(step for step in there if step <= wanted)
    return step, there[step]


def _batch(plan: Plan, ranks: int) -> list[str]:
    """Overrides by which as many ranks take the micro-batches of the plan; says why where they cannot. A
    pipeline stays one where its stages have as many ranks each, and is left out elsewhere."""
    batch, mesh = plan.policy.batch, plan.mesh
    problems = Problems()
    if ranks != mesh.world and not plan.policy.tree:
        problems.add(
            "--nproc",
            f"must be {mesh.world}, as the run had: its gradients were summed in the order of ranks",
            got=ranks,
            do="Train with `precision.reduce: {order: tree}`, whose bits are the same on any number.",
        )
    total = batch.accumulation * mesh.data
    stages = 1 if ranks % mesh.pipeline else mesh.pipeline
    data = ranks // stages
    if total % data and ranks != mesh.world:
        whose = "" if stages == 1 else f", {stages} processes for each"
        problems.add("--nproc", f"must divide the {total} micro-batches of a step{whose}", got=ranks)
    problems.raise_as(ConfigError)
    if ranks == mesh.world:
        return []
    numbers: dict[str, object] = {**_numbers(batch, total // data, total)}
    if stages > 1:
        numbers["pipeline.micro_batches"] = total // data
    elif mesh.pipeline > 1:
        numbers["pipeline"] = "null"
    return [f"config.{key}={number}" for key, number in numbers.items()]


def _numbers(batch: Batch, accumulation: int, total: int) -> dict[str, int]:
    return {
        "train_batch_size": batch.micro * total,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": accumulation,
        "sharding.replicate": 1,
    }


def _quiet(folder: RunFolder, job: Job, start: str) -> list[str]:
    """Overrides by which a run leaves the folder of the other alone."""
    values = {
        "run.folder": str(folder.replay),
        "run.resume": start or "never",
        "run.tensorboard": False,
        "run.wandb": "",
        "data.cache": str(folder.cache(job.data.cache)),
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


# --- in words -----------------------------------------------------------------------------------------------


def told(found: Found, plan: Plan, ranks: int) -> list[str]:
    """What a person reads; `plan` is that of the run."""
    difference, before = found.difference, plan.mesh.world
    where = f"on {several(ranks, 'rank')}"
    where += f", where {before} recorded them" if ranks != before else ", as they were recorded"
    if difference is None:
        return [f"the same bits in {several(found.compared, 'recorded step')}, {where}"]
    losses = "the same"
    if difference.losses:
        numbers = ", ".join(f"{g} (rank {_rank_of(plan, g)})" for g in difference.losses[:SHOWN])
        losses = f"other in micro-batch {numbers}" + _more(difference.losses)
    return [
        f"step {difference.step}: other bits {where}",
        f"  losses     {losses}",
        f"  gradients  {_units(difference.gradients, difference.units)}",
        f"  state      {_units(difference.state, difference.units)}",
        *([f"  {'computed':10} {'; '.join(found.computed_by)}"] if found.computed_by else []),
        *_meaning(difference),
    ]


OUTSIDE = "what is in no block"
"""The unit of a plan that has no name."""

SHOWN = 4
"""Names of a list that are written out."""


def _meaning(difference: OtherBits) -> list[str]:
    lines = []
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
    listed = ", ".join(name or OUTSIDE for name in names[:SHOWN])
    return f"other in {len(names)} of {several(of, 'unit')}: {listed}{_more(names)}"


def _more(names: Sequence[object]) -> str:
    return f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""


def _rank_of(plan: Plan, number: int) -> int:
    """The data rank that had a micro-batch in the run that recorded it."""
    return next(rank for rank in range(plan.mesh.data) if number in dealt(plan, rank))


# --- in each rank -------------------------------------------------------------------------------------------


def replay_here(source: str, overrides: Sequence[str], request: Request) -> None:
    """One rank of a replay."""
    from zerodrift.comm.mesh import started
    from zerodrift.engine.digest import computed_by
    from zerodrift.train.loop.digests import DigestsOfStep
    from zerodrift.train.loop.job_file import read_job
    from zerodrift.train.loop.session import assemble
    from zerodrift.train.loop.step import take_step
    from zerodrift.train.report.display import SilentDisplay, clock

    rank, _ = started()
    job, config = read_job(source, overrides)
    folder = RunFolder(Path(request.run))
    lines = metrics.read(folder.metrics)
    recorded = _recorded(folder, lines)
    session = assemble(job, config, SilentDisplay())
    try:
        first = session.resume().step
        same, compared, difference = first, 0, None
        began = time.perf_counter()
        for step in range(first, request.last):
            digests = DigestsOfStep(session.engine)
            taken = take_step(session, step, digests)
            if step + 1 not in recorded:
                continue
            line = digests.line(step + 1, taken.losses)
            compared += 1
            difference = _compared(recorded[step + 1], line, same)
            left = (time.perf_counter() - began) / (step + 1 - first) * (request.last - step - 1)
            if rank == 0:
                said = "the same" if difference is None else "other bits"
                print(f"  step {step + 1} of {request.last}  {said}  ({clock(left)} left)", flush=True)
            if session.engine.comm.broadcast_object(difference is not None, 0):
                break
            same = step + 1
        if rank == 0:
            now = computed_by(session.engine.mesh.device)
            apart = () if difference is None else _apart(lines, difference.step - 1, now)
            found = Found(first + 1, compared, difference, apart)
            Path(request.result).write_text(json.dumps(encode(found)), encoding="utf-8")
    finally:
        session.close()


def _compared(recorded: Mapping[str, Any], now: Mapping[str, Any], since: int) -> OtherBits | None:
    before, after = len(recorded["losses"]), len(now["losses"])
    if before != after:
        raise ConfigError(
            f"step {now['step']}",
            "must have been recorded with the batch that the run has now",
            got=f"{several(before, 'micro-batch', 'micro-batches')}, where there are {after}",
            do="Replay the steps after the batch was changed: `--from STEP`.",
        )
    losses = tuple(
        number
        for number, (before, after) in enumerate(zip(recorded["losses"], now["losses"], strict=True))
        if before != after
    )
    gradients, state = (_others(recorded[part], now[part]) for part in ("gradients", "state"))
    if not (losses or gradients or state):
        return None
    return OtherBits(now["step"], since, losses, gradients, state, len(now["state"]))


def _others(recorded: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(unit for unit in now if recorded.get(unit) != now[unit])
