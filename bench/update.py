"""The optimizer step: one line per scheme, beside torch's and the chain of separate passes.

Every case is timed in turns with a plain `copy_` of as many fp32 elements, and shown as a multiple of that
copy's bytes per second (8 bytes per element), so a busy or slow machine changes both. Bytes are the fewest
that the case has to move, so separate passes over the same data count once.

    python bench/update.py [--numel 20M] [--threads 1] [--rounds 15] [--device cpu]

`norm + ...` reads the gradient once more before the step, for the clip factor: that is what replaces the
chain, which is unscale, `clip_grad_norm_`, fused AdamW, and the cast of the weights to bf16. `torch root`
takes the square root from the library that torch's default kernels ask; see [Note: roots] in
`optim/updates.py`. `limit: ...` moves the same bytes and computes nothing (`traffic.cpp`, where there is a
compiler): what the machine lets one pass over these arrays reach.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from result import Result, flags
from torch import Tensor

from zerodrift import optimizers
from zerodrift.dtypes import BLOCK, DType
from zerodrift.kernels import block_keys, device, native, parameter_key
from zerodrift.kernels.build import find_compiler
from zerodrift.kernels.squares import block_square_sums, digits, total
from zerodrift.optim.fused import update
from zerodrift.optim.schemes import Scheme, allocate
from zerodrift.optim.updates import Hyper, Root, UpdateStep, reference_update
from zerodrift.optimizers import Algorithm
from zerodrift.policy.decisions import Master, State

HYPER = Hyper(lr=1e-3, step=10, weight_decay=0.1, momentum=0.9)
COPY_BYTES = 8
CHAIN = "chain: unscale, clip, AdamW fused, cast"


@dataclass(frozen=True)
class Case:
    """A step to time."""

    name: str
    size: int
    """Bytes per parameter that must be read and written."""
    build: Callable[[Tensor], Callable[[], object]]
    """Gradient -> the step. Called when it is this case's turn, so one case is in memory at a time."""
    slow: bool = False
    """Ten times slower than others: fewer rounds."""


@dataclass(frozen=True)
class Line:
    """Measurements of one case."""

    name: str
    size: int
    milliseconds: float
    gigabytes: float
    copies: float
    """Bytes per second over those of the copy timed in turns with it."""
    chains: float
    """Time over that of the chain, each in copies of its own round."""


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    where = torch.device(options.device)
    fast = native.library() is not None if where.type == "cpu" else device.works(where)
    kernels, vectors = "compiled" if fast else "reference", torch.backends.cpu.get_cpu_capability()
    result = Result.begin(
        f"AdamW unless said, {options.numel / 1e6:.4g}M parameters, {options.threads} thread(s), "
        f"{options.device}, {kernels} kernels, {vectors}",
        options,
        "deepspeed",
    )
    columns = {"step": "<41", "B/param": "", "ms": ".2f", "GB/s": ".1f", "x copy_": ".2f", "of chain": ".2f"}
    table = result.table(columns)
    for line in measure(options.numel, options.rounds, where):
        table.row(line.name, line.size, line.milliseconds, line.gigabytes, line.copies, line.chains)
    result.save(options.save)


def parse() -> argparse.Namespace:
    parser = flags(__doc__)
    parser.add_argument("--numel", type=count, default=count("20M"), help="parameters: 20M, 200M, 1000000")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1")
    return parser.parse_args()


