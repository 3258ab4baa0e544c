"""Run the examples of each tool in `tests/doors/examples.py`, and write the first table of docs/doors.md.

`tools/doors.py all FOLDER` calls this. A cell is one example at one stage on one of the two packages. It runs
again when its command, the environment or zerodrift is another, when it failed, and when its losses were not
those of the other package. `accelerate` is told that ranks on CPUs are ranks (`tests/doors/on_cpu`).

Invariant: losses are what the tool wrote.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import math
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import processes
from environment import ROOT

from tests.doors.examples import TOOLS, Example, Tool

TESTS = ROOT / "tests"
RESULTS = TESTS / "doors" / "results.json"
NEAR = 1e-6
"""Largest relative difference of fp32 losses that counts as equal."""
BESIDE_SCRIPTS = (TESTS / "doors" / "tiny.py", TESTS / "doors" / "on_cpu" / "sitecustomize.py")
"""Files of the tests that every cell depends on."""
STAGES = (2, 3)
LIMIT = 900.0
"""Time limit of one cell."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an example at one stage."""

    tool: str
    version: str
    example: str
    stage: int
    ran: bool
    losses: int
    """Number of compared losses."""
    apart: float | None
    """Largest relative difference from DeepSpeed's losses; None where one package failed."""
    date: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.tool, self.example, self.stage

    @property
    def trouble(self) -> str:
        """Describe the difference from DeepSpeed; empty if there is none."""
        if not self.ran:
            return f"{self.example} at stage {self.stage}"
        if self.apart is None:
            return f"{self.example} at stage {self.stage} has nothing of DeepSpeed to compare with"
        if self.apart > NEAR:
            return f"{self.example} is {self.apart:.0e} from DeepSpeed at stage {self.stage}"
        return ""


