"""Run the tests with other versions of Python, torch, transformers and DeepSpeed, for docs/support.md.

    python tools/matrix.py all FOLDER              # or: make versions. Each cell in an environment of its own
    python tools/matrix.py all FOLDER --only TEXT  # of its cells those that have this in their name
    python tools/matrix.py newest FOLDER           # or: make newest. The newest of everything on this day
    python tools/matrix.py one PYTHON SUITE        # one suite with an interpreter that is set up

An environment that is there is used again, and a row of the same versions and suite is replaced. The same
command goes on where it was stopped: a suite that passed runs again when zerodrift or its tests are others. A
cell whose `pythonX.Y` is not on the PATH, or whose packages cannot be installed, is said and left out. On
Linux torch comes as the CUDA build, of several GB for each environment, unless `--torch` gives pip another
index.

Invariant: versions are what the interpreter says of itself, and counts are what pytest counted.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from xml.etree import ElementTree

from zerodrift.versions import warning

sys.path.insert(0, str(Path(__file__).resolve().parent))
import processes
from environment import ROOT, SetupError, make_environment

PAGE = ROOT / "docs" / "support.md"
HEADING = "\n## Tested versions"
"""First line of the generated part of the page."""


FAST = "not slow and not gpu"


@dataclass(frozen=True, slots=True)
class Suite:
    """A part of the tests."""

    words: str
    paths: tuple[str, ...] = ("tests",)
    marks: str = FAST


SUITES: Mapping[str, Suite] = {
    "quick": Suite("`make quick`: unit tests, and one cell of every product", marks="quick"),
    "whole": Suite("`make test`"),
    "families": Suite("descriptions of `transformers` models", ("tests/unit/test_model_huggingface.py",)),
    "models": Suite("architectures of `transformers`, trained, saved and read again", ("tests/models",)),
    "names": Suite(
        "names, arguments, recipes and schedules, compared with the installed DeepSpeed",
        ("tests/unit/test_dropin_names.py", "tests/unit/test_recipes.py", "tests/unit/test_schedules.py"),
    ),
    "deepspeed": Suite(
        "checkpoints to and from the installed DeepSpeed, and scripts that import it",
        (
            *("tests/ranks/test_deepspeed_checkpoints.py", "tests/e2e/test_cli_convert.py"),
            "tests/habits/test_scripts.py",
        ),
        "not gpu",
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """An environment and its suites."""

    python: str
    torch: str
    transformers: str
    deepspeed: str
    """Empty for an environment without DeepSpeed."""
    suites: tuple[str, ...]

    def __str__(self) -> str:
        with_deepspeed = f", DeepSpeed {self.deepspeed}" if self.deepspeed else ""
        return f"Python {self.python}, torch {self.torch}, transformers {self.transformers}{with_deepspeed}"


CELLS: tuple[Cell, ...] = (
    Cell("3.11", "2.15.0", "5.24.0", "", ("quick", "models")),
    Cell("3.12", "2.14.1", "5.23.0", "", ("quick",)),
    Cell("3.13", "2.15.0", "5.23.0", "", ("quick",)),
    Cell("3.10", "2.13.0", "5.20.2", "", ("quick",)),  # the last transformers for Python 3.10
    Cell("3.11", "2.13.0", "5.24.0", "", ("quick", "whole")),
    Cell("3.11", "2.13.0", "4.57.6", "", ("families", "models")),
    Cell("3.11", "2.13.0", "5.0.0", "", ("families", "models")),
    Cell("3.11", "2.13.0", "5.23.0", "0.19.6", ("names", "deepspeed")),
    Cell("3.11", "2.13.0", "5.23.0", "0.19.7", ("names", "deepspeed")),
    Cell("3.11", "2.13.0", "5.23.0", "0.19.8", ("names", "deepspeed")),
    Cell("3.11", "2.15.0", "5.23.0", "0.19.8", ("names", "deepspeed")),
)
"""torch 2.15 needs Python 3.11."""

NEWEST = ("quick", "models")
"""Suites of `make newest`."""

ZERODRIFT = ("--editable", f"{ROOT}[dev]")
"""Packages that the tests need beside the versions of a cell."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a suite with some versions, as the page shows it."""

    python: str
    torch: str
    transformers: str
    deepspeed: str
    suite: str
    passed: str
    failed: str
    """Number and names of the failed tests."""
    skipped: str
    date: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.python, self.torch, self.transformers, self.deepspeed, self.suite


