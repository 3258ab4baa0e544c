"""Runs other people's trainers on zerodrift and on DeepSpeed, for the table of docs/doors.md.

    python tools/doors.py all FOLDER [TOOL ...]     # or: make doors. Some tools, or all
    python tools/doors.py all FOLDER trl --only sft # of their examples those that have this in their name
    python tools/doors.py methods FOLDER [TRAINER ...] [--only TEXT]   # every method of three trainers
    python tools/doors.py suite FOLDER NAME CHECKOUT    # tests of another package, from a checkout
    python tools/doors.py page                      # writes the tables anew

Each tool gets an environment of its own in FOLDER, some 2 GB with torch for CPUs. A cell is one example of
`tests/doors/examples.py` at one stage on one of the two; nothing is downloaded but packages. What was done
is kept in FOLDER, and the same command goes on where it was stopped; a cell runs again when its command,
the environment or zerodrift is another, when it failed, and when its losses were not those of the other
package. `accelerate` is told that ranks on CPUs are ranks (`tests/doors/on_cpu`). Results are in
tests/doors/results.json.

Invariant: versions are what the environment says of itself, and losses are what the tool wrote.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import door_methods
import door_suites
import processes
from environment import ROOT, SetupError, log_of, make_environment

from tests.doors.examples import DEEPSPEED, TOOLS, TORCH, Example, Tool
from tests.doors.methods import TRAINERS

PAGE = ROOT / "docs" / "doors.md"
TESTS = ROOT / "tests"
RESULTS = TESTS / "doors" / "results.json"
NEAR = 1e-6
"""Of fp32 losses; what is further apart is named."""
BESIDE_SCRIPTS = (TESTS / "doors" / "tiny.py", TESTS / "doors" / "on_cpu" / "sitecustomize.py")
"""What every cell depends on."""
STAGES = (2, 3)
LIMIT = 900.0
"""Seconds of one cell."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an example at one stage."""

    tool: str
    version: str
    example: str
    stage: int
    ran: bool
    losses: int
    """How many numbers were compared."""
    apart: float | None
    """The largest difference from DeepSpeed, as a part of the number; None where one did not run."""
    date: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.tool, self.example, self.stage

    @property
    def trouble(self) -> str:
        """What is not as it should be."""
        if not self.ran:
            return f"{self.example} at stage {self.stage}"
        if self.apart is None:
            return f"{self.example} at stage {self.stage} has nothing of DeepSpeed to compare with"
        if self.apart > NEAR:
            return f"{self.example} is {self.apart:.0e} from DeepSpeed at stage {self.stage}"
        return ""


# --- the page -------------------------------------------------------------------------------------------


