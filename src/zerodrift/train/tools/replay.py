"""Replay steps of a run from one of its checkpoints, and compare them with the digests that it recorded.

`replay` starts the processes. In each, `replay_here` runs the steps, and rank 0 compares. Nothing in the run
is changed except its folder `replay`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from zerodrift.checkpoint import CheckpointFolder, read_manifest
from zerodrift.errors import ConfigError, Problems, first_of, several
from zerodrift.plan import Plan, rank_micro_batches
from zerodrift.train.loop.launcher import Launcher, LaunchRequest, RankFailedError
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.report.metrics import read as read_metrics

Lines = Sequence[Mapping[str, Any]]
DIFFERENT = 3
OUTSIDE = "what is in no block"
"""Words for the unit of a plan that has no name."""
SHOWN = 4


def replay(run: Path, first: int | None, last: int | None, nproc: int | None, debug: bool) -> int:
    """Replay the steps after `first` up to `last` on `nproc` processes; return the exit code."""
    folder = RunFolder(run)
    job, lines, plan = folder.load_job(), read_metrics(folder.metrics), folder.load_plan()
    recorded = _recorded(folder, lines)
    there = {0: ""}  # step 0 needs no checkpoint
    for tag in CheckpointFolder(folder.checkpoints).tags():
        manifest = read_manifest(folder.checkpoints / tag)
        there[manifest.step + manifest.skipped] = str(folder.checkpoints / tag)
    wanted = min(filter(None, there), default=0) if first is None else first
    began = max(step for step in there if step <= wanted)
    end = max(recorded) if last is None else last
    steps = [step for step in recorded if began < step <= end]
    if not steps:
        got = f"steps {began + 1} to {end}"
        todo = f"Steps {min(recorded)} to {max(recorded)} have digests, as `run.digest_every` asked for."
        raise ConfigError("--from and --to", "must have a recorded step between them", got=got, do=todo)
    count = nproc or plan.mesh.world
    overrides = [*_batch(plan, count), *folder.separate_run(job, folder.replay, there[began])]
    result = folder.replay / "found.json"
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    arguments = {"run": str(folder.path), "last": max(steps), "result": str(result)}
    request = LaunchRequest(str(folder.job), overrides, debug, replay=arguments)
    where = f"steps {began + 1} to {max(steps)} on {several(count, 'rank')}"
    print(f"replay of {folder.path}: {where}", flush=True)
    starts = [line for line in lines if line["kind"] == "start"]
    threads = starts[-1].get("threads") if starts else None  # the bits of some operations depend on it
    try:
        code = Launcher(request, count, folder.replay / "logs", threads).wait()
    except RankFailedError as error:
        print(error, file=sys.stderr)
        code = 2
    if code:
        return code
    found = json.loads(result.read_text(encoding="utf-8"))
    print("\n".join(found["lines"]), flush=True)
    return 0 if found["is_same"] else DIFFERENT


def _recorded(folder: RunFolder, lines: Lines) -> dict[int, Mapping[str, Any]]:
    recorded = {line["step"]: line for line in lines if line["kind"] == "digest"}
    if not recorded:
        must, todo = "must have digests to compare with", "Train with `run.digest_every`."
        raise ConfigError(str(folder.metrics), must, got="none", do=todo)
    return recorded


def _batch(plan: Plan, ranks: int) -> list[str]:
    """Return overrides for another number of ranks, or refuse ranks that cannot have the same micro-batches.

    A pipeline is kept if the ranks can be divided by its stages, and left out otherwise.
    """
    batch, mesh = plan.policy.batch, plan.mesh
    if ranks == mesh.world:
        return []
    problems = Problems()
    if not plan.policy.tree:
        must = f"must be {mesh.world}, as the run had: its gradients were summed in the order of ranks"
        todo = "Train with `precision.reduce: {order: tree}`; the plan says why it is not the default."
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


# --- a rank -----------------------------------------------------------------------------------------------


def replay_here(source: str, overrides: Sequence[str], run: str, last: int, result: str) -> None:
    """Replay the steps up to `last` of a run on this rank, and write the comparison into `result`."""
    from zerodrift.comm import started
    from zerodrift.engine import computed_by
    from zerodrift.train.job_file import read_job
    from zerodrift.train.loop.resume import with_order
    from zerodrift.train.loop.session import assemble
    from zerodrift.train.loop.step import StepDigests, run_step
    from zerodrift.train.report.display import Display, clock

    rank, ranks = started()
    job, config = read_job(source, overrides)
    folder = RunFolder(Path(run))
    lines, plan = read_metrics(folder.metrics), folder.load_plan()
    recorded = _recorded(folder, lines)
    if ranks != plan.mesh.world and plan.policy.tree:
        config = with_order(config, "tree")  # where the default on so many ranks may be another
    session = assemble(job, config, Display())
    engine = session.engine
    before = plan.mesh.world
    recorder = "as they were recorded" if ranks == before else f"where {before} recorded them"
    where = f"on {several(ranks, 'rank')}, {recorder}"
    try:
        same = first = session.resume().step
        compared, text = 0, []
        began = time.perf_counter()
        for step in range(first + 1, last + 1):
            digests = StepDigests(engine)
            tried = run_step(engine, session.feed, job.run.seed, step - 1, nullcontext())
            if step not in recorded:
                continue
            compared += 1
            now = digests.line(step, tried.losses)
            if differences := compare_step(recorded[step], now):
                changed = changed_circumstances(lines, step - 1, computed_by(engine.mesh.device))
                text = [f"step {step}: different bits {where}"]
                text += difference_lines(differences, len(now["state"]), plan, changed)
                if step - same > 1:
                    text.append(f"It may have begun after step {same}: the steps between have no digest.")
                    text[-1] += " A run with `run.digest_every: 1` has all digests."
            left = (time.perf_counter() - began) / (step - first) * (last - step)
            if rank == 0:
                verdict = "different bits" if differences else "the same"
                print(f"  step {step} of {last}  {verdict}  ({clock(left)} left)", flush=True)
            if engine.comm.broadcast_object(bool(differences), 0):
                break
            same = step
        if rank == 0:
            report = text or [f"the same bits in {several(compared, 'recorded step')}, {where}"]
            Path(result).write_text(json.dumps({"is_same": not text, "lines": report}), encoding="utf-8")
    finally:
        session.close()


def changed_circumstances(lines: Lines, step: int, now: Mapping[str, Any]) -> list[str]:
    """Return the circumstances in which the step after `step` was computed, as far as they differ now."""
    starts = [line for line in lines if line["kind"] == "start" and line["step"] <= step]
    before = starts[-1] if starts else {}
    changed = [what for what in now if what in before and before[what] != now[what]]
    return [f"by {what} {before[what]}, here {now[what]}" for what in changed]


def compare_step(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the differing micro-batches under `losses`, and units under `gradients` and `state`."""
    before, after = recorded["losses"], now["losses"]
    if len(before) != len(after):
        must = "must have been recorded with the batch that the run has now"
        there = several(len(before), "micro-batch", "micro-batches")
        todo = "Replay the steps after the batch was changed: `--from STEP`."
        raise ConfigError(f"step {now['step']}", must, got=f"{there}, where there are {len(after)}", do=todo)
    found = {"losses": [number for number, loss in enumerate(after) if loss != before[number]]}
    for part in ("gradients", "state"):
        found[part] = [unit for unit in now[part] if recorded[part].get(unit) != now[part][unit]]
    return found if any(found.values()) else {}