HEAD = "| Python | torch | transformers | DeepSpeed | suite | passed | failed | skipped | date |"

TEXT = """\
## Tested versions

Torch 2.13 or later is required. These test suites ran on CPUs with gloo:

{table}

| suite | its tests |
| --- | --- |
{suites}

{missing}`-` means not installed; tests that need the package are skipped. The table names failed tests.

`make test` uses the versions in `requirements/lock.txt`, which `make lock` renews. `make test
TORCH=torch==2.14.1` uses another torch. `make newest` runs the suites `quick` and `models` with the newest
release of every package. `make versions` makes the environments of [`tools/matrix.py`](../tools/matrix.py)
and runs their suites. Both write their rows into this page.

### Other versions

Older and newer versions are not refused. `initialize` and `make_plan` print one warning on the first rank,
with the version and the range that was tested:

```
{warning}
```

They check Python and torch, and `transformers` and `deepspeed` if these are imported. For Python, torch and
`transformers` the third part of the version does not matter.
"""


def render(rows: Sequence[Row]) -> str:
    """Return the page's part about versions."""
    lines = [HEAD, "| --- " * 9 + "|", *("| " + " | ".join(astuple(row)) + " |" for row in rows)]
    words = (f"| {name} | {suite.words} |" for name, suite in SUITES.items())
    missing = []
    for cell in CELLS:
        suites = [suite for suite in cell.suites if not _is_run(cell, suite, rows)]
        missing += [f"- {cell}: {', '.join(suites)}"] if suites else []
    return TEXT.format(
        table="\n".join(lines),
        suites="\n".join(words),
        missing="\n".join(["These suites have no row yet:", "", *missing, "", ""]) if missing else "",
        warning=warning({"torch": "2.16.0"}),
    )


def _is_run(cell: Cell, suite: str, rows: Sequence[Row]) -> bool:
    wanted = cell.python, cell.torch, cell.transformers, cell.deepspeed or "-", suite
    return any(
        (row.python.rpartition(".")[0], row.torch.partition("+")[0], *row.key[2:]) == wanted for row in rows
    )


def rows_of(page: str) -> list[Row]:
    """Return the rows of a page."""
    found = re.findall(r"^\| (3\.[^\n]*) \|$", page, flags=re.MULTILINE)
    return [Row(*line.split(" | ")) for line in found]


def keep(row: Row) -> None:
    """Write a row into the page, in the place of one with the same key."""
    text = PAGE.read_text() if PAGE.exists() else ""
    rows = {each.key: each for each in rows_of(text)}
    rows[row.key] = row
    ordered = sorted(rows.values(), key=lambda each: (list(SUITES).index(each.suite), each.key))
    PAGE.write_text(text.partition(HEADING)[0] + "\n" + render(ordered))


# --- one environment ------------------------------------------------------------------------------------

