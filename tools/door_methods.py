"""Run every method of the trainers in `tests/doors/methods.py`, and write the second table of docs/doors.md.

`tools/doors.py methods FOLDER` calls this. All jobs of a trainer run in one process for each of the two
packages (`tests/doors/rank_server.py`), since importing a trainer takes longer than a job. A job that has run
to its end, or to its refusal, runs again when the job, the trainer or zerodrift is another.

Invariant: an error in the table is the last line of what the run raised.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import processes
from environment import ROOT

from tests.doors.methods import TRAINERS, Job

RESULTS = ROOT / "tests" / "doors" / "methods.json"
STAGES = (2, 3)
LIMIT = 4 * 3600.0
"""Time limit for all jobs of one trainer on one package."""
NOT_RUN = "was not run"
NEAR = 1e-6
"""Largest relative difference of fp32 losses that counts as equal."""
NEAR_OF = {"bf16": 1e-2}
"""Method -> its own limit."""


@dataclass(frozen=True, slots=True)
class MethodResult:
    """The results of one job at one stage, on zerodrift and on DeepSpeed."""

    trainer: str
    version: str
    job: str
    stage: int
    here: str
    """The error on zerodrift, or empty."""
    there: str
    """The error on DeepSpeed, or empty."""
    numbers: int
    """Number of compared losses."""
    apart: float | None
    """Largest relative difference between the losses; None where one package failed."""
    files: str
    """Differences between the saved files of weights; empty if there are none."""
    date: str

    @property
    def works(self) -> bool:
        """Return True if the job has DeepSpeed's losses, or ran where DeepSpeed fails."""
        if self.here or self.there:
            return not self.here and self.there != NOT_RUN
        return self.apart is not None and self.apart <= self.limit

    @property
    def limit(self) -> float:
        """Return the largest admitted difference of losses."""
        return NEAR_OF.get(self.job.partition("-")[2], NEAR)


def read(path: Path) -> dict[str, Any]:
    """Return what `rank_server.py` wrote about a job, or that it wrote nothing."""
    empty = {"said": NOT_RUN, "losses": [], "saved": {}}
    return json.loads(path.read_text()) if path.exists() else empty


def furthest(here: Sequence[float], there: Sequence[float]) -> float | None:
    """Return the largest relative difference, or None where the numbers cannot be compared."""
    if not here or len(here) != len(there):
        return None
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(here, there, strict=True))


def compare_files(here: dict[str, Any], there: dict[str, Any]) -> str:
    """Describe the first difference between two sets of saved tensors."""
    for name in sorted({*here, *there}):
        if name not in there or name not in here:
            return f"`{name}` is only in the files of {'DeepSpeed' if name in there else 'zerodrift'}"
        (shape, norm), (other, other_norm) = here[name], there[name]
        if shape != other:
            return f"`{name}` is {shape} and {other} on DeepSpeed"
        if abs(norm - other_norm) > 1e-3 * max(other_norm, 1e-3):
            return f"the norm of `{name}` is {norm:.6g} and {other_norm:.6g} on DeepSpeed"
    return ""


def result(trainer: str, version: str, job: Job, stage: int, folders: Sequence[Path]) -> MethodResult:
    """Compare one job on zerodrift, in the first folder, with DeepSpeed, in the second."""
    here, there = (read(folder / f"{job.name}-{stage}.json") for folder in folders)
    apart, files = None, ""
    if not here["said"] and not there["said"]:
        apart = furthest(here["losses"], there["losses"])
        files = compare_files(here["saved"], there["saved"])
    today = datetime.date.today().isoformat()
    said = (here["said"], there["said"], len(here["losses"]), apart, files)
    return MethodResult(trainer, version, job.name, stage, *said, today)


