"""Every benchmark again, as its result says that it was run, and the pages of what was found: `make bench`.

    python bench/again.py                                # all of them, hours
    python bench/again.py --only step-fp32,persistent    # these results

A script of which no result is kept runs with its defaults, and prints. Figures by hand stay as they are. One
that fails keeps its old result, and does not stop the others.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from claims import Results
from result import ROOT

BENCH = Path(__file__).parent
MEASURES = re.compile(r"^from result import Result, flags$", re.MULTILINE)
"""What a script begins with that keeps what it finds."""


@dataclass(frozen=True)
class Benchmark:
    """One command."""

    words: list[str]
    kept: str | None
    """The name of its result."""
    seconds: float | None
    """What it took the last time, where that was kept."""

    @property
    def name(self) -> str:
        return self.kept or Path(self.words[1]).stem

    def arguments(self, beside: str) -> list[str]:
        """With this interpreter."""
        begins = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[self.words[0]]
        keeping = ["--save", self.kept, "--beside", beside] if self.kept else []
        return [sys.executable, *begins, *self.words[1:], *keeping]


def benchmarks() -> list[Benchmark]:
    """Those of kept results, then other scripts."""
    kept = [
        Benchmark(shlex.split(result.command), name, result.seconds)
        for name, result in Results().items()
        if result.command
    ]
    known = {word for each in kept for word in each.words}
    scripts = [path for path in sorted(BENCH.glob("*.py")) if MEASURES.search(path.read_text())]
    others = [f"bench/{path.name}" for path in scripts if f"bench/{path.name}" not in known]
    return [*kept, *(Benchmark(["python", path], None, None) for path in others)]


def heading(number: int, todo: Sequence[Benchmark]) -> str:
    """Which one runs, and how long it and the rest will take, as far as that is known."""
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


def run(todo: Sequence[Benchmark], beside: str) -> list[str]:
    """One after the other; the names of those that failed."""
    failed = []
    for number, each in enumerate(todo):
        print(heading(number, todo), flush=True)
        began = time.monotonic()
        code = subprocess.run(each.arguments(beside), cwd=ROOT, check=False).returncode
        print(f"   {each.name}: {_long(time.monotonic() - began)}" + f", failed with {code}" * bool(code))
        if code:
            failed.append(each.name)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Every benchmark again, and the pages of what was found.")
    parser.add_argument("--beside", default="not said", help="what else runs: `nothing`, `other work`")
    parser.add_argument("--only", metavar="NAME,...", help="of results, or of scripts that keep none")
    asked = parser.parse_args()
    todo = benchmarks()
    if asked.only:
        names = {each.name for each in todo}
        wanted = {*asked.only.split(",")}
        if not wanted <= names:
            unknown, there = (", ".join(sorted(each)) for each in (wanted - names, names))
            parser.error(f"--only: must be names of {there}; got {unknown}")
        todo = [each for each in todo if each.name in wanted]
    try:
        failed = run(todo, asked.beside)
    except KeyboardInterrupt:
        return 130
    pages = subprocess.run([sys.executable, "tools/refresh.py"], cwd=ROOT, check=False).returncode
    print(f"{len(todo) - len(failed)} of {len(todo)} ran" + f"; failed: {', '.join(failed)}" * bool(failed))
    return bool(failed) or pages


if __name__ == "__main__":
    sys.exit(main())