def results() -> list[Result]:
    return [Result(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def table(found: list[Result]) -> str:
    """What was tried, a row for each tool."""
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


def write_page() -> None:
    tables = {"doors": table(results()), "methods": door_methods.table(door_methods.results())}
    tables["suites"] = door_suites.table(door_suites.results())
    text = PAGE.read_text()
    for name, shown in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{shown}\n{end}{after}" if begin in text else text
    PAGE.write_text(text)


def keep(result: Result) -> None:
    rows = {row.key: row for row in results()} | {result.key: result}
    order = [(name, e.name, stage) for name, tool in TOOLS.items() for e in tool.examples for stage in STAGES]
    kept = [asdict(rows[key]) for key in order if key in rows]
    draft = RESULTS.with_suffix(".draft")
    draft.write_text("[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in kept) + "\n]\n")
    draft.replace(RESULTS)
    write_page()


# --- one cell -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of one command."""

    tool: Tool
    example: Example
    stage: int
    on: str
    """What the name `deepspeed` is: "zerodrift", or "DeepSpeed" itself."""

    def __str__(self) -> str:
        return f"{self.tool.shown}: {self.example.name}, stage {self.stage} on {self.on}"

    @property
    def file(self) -> str:
        """For what is kept of it."""
        number = self.tool.examples.index(self.example)
        return f"{number}-{self.stage}-{self.on.lower()}"

    @property
    def command(self) -> list[str]:
        """Its words, with the names of `Example` in them."""
        if self.on == "DeepSpeed":
            return (self.example.beside or self.example.command).split()
        return ["python", "-m", "zerodrift", "run", "--", *self.example.command.split()]

    @property
    def asked(self) -> str:
        """A digest of what it depends on beside the environment."""
        prefix = "{tests}/"
        scripts = [TESTS / word.removeprefix(prefix) for word in self.command if word.startswith(prefix)]
        digest = hashlib.sha256(sources().encode() if self.on == "zerodrift" else b"")
        for path in (*scripts, *BESIDE_SCRIPTS):
            digest.update(path.read_bytes())
        digest.update(repr((self.command, self.example.file, self.tool.environment)).encode())
        return digest.hexdigest()


@functools.cache
def sources() -> str:
    """A digest of zerodrift."""
    paths = sorted((ROOT / "src" / "zerodrift").rglob("*.*"))
    kept = [path.read_bytes() for path in paths if path.suffix in (".py", ".h", ".cpp")]
    return hashlib.sha256(b"".join(kept)).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell."""

    losses: list[float]
    """Empty where it failed."""
    said: str
    """Why it failed."""
    date: str
    asked: str


def numbers(told: Any) -> Iterator[float]:
    """All numbers in lists, in the order of their names."""
    if isinstance(told, dict):
        for key in sorted(told):
            yield from numbers(told[key])
    elif isinstance(told, list):
        yield from (float(value) for value in told if isinstance(value, (int, float)))


def losses(folder: Path) -> list[float]:
    """What a run wrote into its folder."""
    told = folder / "told.json"
    if told.exists():
        return [value for case in json.loads(told.read_text()).values() for value in numbers({"": case})]
    states = sorted(folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    history = json.loads(states[-1].read_text())["log_history"] if states else []
    return [entry["loss"] for entry in history if "loss" in entry]


def furthest(here: Sequence[float], there: Sequence[float]) -> float | None:
    """The largest difference, as a part of the number; None where they cannot be compared."""
    if not here or len(here) != len(there):
        return None
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(here, there, strict=True)]
    return max(differences)


def environment_of(tool: Tool, python: Path) -> dict[str, str]:
    """What a tool's commands get: the interpreter's programs, folders of its own for caches, and no GPU."""
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
    """One run; what it printed is in `log`, and everything else that it left is gone."""
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
    """Of a run that ended with this code (None: it did not end in time) and these losses."""
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


# --- all of them ----------------------------------------------------------------------------------------


class Progress:
    """A line for each cell: which of how many, what, how it went, and what is left."""

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
        """What ran, and what failed."""
        ran = [row.key[:2] for row in self.rows if row.ran]
        both = sum(ran.count(key) == len(STAGES) for key in set(ran))
        near = sum(row.apart is not None and row.apart <= NEAR for row in self.rows)
        lines = [
            f"{both} of {self.cells // (2 * len(STAGES))} examples ran at stages 2 and 3; {near} of "
            f"{len(self.rows)} runs are within {NEAR:g} of DeepSpeed's. Environments and logs are in {folder}"
        ]
        return "\n".join([*lines, *(f"FAILED {what}" for what in self.failures)])


def try_all(folder: Path, names: Sequence[str], only: str, torch: Sequence[str]) -> int:
    """Tool after tool; a failure of one is not the end of the others."""
    chosen = {name: [e for e in TOOLS[name].examples if only in e.name] for name in names or TOOLS}
    each = 2 * len(STAGES)
    progress = Progress(each * sum(map(len, chosen.values())))
    for name, examples in chosen.items():
        if not examples:
            continue
        until, home = progress.done + each * len(examples), folder / name
        print(f"== {TOOLS[name].shown}", flush=True)
        try:
            try_tool(name, examples, made(name, home, torch), progress)
        except (OSError, SetupError, subprocess.CalledProcessError) as error:
            said = shlex.join(error.cmd) if isinstance(error, subprocess.CalledProcessError) else error
            progress.fail(f"{TOOLS[name].shown}: {said}; see {log_of(home)}")
        progress.done = until
    print(progress.summary(folder))
    return 1 if progress.failures else 0


def made(name: str, home: Path, torch: Sequence[str], tool: Tool | None = None) -> Path:
    """The interpreter of a tool's environment."""
    tool = tool or TOOLS[name]
    python = make_environment(
        home,
        sys.executable,
        [*torch, TORCH],
        [TORCH, "setuptools", *tool.packages, "-e", str(ROOT)],
        ["--no-build-isolation", DEEPSPEED],
    )
    packages = next((home / "lib").glob("python*")) / "site-packages"
    if there := [name for name in tool.unused if (packages / name).exists()]:
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "-y", *there], check=True)
    for module in tool.empty:
        (packages / f"{module}.py").touch()
    return python


def try_tool(name: str, examples: Sequence[Example], python: Path, progress: Progress) -> None:
    """Every example on both at every stage."""
    tool, kept = TOOLS[name], python.parents[1] / "doors"
    kept.mkdir(exist_ok=True)
    version = version_of(tool, python)
    with tempfile.TemporaryDirectory(prefix=f"doors-{name}-", ignore_cleanup_errors=True) as folder:
        data = Path(folder) / "data"
        data.mkdir()
        if any("{data}" in example.command + example.file for example in examples):
            make_data(python, data)
        for example, stage in itertools.product(examples, STAGES):
            cells = [Cell(tool, example, stage, on) for on in ("DeepSpeed", "zerodrift")]
            there, here = (tried(cell, python, data, kept, progress) for cell in cells)
            count, apart = len(here.losses), furthest(here.losses, there.losses)
            row = Result(name, version, example.name, stage, not here.said, count, apart, here.date)
            progress.rows.append(row)
            keep(row)
            if row.trouble and not (here.said or there.said):
                progress.fail(f"{tool.shown}: {row.trouble}")
                for cell in cells:  # whichever of the two it was, the next time says whether it is so again
                    (kept / f"{cell.file}.json").unlink()