def count(text: str) -> int:
    """Parse a number of parameters: `20M` -> 20 million, rounded to whole blocks."""
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    unit = units.get(text[-1:].upper(), 1)
    number = int(float(text.rstrip("kKmMgG")) * unit)
    return max(number // BLOCK, 1) * BLOCK


def measure(numel: int, rounds: int, where: torch.device) -> Iterator[Line]:
    source, target = torch.randn(numel, device=where), torch.empty(numel, device=where)
    gradient = torch.randn(numel, device=where)
    found = {}
    for case in cases(where):
        step = case.build(gradient)
        clock = Clock(where)
        found[case.name] = in_turns(step, lambda: target.copy_(source), clock, 3 if case.slow else rounds)
        del step
    for case in cases(where):
        seconds, copies = found[case.name]
        moved = case.size * numel
        yield Line(
            name=case.name,
            size=case.size,
            milliseconds=seconds * 1e3,
            gigabytes=moved / seconds / 1e9,
            copies=case.size / COPY_BYTES / copies,
            chains=copies / found[CHAIN][1],
        )


class Clock:
    """A clock for calls that waits until the device has finished them."""

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.get_device_module(device).synchronize

    def __call__(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start


def in_turns(
    step: Callable[[], object], copy: Callable[[], object], timed: Clock, rounds: int
) -> tuple[float, float]:
    """Return (median seconds of a step, median of a step's time in copies of the same round)."""
    steps, ratios = [], []
    for number in range(rounds + 2):
        one, other = timed(copy), timed(step)
        again = timed(copy)
        if number >= 2:  # the first rounds touch memory for the first time
            steps.append(other)
            ratios.append(other / ((one + again) / 2))
    return statistics.median(steps), statistics.median(ratios)


def cases(where: torch.device) -> list[Case]:
    bf16, fp32 = torch.bfloat16, torch.float32
    exact, split, same = Master.FP32, Master.SPLIT, Master.SAME
    wide, near, drawn = State.FP32, State.BF16, State.BF16_STOCHASTIC
    return [
        ours("fp32 master, fp32 state, fp32 grad", 30, DType.BF16, exact, wide, fp32),
        ours("split, fp32 state, fp32 grad", 28, DType.BF16, split, wide, fp32),
        ours("split, fp32 state, bf16 grad", 26, DType.BF16, split, wide, bf16),
        ours("split, bf16 state, fp32 grad", 20, DType.BF16, split, near, fp32),
        ours("split, bf16-stochastic state, fp32 grad", 20, DType.BF16, split, drawn, fp32),
        ours("split, bf16-stochastic state, bf16 grad", 18, DType.BF16, split, drawn, bf16),
        ours("split, 8bit state, fp32 grad", 16, DType.BF16, split, State.EIGHT_BIT, fp32),
        ours("fp32 storage, fp32 state, fp32 grad", 28, DType.FP32, same, wide, fp32),
        ours("split, torch root", 28, DType.BF16, split, wide, fp32, root=Root.TORCH),
        ours("split, SGD momentum", 16 + 4, DType.BF16, split, wide, fp32, optimizers.SGD),
        ours("split, Lion", 16 + 4, DType.BF16, split, wide, fp32, optimizers.LION),
        *(limit_cases() if where.type == "cpu" else []),
        Case("norm of an fp32 grad", 4, norm),
        ours("norm + fp32 master", 34, DType.BF16, exact, wide, fp32, clip=True),
        ours("norm + split", 32, DType.BF16, split, wide, fp32, clip=True),
        ours("reference: split in plain PyTorch", 28, DType.BF16, split, wide, fp32, slow=True),
        Case("torch AdamW fused", 28, torch_step(fused=True)),
        Case("torch AdamW foreach", 28, torch_step(foreach=True), slow=True),
        Case("torch AdamW default", 28, torch_step(foreach=False), slow=True),
        *(deepspeed_cases() if where.type == "cpu" else []),
        Case(CHAIN, 34, chain),
    ]


def ours(
    name: str,
    size: int,
    storage: DType,
    master: Master,
    state: State,
    grad: torch.dtype,
    algorithm: Algorithm = optimizers.ADAMW,
    root: Root = Root.EXACT,
    clip: bool = False,
    slow: bool = False,
) -> Case:
    def build(gradient: Tensor) -> Callable[[], object]:
        blocks = gradient.numel() // BLOCK
        mine = allocate(
            Scheme(storage, master, state),
            gradient.to(storage.torch, copy=True),
            len(algorithm.moments),
            groups=torch.zeros(blocks, dtype=torch.int32, device=gradient.device),
            keys=block_keys(parameter_key("weight"), 0, blocks, gradient.device),
        )
        given = gradient.to(grad)
        path = reference_update if slow else update

        def step() -> None:
            factor = 0.5
            if clip:
                factor = min(1.0, 1.0 / (total(digits(block_square_sums(given))) ** 0.5 + 1e-6))
            path(mine, given, UpdateStep(algorithm, (HYPER,), 10, factor, root))

        return step

    return Case(name, size, build, slow)


def norm(gradient: Tensor) -> Callable[[], object]:
    return lambda: total(digits(block_square_sums(gradient)))


def limit_cases() -> list[Case]:
    """Return cases that move the bytes of a step and compute nothing; none without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "traffic.so"
        flags = ("-O3", "-march=native", "-mprefer-vector-width=512", "-shared", "-fPIC")
        source = Path(__file__).with_name("traffic.cpp")
        subprocess.run([compiler, *flags, str(source), "-o", str(built)], check=True)
        moved = ctypes.CDLL(str(built))

    def moving(function: Any, *beside: torch.dtype) -> Callable[[Tensor], Callable[[], object]]:
        def build(gradient: Tensor) -> Callable[[], object]:
            arrays = [gradient, *(torch.ones_like(gradient, dtype=dtype) for dtype in beside)]

            def step() -> None:
                function(
                    ctypes.c_int64(gradient.numel()), *(ctypes.c_void_p(array.data_ptr()) for array in arrays)
                )

            return step

        return build

    fp32, bf16, low, byte = torch.float32, torch.bfloat16, torch.int16, torch.uint8
    return [
        Case("limit: the bytes of fp32 master", 30, moving(moved.move_fp32, bf16, fp32, fp32, fp32)),
        Case("limit: the bytes of split", 28, moving(moved.move_split, bf16, low, fp32, fp32)),
        Case("limit: the bytes of split, 8bit", 16, moving(moved.move_split_8bit, bf16, low, byte, byte)),
        Case("limit: the bytes of a norm", 4, moving(moved.move_read)),
    ]


def torch_step(**kind: bool) -> Callable[[Tensor], Callable[[], object]]:
    def build(gradient: Tensor) -> Callable[[], object]:
        parameter = torch.nn.Parameter(gradient.clone())
        parameter.grad = gradient
        optimizer = torch.optim.AdamW([parameter], lr=HYPER.lr, weight_decay=HYPER.weight_decay)
        optimizer.param_groups[0].update(kind)
        return optimizer.step

    return build


def deepspeed_cases() -> list[Case]:
    """Return DeepSpeed's CPU Adam, which compiles itself on first use; nothing where it is not installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return []

    def build(gradient: Tensor) -> Callable[[], object]:
        parameter = torch.nn.Parameter(gradient.clone())
        parameter.grad = gradient
        return DeepSpeedCPUAdam([parameter], lr=HYPER.lr, weight_decay=HYPER.weight_decay).step

    return [Case("DeepSpeed CPU Adam", 28, build)]


def chain(gradient: Tensor) -> Callable[[], object]:
    parameter = torch.nn.Parameter(gradient.clone())
    summed = parameter.grad = gradient.clone()
    visible = torch.empty_like(gradient, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([parameter], lr=HYPER.lr, weight_decay=HYPER.weight_decay, fused=True)

    def step() -> None:
        summed.mul_(0.5)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
        visible.copy_(parameter.detach())

    return step


if __name__ == "__main__":
    main()
