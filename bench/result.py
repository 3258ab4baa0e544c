"""Results of a benchmark: tables that are printed row by row, and kept with `--save`.

A script makes one `Result`, says what is measured, and gives each table its rows. With `--save NAME` all
of it goes to `bench/results/NAME.json`, in full digits, with the command, the date, the versions and the
machine; `--beside` says what else the machine did. `read` gives a kept one back: `claims.py` and
`benchmarks.py` take every figure of a page from there, so that none is written twice.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import zerodrift

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
_BEGAN = time.monotonic()

Cell = str | int | float | None
"""A text, a number, or nothing to say."""


def format_cell(value: Cell, form: str) -> str:
    """Return a cell as text: `form` formats numbers, `.2f` or `+.1%`."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, form)


@dataclass
class Table:
    """Columns and rows; the first column names the row."""

    title: str
    columns: dict[str, str]
    """Name -> format of its numbers; `<20` is left-aligned text of this width."""
    rows: list[list[Cell]] = field(default_factory=list)

    def row(self, *cells: Cell) -> None:
        """Add a row and print it, below the heads if it is the first."""
        if not self.rows:
            print("\n" + f"{self.title}\n" * bool(self.title) + self._line(list(self.columns)))
        self.rows.append(list(cells))
        print(self._line(self.texts(cells)), flush=True)

    def texts(self, cells: Iterable[Cell]) -> list[str]:
        """Return a row as it is printed and as it stands on a page."""
        return [format_cell(cell, form) for cell, form in zip(cells, self.columns.values(), strict=True)]

    def left(self, name: str) -> bool:
        """Return True for a left-aligned column: the first, and texts."""
        return self.columns[name].startswith("<") or name == next(iter(self.columns))

    def find(self, *names: Cell) -> dict[str, Cell]:
        """Return the one row that has all these among its cells."""
        (found,) = (row for row in self.rows if all(name in row for name in names))
        return dict(zip(self.columns, found, strict=True))

    def _line(self, texts: list[str]) -> str:
        parts = []
        for text, (name, form) in zip(texts, self.columns.items(), strict=True):
            width = max(9, len(name), int(form[1:]) if form.startswith("<") else 0)
            parts.append(text.ljust(width) if self.left(name) else text.rjust(width))
        return "  ".join(parts).rstrip()


@dataclass
class Result:
    """The measurements of one run with their command, versions and machine."""

    title: str
    command: str
    """Command that reproduces the figures; empty where no script does."""
    date: str
    beside: str
    """Other load of the machine."""
    versions: dict[str, str]
    machine: str
    tables: list[Table] = field(default_factory=list)
    seconds: float | None = None
    """Duration of the command."""

    @classmethod
    def begin(cls, title: str, options: argparse.Namespace, *packages: str) -> Result:
        """Print the title, the versions and the machine. `packages` are the peers whose versions count."""
        today = datetime.date.today().isoformat()
        result = cls(title, _command(), today, options.beside, _versions(packages), _machine())
        print(f"{title}\n{', '.join(f'{name} {number}' for name, number in result.versions.items())}")
        print(result.machine)
        return result

    def table(self, columns: Mapping[str, str], title: str = "") -> Table:
        """Begin a table, whose rows are printed as they are added."""
        self.tables.append(Table(title, dict(columns)))
        return self.tables[-1]

    def save(self, name: str | None) -> None:
        """Write `bench/results/NAME.json`, if there is a name; a path in front of it is another folder."""
        if name:
            self.seconds = round(time.monotonic() - _BEGAN, 1)
            path = RESULTS / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.json(), encoding="utf-8")

    def json(self) -> str:
        """Return the result as JSON, one line a row."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        text = json.dumps(values, indent=1, ensure_ascii=False)
        return re.sub(r"\[\n\s+([^\[\]{}]+?)\n\s+\]", lambda found: f"[{_one_line(found[1])}]", text) + "\n"


def _one_line(text: str) -> str:
    return re.sub(r",\n\s+", ", ", text)


def read(path: Path) -> Result:
    values = json.loads(path.read_text(encoding="utf-8"))
    return Result(**{**values, "tables": [Table(**table) for table in values["tables"]]})


def flags(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--save", metavar="NAME", help="keep the figures in bench/results/NAME.json")
    made.add_argument("--beside", default="not said", help="what else runs: `nothing`, `other work`")
    return made


def _command() -> str:
    """Return the command line without `--save` and `--beside`."""
    words, skip = [Path(sys.argv[0]).name], False
    for word in sys.argv[1:]:
        if not skip and not word.startswith(("--save", "--beside")):
            words.append(word)
        skip = word in ("--save", "--beside")
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    begins = f"torchrun --nproc-per-node {ranks}" if ranks else "python"
    return f"{begins} bench/{shlex.join(words)}"


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, of the imported zerodrift, and of torch and `packages` as installed."""
    found = {"Python": platform.python_version(), "zerodrift": zerodrift.__version__}
    for package in ("torch", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    processor = f"{named[0] if named else platform.machine()} ({', '.join(units) or platform.machine()})"
    return f"{os.cpu_count()} cores of {processor}{_gpu()}"


def _gpu() -> str:
    import torch

    from zerodrift.comm import usable_accelerator

    found = usable_accelerator()
    return "" if found is None else f", {torch.get_device_module(found).get_device_name()}"
