"""Time the optimizer step with the kernels of a wheel, with kernels compiled here, and without kernels.

    python bench/kernels.py               # AdamW on 16M parameters, bf16 with a split master, one thread

The three take turns in rounds of one process; what is printed is the median, and its ratio to the first. Each
leaves the same bits, which is checked.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from result import Result, flags

import zerodrift
from zerodrift.kernels import build, native

CONFIG = {"precision": {"mode": "bf16"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
WIDTH, LAYERS = 1024, 16


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    compiler = build.find_compiler()
    assert compiler is not None, "install a C++ compiler: two of the three need one here"
    with tempfile.TemporaryDirectory() as folder:
        list(build.compile_variants(compiler, Path(folder, "carried")))
        here = Path(folder, "here")
        here.mkdir()
        kinds = {
            "carried by the wheel": native.carried(Path(folder, "carried")),
            "compiled here": native.obtain(here, compiler),
            "without kernels": None,
        }
        engines = {}
        for kind in kinds:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
            engines[kind] = zerodrift.initialize(model, config=CONFIG)
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(options.rounds):
            torch.manual_seed(number)
            batch = torch.randn(4, WIDTH, dtype=torch.bfloat16)
            for kind, library in kinds.items():
                native.library = lambda library=library: library  # type: ignore[assignment]
                engine = engines[kind]
                engine.backward(engine(batch).square().mean())
                began = time.perf_counter()
                engine.step()
                times[kind].append(time.perf_counter() - began)
        digests = {kind: engine.digest() for kind, engine in engines.items()}
        assert len(set(map(str, digests.values()))) == 1, digests
    carried = kinds["carried by the wheel"]
    assert carried is not None, "no library of a wheel suits this processor"
    size = WIDTH * (WIDTH + 1) * LAYERS / 1e6
    result = Result.begin(
        f"step of {size:.1f}M parameters, bf16 with a split master, {carried.path.stem}", options
    )
    table = result.table({"kernels": "<20", "ms": ".1f", "of carried": ".2f"})
    first = statistics.median(times["carried by the wheel"])
    for kind, seconds in times.items():
        table.row(kind, statistics.median(seconds) * 1e3, statistics.median(seconds) / first)
    result.save(options.save)


if __name__ == "__main__":
    main()
