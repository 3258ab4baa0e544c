"""Compare a training step with DDP, FSDP2 and DeepSpeed: time, bytes on the wire, peak memory.

    python bench/step.py                     # time and wire, all engines in the same two processes
    python bench/step.py --memory            # peak memory, a fresh pair of processes per engine and round
    python bench/step.py --only ddp,zd-3 --length 32 --profile zd-3

Two gloo ranks, one thread each, fused AdamW everywhere, fp32 unless `--dtype bf16`. Engines take turns in
rounds, so a machine whose speed drifts drifts for all; what is printed is the median of the ratios to DDP
within a round. FSDP2 is measured as it comes and with point-to-point collectives in place of gloo's, which
are slow, so that the carrier is not what is compared. Bytes are counted by the loopback device, both ranks
together, and where zerodrift's ranks share memory by what they write there, so they are what was really sent.
Pages that both ranks have mapped are in the peak of each, and are what `shared` counts. Needs Linux;
DeepSpeed is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT
from result import Result, flags

LR = 1e-4
Step = Callable[[torch.Tensor], float]
"""Tokens -> loss, after one whole optimizer step."""


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def torch_step(model: nn.Module, dtype: str) -> Step:
    optimizer = fused(model)
    autocast = torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()

    def step(tokens: torch.Tensor) -> float:
        with autocast:
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ddp(options: argparse.Namespace) -> Step:
    model = nn.parallel.DistributedDataParallel(make_model(options))
    return torch_step(model, options.dtype)


def fsdp2(options: argparse.Namespace, reshard: bool, pairwise: bool) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model(options)
    low = options.dtype == "bf16"
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if low
        else MixedPrecisionPolicy()
    )
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)
    if pairwise:
        for module in (*model.layers, model):
            module.set_custom_all_gather(PairGather())
            module.set_custom_reduce_scatter(PairReduce())
            module.set_force_sum_reduction_for_comms(True)
    return torch_step(model, "fp32")


class PairGather:
    """An all-gather between two ranks as one exchange of slices."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        rank = dist.get_rank(group)
        halves = output_tensor.chunk(2)
        other = 1 - rank
        work = [
            dist.irecv(halves[other], group=group, group_src=other),
            dist.isend(input_tensor, group=group, group_dst=other),
        ]
        if halves[rank].data_ptr() != input_tensor.data_ptr():
            halves[rank].copy_(input_tensor)
        return Works(work) if async_op else Works(work).wait()


class PairReduce:
    """A reduce-scatter between two ranks as one exchange of slices and a local sum."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        rank = dist.get_rank(group)
        halves = input_tensor.chunk(2)
        other = 1 - rank
        received = torch.empty_like(halves[rank])
        work = [
            dist.irecv(received, group=group, group_src=other),
            dist.isend(halves[other], group=group, group_dst=other),
        ]
        Works(work).wait()
        torch.add(halves[rank], received, out=output_tensor)
        return Works([]) if async_op else None


class Works:
    def __init__(self, work: list[Any]) -> None:
        self.work = work

    def wait(self, timeout: Any = None) -> bool:
        for item in self.work:
            item.wait()
        return True


def deepspeed(options: argparse.Namespace, stage: int) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds

    model = make_model(options)
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "bf16": {"enabled": options.dtype == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = ds.initialize(model=model, optimizer=fused(model), config=config)

    def step(tokens: torch.Tensor) -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def zerodrift(options: argparse.Namespace, stage: int, mode: str | None = None) -> Step:
    from zerodrift import initialize

    model = make_model(options)
    mode = mode or {"fp32": "fp32", "bf16": "bf16"}[options.dtype]
    config = {
        "precision": {"mode": mode},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0,
        "sharding": {"accumulator": options.accumulator},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},  # as torch does unasked
    }
    engine = initialize(model, config=config, device="cpu", quiet=True)

    def step(tokens: torch.Tensor) -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.item()

    step.engine = engine  # type: ignore[attr-defined]
    return step


def make_model(options: argparse.Namespace) -> GPT:
    return GPT(options.width, options.layers, options.vocabulary)


ENGINES: dict[str, Callable[[argparse.Namespace], Step]] = {
    "ddp": ddp,
    "fsdp2": lambda o: fsdp2(o, True, False),
    "fsdp2-keep": lambda o: fsdp2(o, False, False),
    "fsdp2-p2p": lambda o: fsdp2(o, True, True),
    "fsdp2-keep-p2p": lambda o: fsdp2(o, False, True),
    "ds-1": lambda o: deepspeed(o, 1),
    "ds-2": lambda o: deepspeed(o, 2),
    "ds-3": lambda o: deepspeed(o, 3),
    "zd-0": lambda o: zerodrift(o, 0),
    "zd-1": lambda o: zerodrift(o, 1),
    "zd-2": lambda o: zerodrift(o, 2),
    "zd-3": lambda o: zerodrift(o, 3),
    "zd-3-autocast": lambda o: zerodrift(o, 3, "autocast-bf16"),
}
"""Name -> how to build it. `zd-N` is zerodrift at stage N, `ds-N` DeepSpeed, `keep` keeps after forward."""


def join(rank: int, folder: str, ranks: int = 2) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def sent_bytes() -> int:
    """Return the bytes that the loopback device has sent, by all processes of this machine."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def shared_bytes(step: Step) -> int:
    """Return the bytes that all ranks of an engine have written to shared memory."""
    engine = getattr(step, "engine", None)
    shared = None if engine is None else engine.comm.mesh.shared
    total = torch.tensor(0 if shared is None else shared.own.written)
    dist.all_reduce(total)
    return int(total)