def results() -> list[MethodResult]:
    return [MethodResult(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def keep(found: Iterable[MethodResult]) -> None:
    """Replace the results of these jobs in the file, in the order of the table of jobs."""
    rows = {(row.trainer, row.job, row.stage): row for row in [*results(), *found]}
    order = [(name, job.name, stage) for name in TRAINERS for job in TRAINERS[name].jobs for stage in STAGES]
    kept = [asdict(rows[key]) for key in order if key in rows]
    text = "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in kept) + "\n]\n"
    RESULTS.write_text(text)


def run_trainer(
    trainer: str,
    version: str,
    python: Path,
    data: Path,
    environment: dict[str, str],
    chosen: Sequence[Job],
    sources: str,
) -> list[MethodResult]:
    """Run the chosen jobs of a trainer that have not run yet, on both packages; `sources` is of zerodrift."""
    kept = python.parents[1] / "methods"
    folders = [kept / "zerodrift", kept / "deepspeed"]
    server = [str(python), str(ROOT / "tests" / "doors" / "rank_server.py"), trainer, str(data)]
    on_zerodrift = [str(python), "-m", "zerodrift", "run", "--"]
    for folder, before, of in zip(folders, (on_zerodrift, []), (sources, ""), strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        left = []
        for job in chosen:
            asked = hashlib.sha256(repr((version, job.commands, of, *_scripts())).encode()).hexdigest()
            left += [f"{job.name}:{s}" for s in STAGES if not _has_run(folder / f"{job.name}-{s}", asked)]
        print(f"{before[2] if before else 'deepspeed'}: {len(left)} of {len(STAGES) * len(chosen)} to run")
        if left:
            with (folder / "all.log").open("a") as printed:
                command = [*before, *server, str(folder), *left]
                processes.run(command, {**os.environ, **environment}, data, printed, LIMIT)
    return [result(trainer, version, job, stage, folders) for job in chosen for stage in STAGES]


def _scripts() -> list[bytes]:
    """Return the files that every job depends on."""
    return [(ROOT / "tests" / "doors" / name).read_bytes() for name in ("tiny.py", "rank_server.py")]


def _has_run(job: Path, asked: str) -> bool:
    """Return True if there is a result of what is asked for; leave none of anything else."""
    told, record = job.with_name(f"{job.name}.json"), job.with_name(f"{job.name}.asked")
    if not record.exists() or record.read_text() != asked:
        told.unlink(missing_ok=True)
        record.write_text(asked)
    return told.exists()


# --- the table ------------------------------------------------------------------------------------------


def table(found: Sequence[MethodResult]) -> str:
    """Return a row for each kind of training of each trainer."""
    head = "| trainer | training | has DeepSpeed's losses at stages 2 and 3 | what does not |"
    lines = [head, "| --- " * 4 + "|"]
    for name, trainer in TRAINERS.items():
        rows = [row for row in found if row.trainer == name]
        for kind in dict.fromkeys(job.kind for job in trainer.jobs if rows):
            good, bad = [], defaultdict(lambda: defaultdict(list))
            for job in trainer.jobs:
                told = [row for row in rows if job.kind == kind and row.job == job.name]
                if len(told) == len(STAGES) and not any(map(reason, told)):
                    good.append(job.method)
                for row in told:
                    if why := reason(row):
                        bad[why][job.method].append(row.stage)
            known = {row.job for row in rows}
            left = [job.method for job in trainer.jobs if job.kind == kind and job.name not in known]
            wrong = [f"{_named(who)}: {why}" for why, who in bad.items()]
            others = "; ".join([*wrong, *([f"not tried yet: {', '.join(left)}"] if left else [])]) or "-"
            shown = f"{trainer.shown} {rows[0].version}"
            lines.append(f"| {shown} | {kind} | {', '.join(good) or '-'} | {others} |")
    return "\n".join(lines) + "\n"


def reason(row: MethodResult) -> str:
    """Say in the table's words what is not as on DeepSpeed."""
    if row.there == NOT_RUN:
        return f'fails here, "{_short(row.here)}"' if row.here else "works here, and was not run on DeepSpeed"
    if row.here and _without_names(row.here) == _without_names(row.there):
        return f'its own refusal, "{_short(row.here)}"'
    if row.here and row.there:
        return f'fails on both: here "{_short(row.here)}"; on DeepSpeed "{_short(row.there)}"'
    if row.here:
        return f'refused here, "{_short(row.here)}"'
    if row.there:
        return f'works here and fails on DeepSpeed, "{_short(row.there)}"'
    if row.apart is None:
        return "nothing to compare"
    if row.apart > row.limit:
        return f"{row.apart:.0e} from DeepSpeed's losses"
    return row.files


def _named(who: dict[str, list[int]]) -> str:
    return ", ".join(
        method if len(stages) == len(STAGES) else f"{method} at stage {stages[0]}"
        for method, stages in who.items()
    )


def _without_names(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+\.\d+", "", text)


def _short(text: str) -> str:
    """Return one line that a cell of a table holds; of our own errors what must hold."""
    line = " ".join(text.split()).replace("|", "/").replace('"', "'").partition("; got ")[0]
    return line if len(line) <= 200 else f"{line[:200]}..."
