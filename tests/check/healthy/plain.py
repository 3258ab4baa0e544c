"""Runs on torch alone that lose nothing: `plain.py KIND [digest]`, one function each."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tiny import Dense, Tiny, fit, rank, start

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def clipped(model: nn.Module, micro_batches: int = 1) -> nn.Module:
    clip = torch.nn.utils.clip_grad_norm_
    return fit(model, micro_batches=micro_batches, before=lambda: clip(model.parameters(), 1.0))


def ddp() -> nn.Module:
    return clipped(DistributedDataParallel(Tiny()))


def ddp_autocast() -> nn.Module:
    return fit(DistributedDataParallel(Dense()), autocast=True)


def ddp_no_sync() -> nn.Module:
    model = DistributedDataParallel(Tiny())
    return fit(model, micro_batches=4, unsynchronized=model.no_sync)


def fsdp2() -> nn.Module:
    model = Dense()
    for unit in (model.up, model.down, model):
        fully_shard(unit, mp_policy=BF16)
    return clipped(model, micro_batches=2)


def fsdp1() -> nn.Module:
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    model = FullyShardedDataParallel(
        Dense(), mixed_precision=precision, use_orig_params=True, device_id=torch.device("cpu")
    )
    return fit(model, before=lambda: model.clip_grad_norm_(1.0))


def averaged_updates() -> nn.Module:
    """Step an outer optimizer with what ranks have moved apart from its weights, as DiLoCo does."""
    model = Dense()
    outer = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)

    def average(step: int) -> None:
        if step % 2:
            for weight, parameter in zip(outer, model.parameters(), strict=True):
                weight.grad = weight.detach() - parameter.detach()
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
            optimizer.step()
            with torch.no_grad():
                for weight, parameter in zip(outer, model.parameters(), strict=True):
                    parameter.copy_(weight)

    return fit(model, after=average)


def digest(model: nn.Module) -> str:
    """Return a SHA-256 of every bit of this rank's parameters."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        total.update(local.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (ddp, ddp_autocast, ddp_no_sync, fsdp2, fsdp1, averaged_updates)
}

if __name__ == "__main__":
    start()
    trained = KINDS[sys.argv[1]]()
    if "digest" in sys.argv:
        print(f"rank {rank()}: {digest(trained)}", flush=True)