def difference_lines(
    found: Mapping[str, Sequence[Any]], units: int, plan: Plan, changed: Sequence[str]
) -> list[str]:
    """Return what differs in a step of a run with this plan, and where to look for the cause.

    `changed` are circumstances of the computation.
    """
    ranks = {n: rank for rank in range(plan.mesh.data) for n in rank_micro_batches(plan, rank)}
    losses = first_of([f"{number} (rank {ranks[number]})" for number in found["losses"]], SHOWN)
    lines = [f"  losses     {f'other in micro-batch {losses}' if losses else 'the same'}"]
    for part in ("gradients", "state"):
        names = [name or OUTSIDE for name in found[part]]
        other = f"other in {len(names)} of {several(units, 'unit')}: {first_of(names, SHOWN)}"
        lines.append(f"  {part:10} {other if names else 'the same'}")
    if changed:
        lines.append(f"  {'computed':10} {'; '.join(changed)}")
    if found["losses"]:
        lines.append("Check the data of these micro-batches, random numbers, and that rank.")
    elif found["gradients"]:
        unit = found["gradients"][-1] or OUTSIDE
        lines.append(f"The backward comes to {unit} first: that is where bits begin to differ.")
    else:
        lines.append("Gradients are the same: the update differs, or memory was changed since the last step.")
    return lines