def version_of(tool: Tool, python: Path) -> str:
    ask = [str(python), "-c", f"import importlib.metadata as m; print(m.version({tool.package!r}))"]
    return subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()


def make_data(python: Path, data: Path) -> None:
    """Make models and data in an empty folder."""
    with log_of(python.parents[1]).open("a") as log:
        tiny = [str(python), str(TESTS / "doors" / "tiny.py"), str(data)]
        subprocess.run(tiny, check=True, stdout=log, stderr=log)


def try_methods(folder: Path, names: Sequence[str], only: str, torch: Sequence[str]) -> int:
    """Run every method of the named trainers, or of all; return 1 if one is not as on DeepSpeed."""
    wrong = []
    for name in names or TRAINERS:
        chosen = [job for job in TRAINERS[name].jobs if only in job.name]
        python = made(name, folder / name, torch)
        with tempfile.TemporaryDirectory(prefix=f"doors-{name}-", ignore_cleanup_errors=True) as data:
            make_data(python, Path(data))
            environment, version = environment_of(TOOLS[name], python), version_of(TOOLS[name], python)
            args = name, version, python, Path(data), environment, chosen, sources()
            rows = door_methods.run_trainer(*args)
        door_methods.keep(rows)
        write_page()
        wrong += [f"{row.trainer} {row.job}, stage {row.stage}: {row.here}" for row in rows if not row.works]
    print("\n".join(wrong))
    return 1 if wrong else 0


def try_suite(folder: Path, name: str, checkout: Path, torch: Sequence[str]) -> int:
    """Run the tests of another package from a checkout of its repository."""
    suite = door_suites.SUITES[name]
    tool = dataclasses.replace(TOOLS[suite.tool], packages=(*TOOLS[suite.tool].packages, *suite.packages))
    python = made(f"{suite.tool}-tests", folder / f"{suite.tool}-tests", torch, tool)
    if suite.plugin == "hub_suite" and not (checkout / "gpt2").exists():
        folders = [str(python), str(TESTS / "doors" / "hub_folders.py"), str(checkout)]
        subprocess.run(folders, check=True)
    told = door_suites.run(python, checkout, environment_of(tool, python), suite, sources())
    door_suites.keep(door_suites.compare(name, *told))
    write_page()
    return 0


def tried(cell: Cell, python: Path, data: Path, kept: Path, progress: Progress) -> Outcome:
    """What came of a cell, today or when it last ran."""
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


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, tools in (("all", TOOLS), ("methods", TRAINERS)):
        every = verbs.add_parser(verb)
        every.add_argument("folder", type=Path)
        every.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(tools)}; none for all")
        every.add_argument("--only", default="", metavar="TEXT", help="examples with this in their names")
        every.add_argument("--torch", default="", metavar="OPTIONS", help="of pip, for torch")
    suite = verbs.add_parser("suite")
    suite.add_argument("folder", type=Path)
    suite.add_argument("name", choices=door_suites.SUITES)
    suite.add_argument("checkout", type=Path)
    suite.add_argument("--torch", default="", metavar="OPTIONS", help="of pip, for torch")
    verbs.add_parser("page")
    asked = parser.parse_args()
    if asked.verb == "page":
        write_page()
        return 0
    if asked.verb == "suite":
        ask = asked.folder.resolve(), asked.name, asked.checkout.resolve(), asked.torch.split()
        return until_stopped(lambda: try_suite(*ask))
    known: Mapping[str, Any] = TRAINERS if asked.verb == "methods" else TOOLS
    if unknown := set(asked.tools) - set(known):
        parser.error(f"no such tool: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if asked.verb == "methods":
        names = [job.name for tool in asked.tools or TRAINERS for job in TRAINERS[tool].jobs]
    else:
        names = [example.name for tool in asked.tools or TOOLS for example in TOOLS[tool].examples]
    if not any(asked.only in name for name in names):
        parser.error(f"no example has {asked.only!r} in its name: {', '.join(names)}")
    try_them = try_all if asked.verb == "all" else try_methods
    return until_stopped(
        lambda: try_them(asked.folder.resolve(), asked.tools, asked.only, asked.torch.split())
    )


def until_stopped(run: Callable[[], int]) -> int:
    """Run a verb and return its exit code, that of an interruption, or 1 for an environment that fails."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        return run()
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (SetupError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
