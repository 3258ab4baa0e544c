"""Run every benchmark again by the command in its result, then write the pages: `make bench`.

    python bench/again.py                                # all of them, hours
    python bench/again.py --only step-fp32,persistent    # these results

A script of which no result is kept runs with its defaults, and prints. Figures by hand stay as they are. One
that fails keeps its old result, and does not stop the others. After an interruption the same command goes on
with what has not run, as long as zerodrift and the benchmarks are the same; what `--only` names always runs.
What needs a GPU or another environment is left out where there is none. Claims that are missed are named.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from claims import Results, claims
from result import ROOT, format_cell

from zerodrift.comm import usable_accelerator

BENCH = Path(__file__).parent
ROUND = ROOT / "runs" / "bench.json"
"""The benchmarks that have run since the last round of all of them ended."""
PEER = "PYTHON"
"""Stands in a command for the interpreter of another environment."""
MEASURES = re.compile(r"^from result import Result, flags$", re.MULTILINE)
"""The line of a script that keeps a result."""


@dataclass(frozen=True)
class Benchmark:
    """One command."""

    words: list[str]
    kept: str | None
    """The name of its result."""
    seconds: float | None
    """Seconds of the last kept run."""
    packages: tuple[str, ...] = ()
    """Packages whose versions the last kept run names."""

    @property
    def name(self) -> str:
        return self.kept or Path(self.words[1]).stem

    def arguments(self, beside: str) -> list[str]:
        """Return the command line for this interpreter, with the options that keep the result."""
        begins = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[self.words[0]]
        keeping = ["--save", self.kept, "--beside", beside] if self.kept else []
        return [sys.executable, *begins, *self.words[1:], *keeping]


def benchmarks() -> list[Benchmark]:
    """Return the benchmarks of all kept results, then the scripts without one."""
    kept = [
        Benchmark(shlex.split(result.command), name, result.seconds, _needed(result.versions))
        for name, result in Results().items()
        if result.command
    ]
    known = {word for each in kept for word in each.words}
    scripts = [path for path in sorted(BENCH.glob("*.py")) if MEASURES.search(path.read_text())]
    others = [f"bench/{path.name}" for path in scripts if f"bench/{path.name}" not in known]
    return [*kept, *(Benchmark(["python", path], None, None) for path in others)]


def obstacle(each: Benchmark, has_gpu: bool) -> str:
    """Return what a benchmark needs and this machine or command has not; empty if nothing is missing."""
    if not has_gpu and ("cuda" in each.words or each.words[1].startswith("bench/gpu")):
        return "needs a GPU"
    if absent := [name for name in each.packages if not _is_installed(name)]:
        return f"needs {', '.join(absent)}, which its kept figures name"
    return "needs another environment, of which its first lines tell" if PEER in each.words else ""


def _needed(versions: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name, number in versions.items() if number != "not installed")


def _is_installed(package: str) -> bool:
    try:
        return package == "Python" or bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def sources() -> str:
    """Return a digest of zerodrift and of the benchmarks."""
    paths = sorted([*(ROOT / "src" / "zerodrift").rglob("*.*"), *BENCH.glob("*.*")])
    kept = [path.read_bytes() for path in paths if path.suffix in (".py", ".h", ".cpp")]
    return hashlib.sha256(b"".join(kept)).hexdigest()


def unfinished_round() -> list[str]:
    """Return the names that ran in an unfinished round, unless the sources have changed since."""
    told = json.loads(ROUND.read_text()) if ROUND.exists() else {}
    return list(told["ran"]) if told.get("sources") == sources() else []


def missed_claims(names: Sequence[str]) -> list[str]:
    """Return a line for each claim that rests on one of these results and misses its limit."""
    lines = []
    for claim in claims(Results()):
        if claim.met is False and claim.limit is not None and claim.figure.source in names:
            most = "at least" if claim.limit.at_least else "at most"
            limit = format_cell(claim.limit.value, claim.figure.form)
            lines.append(f"missed: {claim.what}: {claim.figure}, claimed {most} {limit}")
    return lines


def heading(number: int, todo: Sequence[Benchmark]) -> str:
    """Return a line with the benchmark that runs, and the known times of this and of all that follow."""
    left = todo[number:]
    known = [each.seconds for each in left if each.seconds is not None]
    more = f", and {len(left) - len(known)} that were not timed" if len(known) < len(left) else ""
    now = todo[number].seconds
    took = "not timed before" if now is None else f"about {_long(now)}"
    return (
        f"== {number + 1} of {len(todo)}, {todo[number].name}: {shlex.join(todo[number].words)}\n"
        f"   {took}; left: {_long(sum(known))}{more}"
    )


def _long(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def run(todo: Sequence[Benchmark], beside: str, ran: list[str], round_of_all: bool) -> list[str]:
    """Run one after the other, and return the names of those that failed; the others are added to `ran`."""
    failed = []
    for number, each in enumerate(todo):
        print(heading(number, todo), flush=True)
        began = time.monotonic()
        code = subprocess.run(each.arguments(beside), cwd=ROOT, check=False).returncode
        print(f"   {each.name}: {_long(time.monotonic() - began)}" + f", failed with {code}" * bool(code))
        if code:
            failed.append(each.name)
            continue
        ran.append(each.name)
        if round_of_all:
            ROUND.parent.mkdir(exist_ok=True)
            ROUND.write_text(json.dumps({"sources": sources(), "ran": ran}))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Every benchmark again, and the pages of what was found.")
    parser.add_argument("--beside", default="not said", help="what else runs: `nothing`, `other work`")
    parser.add_argument("--only", metavar="NAME,...", help="of results, or of scripts that keep none")
    asked = parser.parse_args()
    todo, ran = benchmarks(), [] if asked.only else unfinished_round()
    if asked.only:
        names = {each.name for each in todo}
        wanted = {*asked.only.split(",")}
        if not wanted <= names:
            unknown, there = (", ".join(sorted(each)) for each in (wanted - names, names))
            parser.error(f"--only: must be names of {there}; got {unknown}")
        todo = [each for each in todo if each.name in wanted]
    if ran:
        print(f"these ran before the last stop: {', '.join(ran)}")
        todo = [each for each in todo if each.name not in ran]
    has_gpu = usable_accelerator() is not None
    left_out = {each.name: why for each in todo if (why := obstacle(each, has_gpu))}
    for name, why in left_out.items():
        print(f"{name} is left out: it {why}")
    todo = [each for each in todo if each.name not in left_out]
    try:
        failed = run(todo, asked.beside, ran, not asked.only)
    except KeyboardInterrupt:
        print("\nstopped" + "; the same command goes on from here" * (not asked.only), file=sys.stderr)
        return 130
    pages = subprocess.run([sys.executable, "tools/refresh.py"], cwd=ROOT, check=False).returncode
    print("\n".join(missed_claims(ran)))
    print(f"{len(todo) - len(failed)} of {len(todo)} ran" + f"; failed: {', '.join(failed)}" * bool(failed))
    if not (failed or asked.only):
        ROUND.unlink(missing_ok=True)
    return bool(failed) or pages


if __name__ == "__main__":
    sys.exit(main())