def timed(rank: int, folder: str, options: argparse.Namespace, names: list[str], queue: Any) -> None:
    join(rank, folder)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(options.vocabulary, (options.batch, options.length), generator=generator)
    steps = {name: ENGINES[name](options) for name in names}
    losses: dict[str, float] = {}
    for name, step in steps.items():
        for _ in range(2):
            losses[name] = step(tokens)
    times: dict[str, list[float]] = {name: [] for name in names}
    wires: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, step in steps.items():
            dist.barrier()
            shared = shared_bytes(step)
            wire, start = sent_bytes(), time.perf_counter()
            for _ in range(options.steps):
                losses[name] = step(tokens)
            dist.barrier()
            times[name].append((time.perf_counter() - start) / options.steps)
            wire = sent_bytes() - wire
            wires[name].append((wire + shared_bytes(step) - shared) / options.steps)
    if options.profile and rank == 0:
        print_profile(steps[options.profile], tokens)
    elif options.profile:
        for _ in range(3):
            steps[options.profile](tokens)
    if rank == 0:
        digests = {name: step.engine.plan.digest for name, step in steps.items() if hasattr(step, "engine")}
        queue.put({"times": times, "wires": wires, "losses": losses, "digests": digests})
    dist.barrier()


def print_profile(step: Step, tokens: torch.Tensor) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            step(tokens)
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def measured(rank: int, folder: str, options: argparse.Namespace, name: str, queue: Any) -> None:
    join(rank, folder)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(options.vocabulary, (options.batch, options.length), generator=generator)
    importlib.import_module("torch.distributed.fsdp")  # part of the baseline for everybody

    base = resident()
    step = ENGINES[name](options)
    built = resident()
    for _ in range(4):
        step(tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if rank == 0:
        rest, shared = resident(), resident("RssShmem")
        queue.put({"built": built - base, "peak": peak - base, "rest": rest - base, "shared": shared})
    dist.barrier()


def resident(kind: str = "VmRSS") -> float:
    """Return the MiB of this process in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) / 1024
    return 0.0


def launch(function: Any, *args: Any, ranks: int = 2) -> dict[str, Any]:
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            function, args=(folder, *args, queue), nprocs=ranks, join=False, start_method="spawn"
        )
        while not processes.join(timeout=1):
            pass
    return queue.get()


def show_times(result: Result, found: dict[str, Any], names: list[str]) -> None:
    times, wires = found["times"], found["wires"]
    columns = {"engine": "<14", "ms/step": ".1f", f"ratio to {names[0]}": ".2f", "range": ""}
    table = result.table({**columns, "MB/step sent": ".1f", "loss": ".4f", "plan": "<12"})
    for name in names:
        ratios = [a / b for a, b in zip(times[name], times[names[0]], strict=True)]
        table.row(
            name,
            statistics.median(times[name]) * 1e3,
            statistics.median(ratios),
            f"{min(ratios):.2f}-{max(ratios):.2f}",
            statistics.median(wires[name]) / 1e6,
            found["losses"][name],
            found["digests"].get(name, "-")[:12],
        )


def show_memory(result: Result, found: dict[str, list[dict[str, float]]]) -> None:
    """Print medians, because the heap that `malloc` keeps varies between equal processes."""
    heads = ("built MiB", "at rest MiB", "peak MiB", "shared MiB")
    columns = {"engine": "<14", **dict.fromkeys(heads, ".0f"), "range of peaks": ""}
    table = result.table(columns, "over the import baseline")
    for name, rounds in found.items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        peaks = [each["peak"] for each in rounds]
        table.row(
            name,
            middle["built"],
            middle["rest"],
            middle["peak"],
            middle["shared"],
            f"{min(peaks):.0f}-{max(peaks):.0f}",
        )


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--only", default="", help="comma-separated engines; the first is the base")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulator", choices=["free", "keep"], default="free")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--profile", default="", help="an engine to profile after the rounds")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(ENGINES)
    if not options.only and options.dtype == "fp32":
        names.remove("zd-3-autocast")
    if not available("deepspeed"):
        names = [name for name in names if not name.startswith("ds-")]
    count = sum(p.numel() for p in make_model(options).parameters())
    result = Result.begin(
        f"{count / 1e6:.1f}M parameters, width {options.width}, {options.layers} layers, "
        f"batch {options.batch} x {options.length}, {options.dtype}, 2 ranks x 1 thread",
        options,
        "deepspeed",
    )
    if options.memory:
        show_memory(
            result, {name: [launch(measured, options, name) for _ in range(options.rounds)] for name in names}
        )
    else:
        show_times(result, launch(timed, options, names), names)
    result.save(options.save)


def available(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    main()
