"""Run the tests and benchmarks that need a GPU, in twenty minutes at most.

    make gpu                                 # or: python bench/gpu.py [--minutes 20] [--only update]

Every part is a process of its own, so one that fails, hangs or runs out of memory takes no other with it.
Each result is a file in `bench/results/gpu/` as soon as it is there; a part that does not fit into what is
left of the time is left out and named. The exit code is 1 where a part failed.

`--stub` goes through all of it with the stand-in device of `tests/device` in a GPU's place and models of
0.1M parameters: it shows that every line works on a device, measures nothing, and writes where `--out` says.
Of a test marked `cells` it leaves out the cells whose values others hold.
It needs Linux and a C++ compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from result import Result, read

from zerodrift.comm import usable_accelerator
from zerodrift.train.tools.doctor import examine

HERE = Path(__file__).parent
ENGINES = ("zerodrift", "fsdp2", "ddp")
NEEDS = {"0.1B": 8, "1B": 32, "3B": 72, "8B": 90}
"""GB of one device: below it a size is left out."""


@dataclass(frozen=True)
class Part:
    """One process to run: its command and what it needs."""

    name: str
    command: Sequence[str]
    seconds: float
    """Time limit; the process is killed after it."""
    gigabytes: float = 0
    """Memory that the smallest device must have."""
    says: str = ""
    """Text that the output must contain; without it the part did nothing."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    name: str
    outcome: str
    """`ok`, or what went wrong."""
    seconds: float

    @property
    def failed(self) -> bool:
        return not self.outcome.startswith(("ok", "left out"))


def parts(out: Path, ranks: int, *, stub: bool) -> list[Part]:
    """Return all parts in order, the most informative first."""
    python, device = sys.executable, (usable_accelerator() or torch.device("cuda")).type
    few = ["--numel", "16K", "--rounds", "1"] if stub else ["--numel", "500M"]
    which = ["-m", "gpu and not slow", "-o", "timeout=3000"] if stub else ["-m", "gpu"]
    saved = str(out.resolve() / "update")
    listed = [
        Part("tests", [python, "-m", "pytest", "-q", *which, "tests/gpu"], 420, says=" passed"),
        Part("update", [python, "bench/update.py", *few, "--device", device, "--save", saved], 120),
    ]
    few = ["--warm", "1", "--steps", "2"] if stub else []
    for size in ("tiny",) if stub else ("0.1B", "1B", "3B"):
        for engine in ENGINES:
            listed.append(_step(out, ranks, engine, size, *few))
    whole, few = ("tiny", few) if stub else ("8B", ["--warm", "2", "--steps", "5"])
    compiler = "aot_eager" if stub else "inductor"  # which writes no code for the stand-in
    for more in ([], ["--compile", compiler]):
        listed.append(_step(out, ranks, "zerodrift-8bit", whole, "--accumulate", "2", *few, *more))
    return listed


def _step(out: Path, ranks: int, engine: str, size: str, *more: str) -> Part:
    name = f"step-{size}-{engine}" + ("-compiled" if "--compile" in more else "")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    to = ["--json", str(out / f"{name}.json")]
    command = [*launch, "bench/gpu_step.py", "--engine", engine, "--size", size, *more, *to]
    return Part(name, command, 150 if size != "8B" else 240, NEEDS.get(size, 0))


def run_all(
    listed: Sequence[Part], out: Path, seconds: float, memory: float, say: Callable[[str], None] = print
) -> list[Outcome]:
    """Run each part that fits, within these seconds, on devices with this many GB free."""
    until = time.monotonic() + seconds
    done: list[Outcome] = []
    for number, part in enumerate(listed, 1):
        left = until - time.monotonic()
        if part.gigabytes > memory:
            done.append(
                Outcome(part.name, f"left out: needs {part.gigabytes:g} GB, {memory:.0f} are free", 0)
            )
        elif left < min(30.0, part.seconds):
            done.append(Outcome(part.name, "left out: no time left", 0))
        else:
            say(f"[{number}/{len(listed)}] {part.name}: {left / 60:.0f} minutes left")
            done.append(run(part, out, left))
        say(f"[{number}/{len(listed)}] {part.name}: {done[-1].outcome} ({done[-1].seconds:.0f} s)")
    return done