ASK = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {"python": platform.python_version()}
for name in ("torch", "transformers", "deepspeed"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = "-"
print(json.dumps(found))
"""


LIMIT = 4 * 3600.0
"""Time limit of one suite."""


def run(python: Path, suite: str) -> Row:
    """Run a suite with an interpreter, as `make test` runs it; every test has ten minutes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        }
        asked = subprocess.run(
            [str(python), "-c", ASK], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
        )
        pytest = ["-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "--timeout", "600"]
        asks = ["-m", SUITES[suite].marks, f"--junitxml={report}", *SUITES[suite].paths]
        code = processes.run([str(python), *pytest, *asks], environment, ROOT, sys.stdout, LIMIT)
        if not report.exists():
            raise SetupError(f"{python}: `{suite}` did not run to its end; exit code {code}")
        counted = counts(report)
    return Row(**json.loads(asked.stdout), suite=suite, **counted, date=datetime.date.today().isoformat())


def counts(report: Path) -> dict[str, str]:
    """Count the passed, failed and skipped tests in one of pytest's XML reports."""
    whole = ElementTree.parse(report).getroot()
    cases = list(whole.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = sorted({f"`{case.get('name', '').partition('[')[0]}`" for case in failed})
    return {
        "passed": str(len(cases) - len(failed) - skipped),
        "failed": " ".join([str(len(failed)), *names]),
        "skipped": str(skipped),
    }


def make_cell(cell: Cell, folder: Path, torch: Sequence[str]) -> Path:
    """Make a cell's environment and return its interpreter."""
    name = f"py{cell.python}-torch{cell.torch}-tf{cell.transformers}" + (
        cell.deepspeed and f"-ds{cell.deepspeed}"
    )
    wanted = [f"transformers=={cell.transformers}", *ZERODRIFT]
    if cell.deepspeed:
        wanted += ["setuptools", f"deepspeed=={cell.deepspeed}"]
    return make_environment(folder / name, f"python{cell.python}", [*torch, f"torch=={cell.torch}"], wanted)


@functools.cache
def sources() -> str:
    """Return a digest of zerodrift and its tests."""
    paths = sorted(path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.*"))
    kept = [path.read_bytes() for path in paths if path.suffix in (".py", ".h", ".cpp", ".json", ".txt")]
    return hashlib.sha256(b"".join(kept)).hexdigest()


def run_all(folder: Path, torch: Sequence[str], cells: Sequence[Cell]) -> int:
    """Run the suites of cells that have not passed yet, and print the results."""
    told, wrong = [], 0
    for cell in cells:
        print(f"== {cell}", flush=True)
        try:
            python = make_cell(cell, folder, torch)
            for suite in cell.suites:
                record = python.parents[1] / f"passed-{suite}"
                if record.exists() and record.read_text() == sources():
                    told.append(f"{cell}: {suite} passed before")
                    continue
                row = run(python, suite)
                keep(row)
                told.append(f"{cell}: {describe(row)}")
                if row.failed == "0":
                    record.write_text(sources())
                else:
                    wrong += 1
        except (SetupError, OSError) as error:
            print(error, file=sys.stderr)
            told.append(f"{cell}: not run. {error}".partition("\n")[0])
            wrong += 1
    print("\n".join(["", *told]))
    return int(wrong > 0)


def describe(row: Row) -> str:
    return f"{row.suite}: {row.passed} passed, {row.failed} failed, {row.skipped} skipped"


def run_newest(home: Path, torch: Sequence[str]) -> int:
    """Run the suites with the newest versions of everything, and print the results."""
    today = datetime.date.today().isoformat()
    python = make_environment(home, sys.executable, [*torch, "torch"], ZERODRIFT, day=today)
    rows = [run(python, suite) for suite in NEWEST]
    for row in rows:
        keep(row)
    print(f"\nThe newest of everything on {today}, now in {PAGE.relative_to(ROOT)}:")
    for row in rows:
        print(f"  Python {row.python}, torch {row.torch}, transformers {row.transformers}; {describe(row)}")
    return int(any(row.failed != "0" for row in rows))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("all", "newest"):
        several = verbs.add_parser(verb)
        several.add_argument("folder", type=Path)
        several.add_argument("--torch", default="", metavar="OPTIONS", help="of pip, for torch")
        if verb == "all":
            several.add_argument("--only", default="", metavar="TEXT", help="cells with this in their names")
    one = verbs.add_parser("one")
    one.add_argument("python", type=Path)
    one.add_argument("suite", choices=SUITES)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    try:
        if asked.verb == "one":
            # The link of an environment is not followed: behind it is the interpreter that it was made with.
            row = run(Path(os.path.abspath(asked.python)), asked.suite)
            keep(row)
            return int(row.failed != "0")
        folder, torch = asked.folder.resolve(), asked.torch.split()
        if asked.verb == "newest":
            return run_newest(folder, torch)
        cells = [cell for cell in CELLS if asked.only in str(cell)]
        if not cells:
            parser.error(f"no cell has {asked.only!r} in its name: {'; '.join(map(str, CELLS))}")
        return run_all(folder, torch, cells)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
