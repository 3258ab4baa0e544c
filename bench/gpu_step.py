"""Measure a training step of one engine on GPUs: time, tokens per second, share of peak FLOPs, peak memory.

    torchrun --nproc-per-node 1 bench/gpu_step.py --engine zerodrift --size 1B [--json FILE]

`bench/gpu.py` starts this for every line of its tables, each in a process of its own, so that the memory
of one engine is not counted for another. All train the decoder of `llama.py` in bf16 with fused AdamW: DDP
under autocast, FSDP2 with bf16 parameters and sums in fp32, both over fp32 weights, zerodrift with split
masters; `zerodrift-8bit` has moments in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from llama import SHAPES, Llama

from zerodrift.train.report.page import peak

LR = 1e-4
Step = Callable[[list[torch.Tensor]], float]
"""The tokens of each micro-batch -> the last one's loss, after one whole optimizer step."""


def zerodrift(model: Llama, device: torch.device, state: str) -> Step:
    from zerodrift import initialize

    config = {
        "precision": {"mode": "bf16", "state": state},
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},  # as torch does unasked
    }
    engine = initialize(model.to(torch.bfloat16), config=config, device=device, quiet=True)

    def step(batches: list[torch.Tensor]) -> float:
        loss = torch.zeros(())
        for number, tokens in enumerate(batches, 1):
            loss = engine(tokens)
            engine.backward(loss)
            if number == len(batches):
                engine.step()
        return loss.item()

    return step


def fsdp2(model: Llama, device: torch.device) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return torch_step(model, torch.autocast(device.type, enabled=False))


def ddp(model: Llama, device: torch.device) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch_step(wrapped, torch.autocast(device.type, torch.bfloat16))


def torch_step(model: nn.Module, autocast: Any) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(batches: list[torch.Tensor]) -> float:
        loss = torch.zeros(())
        for tokens in batches:
            with autocast:
                loss = model(tokens)
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


ENGINES: dict[str, Callable[[Llama, torch.device], Step]] = {
    "zerodrift": lambda model, device: zerodrift(model, device, "fp32"),
    "zerodrift-8bit": lambda model, device: zerodrift(model, device, "8bit"),
    "fsdp2": fsdp2,
    "ddp": ddp,
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = join()
    shape = SHAPES[options.size]
    torch.manual_seed(0)
    with device:
        model = Llama(shape)
    each = shape.floating_operations(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    if options.compile:
        for layer in model.layers:
            layer.compile(backend=options.compile)
    step = ENGINES[options.engine](model, device)
    del model
    torch.manual_seed(1 + dist.get_rank())
    size = (options.accumulate, shape.micro_batch, shape.length)
    batches = list(torch.randint(shape.vocabulary, size, device=device))
    losses, seconds = [], []
    for _ in range(options.warm + options.steps):
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        losses.append(step(batches))
        torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[options.warm :])
    tokens = options.accumulate * shape.micro_batch * shape.length * dist.get_world_size()
    name = torch.get_device_module(device).get_device_name(device)
    top = peak(name, "bf16")
    return {
        "engine": options.engine,
        "size": options.size,
        "parameters": count,
        "compiled": bool(options.compile),
        "ranks": dist.get_world_size(),
        "device": name,
        "micro_batches": options.accumulate,
        "micro_batch": [shape.micro_batch, shape.length],
        "checkpoints": shape.checkpoints,
        "seconds": seconds,
        "ms": median * 1e3,
        "tokens_per_second": tokens / median,
        "mfu": None if top is None else each * tokens / median / top / dist.get_world_size(),
        "device_peak": top,
        "allocated": torch.accelerator.max_memory_allocated(device),
        "reserved": torch.accelerator.max_memory_reserved(device),
        "losses": losses,
    }


def join() -> torch.device:
    """Join the other ranks; each has the accelerator of its number."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        sys.exit("bench/gpu_step.py: the machine must have an accelerator that torch sees; got none")
    device = torch.device(found.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--size", choices=SHAPES, required=True)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--warm", type=int, default=3, help="steps before the clock")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", metavar="BACKEND", help="compile each block: inductor, aot_eager")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options)
    if dist.get_rank() == 0:
        print({key: value for key, value in found.items() if key not in ("seconds", "losses")})
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