def run(part: Part, out: Path, left: float) -> Outcome:
    """Run a part. Its output goes to `NAME.log`, and the result of an earlier run is removed."""
    (out / f"{part.name}.json").unlink(missing_ok=True)
    log = out / f"{part.name}.log"
    start = time.monotonic()
    with log.open("w") as printed:
        child = subprocess.Popen(
            part.command, cwd=HERE.parent, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = child.wait(min(part.seconds, left))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(child)
    return Outcome(part.name, outcome(part, code, log.read_text(errors="replace")), time.monotonic() - start)


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def outcome(part: Part, code: int | None, printed: str) -> str:
    """Describe the end of a part in a few words, with the counts of a test runner."""
    lines = [line for line in printed.splitlines() if line.strip()]
    words = (" passed", " failed", " skipped")
    counted = next((line.strip("= ") for line in reversed(lines) if any(w in line for w in words)), "")
    if code is None:
        return "failed: not done in its time"
    if "out of memory" in printed:
        return "failed: out of memory"
    if code:
        return f"failed: {counted or (lines[-1][:100] if lines else f'exit code {code}')}"
    if part.says not in printed:
        return f"failed: nothing{part.says}"
    return f"ok, {counted}" if counted else "ok"


# --- what is told at the end --------------------------------------------------------------------------


def summary(result: Result, out: Path) -> None:
    """Print the figures of all parts side by side."""
    steps = [json.loads(path.read_text()) for path in sorted(out.glob("step-*.json"))]
    columns = {
        "size": "<6",
        "engine": "<26",
        "ms/step": ".1f",
        "tokens/s": ",.0f",
        "MFU": ".1%",
        "peak GB": ".1f",
    }
    table = result.table(columns)
    for found in sorted(steps, key=lambda found: (found["parameters"], found["engine"])):
        engine = found["engine"] + (", compiled" if found["compiled"] else "")
        figures = (found["ms"], found["tokens_per_second"], found["mfu"], found["allocated"] / 1e9)
        table.row(found["size"], engine, *figures)
    if (out / "update.json").exists():
        (update,) = read(out / "update.json").tables
        table = result.table(
            {"step": "<41", "GB/s": ".0f", "x copy_": ".2f"}, "update; the goal is 0.9 of a copy"
        )
        for row in update.rows:
            cells = dict(zip(update.columns, row, strict=True))
            if str(cells["step"]).startswith(("split", "fp32", "torch AdamW fused")):
                table.row(*(cells[column] for column in table.columns))


def machine(result: Result) -> None:
    """Print the GPUs and the problems that `zerodrift doctor` finds."""
    table = result.table({"machine": "<14", "found": "<40", "note": "<40"})
    for fact in examine(os.environ):
        if fact.part == "GPU" or "GPU" in fact.what or fact.bad:
            table.row(fact.what, fact.found, fact.note)


def skipped(result: Result, out: Path) -> None:
    """Print the skipped tests with their reasons."""
    log = out / "tests.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    table = result.table({"tests left out": "<90"})
    for line in lines:
        if re.match(r"\d+ tests/gpu/", line):
            table.row(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--only", default="", help="parts whose names begin so, comma-separated")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu")
    parser.add_argument("--stub", action="store_true", help="without a GPU: go through all of it, tiny")
    parser.set_defaults(beside="nothing of this kit")
    options = parser.parse_args()
    found = usable_accelerator()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if options.stub and not (interpreted and found is not None and found.type == "standin"):
        sys.path.insert(0, str(HERE.parent))
        from tests.device.plugin import environment

        os.execve(sys.executable, [sys.executable, *sys.argv], {**environment(), "TRITON_INTERPRET": "1"})
    if found is None:
        facts = [fact for fact in examine(os.environ) if fact.part == "GPU"]
        sys.exit(
            f"bench/gpu.py: the machine must have a GPU that torch sees; got none: {facts[0].note}. "
            "Try the kit without one: --stub --out FOLDER."
        )
    options.out.mkdir(parents=True, exist_ok=True)
    count = torch.accelerator.device_count()
    memory = min(torch.accelerator.get_memory_info(number)[0] for number in range(count)) / 1e9
    ranks = min(count, 2) if options.stub else count
    result = Result.begin(f"On {ranks} GPUs", options, "triton", "nvidia-nccl-cu13")
    machine(result)
    listed = parts(options.out, ranks, stub=options.stub)
    if options.stub:  # everything runs on the host there, programs in Triton's interpreter
        listed = [replace(part, seconds=10 * part.seconds) for part in listed]
    only = tuple(filter(None, options.only.split(",")))
    listed = [part for part in listed if part.name.startswith(only or "")]
    done = run_all(listed, options.out, options.minutes * 60, memory)
    summary(result, options.out)
    table = result.table({"part": "<30", "seconds": ".0f", "outcome": "<9"})
    for part in done:
        table.row(part.name, part.seconds, part.outcome)
    skipped(result, options.out)
    result.save(str(options.out.resolve() / "run"))
    sys.exit(any(part.failed for part in done))


if __name__ == "__main__":
    main()
