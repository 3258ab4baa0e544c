"""Measure the bytes per parameter that stay between steps, beside FSDP2 and DeepSpeed.

    python bench/persistent.py                     # every engine, a fresh pair of processes each
    python bench/persistent.py --only zd-3,fsdp2 --width 256

Two gloo ranks train a decoder in bf16 with AdamW for a few steps; then rank 0 is looked at twice. `tensors`
is the bytes of all tensors that the process keeps alive beyond those before the model was built. `resident`
is the growth of the process's resident memory over the same time, after the allocator has given back what is
free: it has the tensors, and everything else that an engine brings along. Both are divided by the number of
parameters and multiplied by the number of ranks, so 12 stands for 12/N. `plan` is what zerodrift promised
before the first tensor moved.

FSDP2 stores fp32, computes in bf16 and reduces in fp32; its gradients count until `zero_grad`, so it is shown
with and without them. zerodrift frees the accumulator in the step. DeepSpeed is stage 3, its bf16 block on,
with buckets of one transformer block: its default of 5e8 elements would be all there is to see in a small
model. It is left out where it is not installed. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import step as peers
from result import Result, flags

RANKS = 2


@dataclass
class Built:
    """An engine under measurement."""

    step: peers.Step
    keep: object
    """Whatever must stay alive, as it would in a training script."""
    planned: float | None = None
    """Bytes at rest on this rank, where the engine says so beforehand."""


def zerodrift(options: argparse.Namespace, **precision: str) -> Built:
    from zerodrift import cost, initialize

    config = {
        "precision": {"mode": "bf16", **precision},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": peers.LR}},
    }
    engine = initialize(peers.make_model(options), config=config, device="cpu", quiet=True)

    def step(tokens: torch.Tensor) -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Built(step, engine, cost(engine.plan).rest.total)


def fsdp2(options: argparse.Namespace, zero_grad: bool) -> Built:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = peers.make_model(options)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = peers.fused(model)

    def step(tokens: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        if zero_grad:
            optimizer.zero_grad()
        return loss.item()

    return Built(step, (model, optimizer))


def deepspeed(options: argparse.Namespace) -> Built:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds

    model = peers.make_model(options)
    block = 12 * options.width**2
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": block,
            "stage3_prefetch_bucket_size": block,
            "stage3_param_persistence_threshold": 0,
        },
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = ds.initialize(model=model, optimizer=peers.fused(model), config=config)

    def step(tokens: torch.Tensor) -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Built(step, engine)


ENGINES: dict[str, Callable[[argparse.Namespace], Built]] = {
    "zd-3": lambda o: zerodrift(o),
    "zd-3 bf16-stochastic": lambda o: zerodrift(o, state="bf16-stochastic"),
    "zd-3 8bit": lambda o: zerodrift(o, state="8bit"),
    "zd-3 fp32 master": lambda o: zerodrift(o, master="fp32"),
    "fsdp2": lambda o: fsdp2(o, zero_grad=True),
    "fsdp2 with gradients": lambda o: fsdp2(o, zero_grad=False),
    "ds-3": deepspeed,
}
"""Name -> how to build it. `zd-3` is zerodrift at stage 3 with `split` masters and fp32 state unless said."""


def measured(rank: int, folder: str, options: argparse.Namespace, name: str, queue: Any) -> None:
    peers.join(rank, folder)
    for module in ("torch.distributed.fsdp", "torch._dynamo", "zerodrift"):
        importlib.import_module(module)  # part of the baseline for everybody
    if name.startswith("ds-"):
        importlib.import_module("deepspeed")
    warm(options, name)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(options.vocabulary, (options.batch, options.length), generator=generator)
    before, base = alive(), resident()
    built = ENGINES[name](options)
    for _ in range(options.steps):
        built.step(tokens)
    found = {"tensors": alive() - before, "resident": resident() - base, "planned": built.planned}
    if rank == 0:
        queue.put(found)
    dist.barrier()


def warm(options: argparse.Namespace, name: str) -> None:
    """Run a step of a tiny model, so that memory of lazily loaded code is counted for no engine."""
    tiny = argparse.Namespace(**{**vars(options), "width": 64, "layers": 1, "vocabulary": 256})
    built = ENGINES[name](tiny)
    built.step(torch.zeros(options.batch, options.length, dtype=torch.long))


def alive() -> int:
    """Return the bytes of the storages of every tensor, gradients included."""
    gc.collect()
    # By type: `isinstance` asks the lazy attributes of torch for a class.
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    sizes = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage.device.type == "cpu":
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def resident() -> int:
    """Return the resident bytes of this process after the C library has released free memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(peers.resident() * 2**20)


def main() -> None:
    options = parse()
    names = options.only.split(",") if options.only else list(ENGINES)
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        raise SystemExit(f"`--only`: must be of {', '.join(ENGINES)}; got {', '.join(unknown)}.")
    if not peers.available("deepspeed"):
        names = [name for name in names if not name.startswith("ds-")]
    count = sum(p.numel() for p in peers.make_model(options).parameters())
    size = f"{count / 1e6:.1f}M parameters, width {options.width}, {options.layers} layers"
    result = Result.begin(f"{size}, bf16, {RANKS} ranks: bytes per parameter x ranks", options, "deepspeed")
    table = result.table({"engine": "<22", **dict.fromkeys(("planned", "tensors", "resident"), ".2f")})
    for name in names:
        figures = peers.launch(measured, options, name)
        planned, *seen = (figures[key] for key in ("planned", "tensors", "resident"))
        each = RANKS / count
        table.row(name, planned and planned * each, *(bytes_ * each for bytes_ in seen))
    result.save(options.save)


def parse() -> argparse.Namespace:
    parser = flags(__doc__)
    parser.add_argument("--only", default="", help="comma-separated engines")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    options.dtype = "bf16"
    return options


if __name__ == "__main__":
    main()
