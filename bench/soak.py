"""Check that memory, files and threads of a long run do not grow.

    python bench/soak.py                     # an hour: two ranks, stage 3, bf16
    python bench/soak.py --minutes 5

`zerodrift train` with checkpoints beside training, evaluations, samples and digests, as a command of its own.
Every few seconds its processes are looked at from outside: memory (RSS), open files and threads of each. At
the end it is asked to stop, as a person would, and must exit with 130. The memory of the last tenth of the
time is compared with that of the second, for caches fill in the first; files and threads, which come and go
with every checkpoint, by the most of each half.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from result import Result, flags

RANKS = 2


def job(folder: Path) -> Path:
    """A small Llama that is saved every twenty steps and evaluated every thirty."""
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(model))
    written = {
        "model": {"source": str(folder / "config.json")},
        "data": {"train": os.path.dirname(os.__file__) + "/*.py", "validation": 0.01, "block": 128},
        "run": {
            "folder": str(folder / "run"),
            "steps": 1_000_000,
            "nproc": RANKS,
            "evaluate_every": 30,
            "evaluate_blocks": 16,
            "samples": ["def "],
            "checkpoint_every": 20,
            "asynchronous_checkpoints": True,
            "digest_every": 50,
        },
        "config": {
            "precision": {"mode": "bf16"},
            "zero_optimization": {"stage": 3},
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    }
    path = folder / "job.json"
    path.write_text(json.dumps(written))
    return path


@dataclass(frozen=True)
class Sample:
    """Memory, files and threads at one moment: the largest value of any rank."""

    second: float
    memory: float
    """MiB."""
    files: int
    threads: int


def child_processes(process: int) -> list[int]:
    """Return the child processes of a process."""
    path = Path(f"/proc/{process}/task")
    return [int(child) for task in path.iterdir() for child in (task / "children").read_text().split()]


def take_sample(ranks: list[int], second: float) -> Sample:
    status = [Path(f"/proc/{rank}/status").read_text() for rank in ranks]
    values = [dict(line.split(":", 1) for line in text.splitlines()) for text in status]
    return Sample(
        second,
        max(int(value["VmRSS"].split()[0]) for value in values) / 1024,
        max(len(list(Path(f"/proc/{rank}/fd").iterdir())) for rank in ranks),
        max(int(value["Threads"]) for value in values),
    )


def soak(folder: Path, minutes: float, every: float) -> tuple[list[Sample], int]:
    """Run the job; return the samples and the exit code."""
    command = [sys.executable, "-m", "zerodrift", "train", str(job(folder))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began, sights = time.monotonic(), []
    with (folder / "output.txt").open("w") as output:
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while (second := time.monotonic() - began) < 60 * minutes and run.poll() is None:
                time.sleep(every)
                if (step := steps(folder)) and run.poll() is None:
                    sights.append(take_sample(child_processes(run.pid), second))
                    print(f"\r{second / 60:6.1f} of {minutes:g} min, step {step}", end="", flush=True)
            run.send_signal(signal.SIGINT)
            return sights, run.wait(120)
        finally:
            print()
            if run.poll() is None:
                run.kill()


def steps(folder: Path) -> int:
    """Return the number of steps so far."""
    path = folder / "run" / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 4096))
        lines = [line for line in stream.read().splitlines()[1:] if b'"kind": "step"' in line]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def show_growth(result: Result, sights: list[Sample], taken: int) -> None:
    """Print each tenth of the time, and the growth."""
    columns = {"tenth": ".0f", "to minute": ".1f", "MiB": ".1f", "files": ".0f", "threads": ".0f"}
    table = result.table(columns, "The larger rank: its memory (median), open files and threads (most)")
    size, found = len(sights) / 10, []
    for tenth in range(10):
        part = sights[round(size * tenth) : round(size * (tenth + 1))]
        memory = statistics.median(sight.memory for sight in part)
        found.append((memory, max(sight.files for sight in part), max(sight.threads for sight in part)))
        table.row(tenth + 1, part[-1].second / 60, *found[-1])
    columns = {"": "<14", "steps": ".0f", "memory": ".3f", "files": ".3f", "threads": ".3f"}
    result.table(columns).row("end to begin", taken, *growth(found))


def growth(tenths: list[tuple[float, int, int]]) -> tuple[float, float, float]:
    """Return memory, files and threads near the end, relative to those near the beginning."""
    memory, files, threads = zip(*tenths[1:], strict=True)
    first, later = slice(0, 4), slice(4, None)
    return (
        memory[-1] / memory[0],
        max(files[later]) / max(files[first]),
        max(threads[later]) / max(threads[first]),
    )


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between looks")
    options = parser.parse_args()
    title = f"{options.minutes:g} minutes of `zerodrift train` on {RANKS} ranks, stage 3, bf16"
    result = Result.begin(title, options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sights, code = soak(folder, options.minutes, options.every)
        if code != 130 or len(sights) < 20:
            said = (folder / "output.txt").read_text()[-2000:]
            raise SystemExit(f"exited with {code} after {len(sights)} looks; the end of its output:\n{said}")
        show_growth(result, sights, steps(folder))
        checkpoints = len(list((folder / "run" / "checkpoints").glob("step-*")))
        page = (folder / "run" / "report.html").stat().st_size / 1e6
        left = {"": "<10", "checkpoints kept": ".0f", "page, MB": ".2f"}
        result.table(left).row("its folder", checkpoints, page)
    result.save(options.save)


if __name__ == "__main__":
    main()