def results() -> list[Result]:
    return [Result(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def table(found: list[Result]) -> str:
    """Return a row for each tool."""
    lines = ["| tool | version | works at stages 2 and 3 | fp32 beside DeepSpeed | what does not | date |"]
    lines.append("| --- " * 6 + "|")
    for name, tool in TOOLS.items():
        rows = [row for row in found if row.tool == name]
        if not rows:
            lines.append(f"| {tool.shown} | - | - | - | not tried yet | - |")
            continue
        ran = {(row.example, row.stage) for row in rows if row.ran}
        works = [e.name for e in tool.examples if all((e.name, stage) in ran for stage in STAGES)]
        known = {row.example for row in rows}
        left = [example.name for example in tool.examples if example.name not in known]
        troubles = [*(row.trouble for row in rows), f"not tried yet: {', '.join(left)}" if left else ""]
        apart = [row.apart for row in rows if row.apart is not None and row.apart <= NEAR]
        most = f"at most {max(apart):.0e}" if any(apart) else "not a digit"
        beside = f"{len(apart)} runs, {most} apart" if apart else "-"
        without = "; ".join(filter(None, [*troubles, tool.without])) or "-"
        versions = ", ".join(dict.fromkeys(row.version for row in rows))
        date = max(row.date for row in rows)
        lines.append(f"| {tool.shown} | {versions} | {', '.join(works)} | {beside} | {without} | {date} |")
    return "\n".join(lines) + "\n"


def keep(result: Result) -> None:
    rows = {row.key: row for row in results()} | {result.key: result}
    order = [(name, e.name, stage) for name, tool in TOOLS.items() for e in tool.examples for stage in STAGES]
    kept = [asdict(rows[key]) for key in order if key in rows]
    draft = RESULTS.with_suffix(".draft")
    draft.write_text("[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in kept) + "\n]\n")
    draft.replace(RESULTS)


# --- one cell -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of one command."""

    tool: Tool
    example: Example
    stage: int
    on: str
    """The package that the name `deepspeed` means: "zerodrift", or "DeepSpeed" itself."""

    def __str__(self) -> str:
        return f"{self.tool.shown}: {self.example.name}, stage {self.stage} on {self.on}"

    @property
    def file(self) -> str:
        """Name of the cell's files."""
        number = self.tool.examples.index(self.example)
        return f"{number}-{self.stage}-{self.on.lower()}"

    @property
    def command(self) -> list[str]:
        """The command's words, with the names of `Example` in them."""
        if self.on == "DeepSpeed":
            return (self.example.beside or self.example.command).split()
        return ["python", "-m", "zerodrift", "run", "--", *self.example.command.split()]

    @property
    def asked(self) -> str:
        """Digest of everything that the cell depends on, without the environment."""
        prefix = "{tests}/"
        scripts = [TESTS / word.removeprefix(prefix) for word in self.command if word.startswith(prefix)]
        digest = hashlib.sha256(sources().encode() if self.on == "zerodrift" else b"")
        for path in (*scripts, *BESIDE_SCRIPTS):
            digest.update(path.read_bytes())
        digest.update(repr((self.command, self.example.file, self.tool.environment)).encode())
        return digest.hexdigest()


@functools.cache
def sources() -> str:
    """Return a digest of zerodrift."""
    paths = sorted((ROOT / "src" / "zerodrift").rglob("*.*"))
    kept = [path.read_bytes() for path in paths if path.suffix in (".py", ".h", ".cpp")]
    return hashlib.sha256(b"".join(kept)).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a cell."""

    losses: list[float]
    """Empty for a failed run."""
    said: str
    """Reason of a failure."""
    date: str
    asked: str


def numbers(told: Any) -> Iterator[float]:
    """Yield all numbers in lists, in the order of their names."""
    if isinstance(told, dict):
        for key in sorted(told):
            yield from numbers(told[key])
    elif isinstance(told, list):
        yield from (float(value) for value in told if isinstance(value, (int, float)))


def losses(folder: Path) -> list[float]:
    """Return the losses that a run wrote into its folder."""
    told = folder / "told.json"
    if told.exists():
        return [value for case in json.loads(told.read_text()).values() for value in numbers({"": case})]
    states = sorted(folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    history = json.loads(states[-1].read_text())["log_history"] if states else []
    return [entry["loss"] for entry in history if "loss" in entry]


def furthest(here: Sequence[float], there: Sequence[float]) -> float | None:
    """Return the largest relative difference; None where the losses cannot be compared."""
    if not here or len(here) != len(there):
        return None
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(here, there, strict=True)]
    return max(differences)


def environment_of(tool: Tool, python: Path) -> dict[str, str]:
    """Return the environment of a tool's commands: its interpreter's programs, its own caches, and no GPU."""
    home = python.parents[1] / "doors" / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        **tool.environment,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(TESTS / "doors" / "on_cpu"),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "HF_HOME": str(home / ".cache" / "huggingface"),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        **dict.fromkeys(("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "AXOLOTL_DO_NOT_TRACK"), "1"),
    }


def run(cell: Cell, python: Path, data: Path, log: Path) -> Outcome:
    """Run a cell. The output goes to `log`; all other files of the run are removed."""
    asked = cell.asked
    with tempfile.TemporaryDirectory(dir=data.parent) as folder:
        out = Path(folder) / "out"
        out.mkdir()
        port = str(free_port())
        names = {"tests": TESTS, "data": data, "out": out, "stage": cell.stage, "port": port}
        file = out / "example.yaml"
        if cell.example.file:
            file.write_text(cell.example.file.format(**names))
        environment = {**environment_of(cell.tool, python), "MASTER_PORT": port}
        command = [word.format(**names, file=file) for word in cell.command]
        with log.open("w") as printed:
            print(f"$ {shlex.join(command)}", file=printed, flush=True)
            code = processes.run(command, environment, data, printed, LIMIT)
        found = losses(out)
    said, today = why_it_failed(code, found), datetime.date.today().isoformat()
    return Outcome([] if said else found, said, today, asked)


def why_it_failed(code: int | None, found: Sequence[float]) -> str:
    """Describe the failure of a run with this exit code, None for a timeout, and these losses."""
    if code is None:
        return f"not done in {LIMIT:.0f} s"
    if code != 0:
        return f"exit code {code}"
    if not found:
        return "wrote no losses"
    wrong = len(found) - sum(map(math.isfinite, found))
    return f"{wrong} of {len(found)} losses are not finite" if wrong else ""


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def tried(cell: Cell, python: Path, data: Path, kept: Path, progress: Progress) -> Outcome:
    """Return the outcome of a cell, from a kept file if that is of the same sources."""
    progress.begin(cell)
    file, log = (kept / f"{cell.file}.{kind}" for kind in ("json", "log"))
    outcome = Outcome(**json.loads(file.read_text())) if file.exists() else None
    seconds = None
    if outcome is None or outcome.asked != cell.asked:
        file.unlink(missing_ok=True)
        start = time.monotonic()
        outcome = run(cell, python, data, log)
        seconds = time.monotonic() - start
        if not outcome.said:
            file.write_text(json.dumps(asdict(outcome)))
    progress.end(outcome, seconds)
    if outcome.said:
        progress.fail(f"{cell}: {outcome.said}; see {log}")
    return outcome


# --- all of them ----------------------------------------------------------------------------------------


class Progress:
    """A progress line for each cell: its number, its command, its outcome, and the rest of the work."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.done = 0
        self.seconds: list[float] = []
        self.rows: list[Result] = []
        self.failures: list[str] = []

    def begin(self, cell: Cell) -> None:
        left = ""
        if self.seconds:
            mean = sum(self.seconds) / len(self.seconds)
            left = f", {mean * (self.cells - self.done) / 60:.0f} min left"
        print(f"[{self.done + 1}/{self.cells}{left}] {cell} ... ", end="", flush=True)

    def end(self, outcome: Outcome, seconds: float | None) -> None:
        self.done += 1
        if seconds is not None:
            self.seconds.append(seconds)
        took = "kept" if seconds is None else f"{seconds:.0f} s"
        print(outcome.said or f"{len(outcome.losses)} numbers", f"({took})", flush=True)

    def fail(self, what: str) -> None:
        self.failures.append(what)
        print(f"FAILED {what}", file=sys.stderr, flush=True)

    def summary(self, folder: Path) -> str:
        """Count the runs and list the failures."""
        ran = [row.key[:2] for row in self.rows if row.ran]
        both = sum(ran.count(key) == len(STAGES) for key in set(ran))
        near = sum(row.apart is not None and row.apart <= NEAR for row in self.rows)
        lines = [
            f"{both} of {self.cells // (2 * len(STAGES))} examples ran at stages 2 and 3; {near} of "
            f"{len(self.rows)} runs are within {NEAR:g} of DeepSpeed's. Environments and logs are in {folder}"
        ]
        return "\n".join([*lines, *(f"FAILED {what}" for what in self.failures)])
