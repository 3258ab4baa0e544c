"""Run other people's trainers on zerodrift and on DeepSpeed, for the tables of docs/doors.md.

    python tools/doors.py all FOLDER [TOOL ...]     # or: make doors. Some tools, or all
    python tools/doors.py all FOLDER trl --only sft # of their examples those that have this in their name
    python tools/doors.py methods FOLDER [TRAINER ...] [--only TEXT]   # every method of three trainers
    python tools/doors.py suite FOLDER NAME CHECKOUT [--only TEXT] # tests of another package
    python tools/doors.py page                      # writes the tables anew

Each tool gets an environment of its own in FOLDER, some 2 GB with torch for CPUs; nothing is downloaded but
packages. What was done is kept in FOLDER, and the same command goes on where it was stopped. Results are in
tests/doors.

Invariant: versions are what the environment says of itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import door_examples
import door_methods
import door_suites
from door_examples import STAGES, TESTS, Cell, Progress, Result, environment_of, furthest, sources
from environment import ROOT, SetupError, log_of, make_environment

from tests.doors.examples import DEEPSPEED, TOOLS, TORCH, Example, Tool
from tests.doors.methods import TRAINERS

PAGE = ROOT / "docs" / "doors.md"


def write_page() -> None:
    text = PAGE.read_text()
    for name, of in {"doors": door_examples, "methods": door_methods, "suites": door_suites}.items():
        shown = of.table(of.results())
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{shown}\n{end}{after}" if begin in text else text
    PAGE.write_text(text)


def try_all(folder: Path, names: Sequence[str], only: str, torch: Sequence[str]) -> int:
    """Try one tool after the other; a failure of one does not stop the others."""
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
    """Make a tool's environment and return its interpreter."""
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
    """Run every example on both packages at every stage."""
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
            there, here = (door_examples.tried(cell, python, data, kept, progress) for cell in cells)
            count, apart = len(here.losses), furthest(here.losses, there.losses)
            row = Result(name, version, example.name, stage, not here.said, count, apart, here.date)
            progress.rows.append(row)
            door_examples.keep(row)
            write_page()
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


def try_suite(folder: Path, name: str, checkout: Path, only: str, torch: Sequence[str]) -> int:
    """Run the tests of another package from a checkout of its repository."""
    suite = door_suites.SUITES[name].choose(checkout, only)
    if not suite.files:
        print(f"no file of tests in {checkout} has {only!r} in its path", file=sys.stderr)
        return 1
    tool = dataclasses.replace(TOOLS[suite.tool], packages=(*TOOLS[suite.tool].packages, *suite.packages))
    python = made(f"{suite.tool}-tests", folder / f"{suite.tool}-tests", torch, tool)
    if suite.plugin == "hub_suite" and not (checkout / "gpt2").exists():
        folders = [str(python), str(TESTS / "doors" / "hub_folders.py"), str(checkout)]
        subprocess.run(folders, check=True)
    told = door_suites.run(python, checkout, environment_of(tool, python), suite, sources())
    door_suites.keep(door_suites.compare(name, *told))
    write_page()
    return 0


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
    suite.add_argument("--only", default="", metavar="TEXT", help="files with this in their paths")
    suite.add_argument("--torch", default="", metavar="OPTIONS", help="of pip, for torch")
    verbs.add_parser("page")
    asked = parser.parse_args()
    if asked.verb == "page":
        write_page()
        return 0
    if asked.verb == "suite":
        places = asked.folder.resolve(), asked.name, asked.checkout.resolve()
        ask = *places, asked.only, asked.torch.split()
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
