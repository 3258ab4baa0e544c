"""Every benchmark again, as its result says that it was run, and the pages of what was found: `make bench`.

A script of which no result is kept runs with its defaults, and prints. Figures by hand stay as they are.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from claims import Results
from result import ROOT, flags

BENCH = Path(__file__).parent
MEASURES = re.compile(r"^from result import Result, flags$", re.MULTILINE)
"""What a script begins with that keeps what it finds."""


def commands() -> list[list[str]]:
    """Those of kept results, each with where to keep it again, then those of other scripts."""
    kept = {name: shlex.split(result.command) for name, result in Results().items() if result.command}
    known = {word for words in kept.values() for word in words}
    scripts = [path for path in sorted(BENCH.glob("*.py")) if MEASURES.search(path.read_text())]
    others = [f"bench/{path.name}" for path in scripts if f"bench/{path.name}" not in known]
    return [[*words, "--save", name] for name, words in kept.items()] + [["python", path] for path in others]


def runnable(words: list[str]) -> list[str]:
    """With this interpreter."""
    begins = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[words[0]]
    return [sys.executable, *begins, *words[1:]]


def main() -> None:
    beside = flags(__doc__).parse_args().beside
    for words in commands():
        print(f"== {shlex.join(words)}", flush=True)
        options = ["--beside", beside] if "--save" in words else []
        subprocess.run([*runnable(words), *options], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "docs/refresh.py"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
