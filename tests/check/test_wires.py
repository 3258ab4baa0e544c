"""Gradients on the wire between two ranks: narrowed by a hook, by a policy or by hand, and whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.check.loops import BF16, FP32, dense, nothing, observed_as_made
from tests.ranks.harness import on_ranks
from zerodrift.inspect.check.script_findings import wire_error

Made = tuple[nn.Module, Callable[[], Any]]


def hooked(hook: Any, state: Any = None) -> Made:
    model = DistributedDataParallel(dense())
    model.register_comm_hook(state, hook)
    return model, nothing


def own(dtype: torch.dtype) -> Any:
    def narrowed(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
        sent = bucket.buffer().to(dtype) / dist.get_world_size()
        work = dist.all_reduce(sent, async_op=True).get_future()
        return work.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    return narrowed


def compressed(state, bucket):  # type: ignore[no-untyped-def]
    """Compress gradients under a new name: DDP refuses torch's hook where there is no GPU."""
    return default_hooks.bf16_compress_hook(state, bucket)


def quantized(state, bucket):  # type: ignore[no-untyped-def]
    """Reduce gradients as eight bits and a scale, gathered and summed."""
    whole = bucket.buffer()
    scale = whole.abs().amax() / 127
    scales = [torch.zeros_like(scale) for _ in range(2)]
    parts = [torch.zeros_like(whole, dtype=torch.int8) for _ in range(2)]
    dist.all_gather(scales, scale)
    dist.all_gather(parts, (whole / scale).round().to(torch.int8))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(sum(p * s for p, s in zip(parts, scales, strict=True)) / 2)  # type: ignore[arg-type]
    return done


def by_hand(dtype: torch.dtype, at_once: bool = False) -> Made:
    model = dense()

    def average() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        sent = [gradient.to(dtype) for gradient in gradients]
        if at_once:
            flat = torch.cat([gradient.flatten() for gradient in gradients]).to(dtype)
            dist.all_reduce(flat)
            parts = flat.split([each.numel() for each in sent])
            sent = [part.view_as(each) for part, each in zip(parts, sent, strict=True)]
        for gradient, each in zip(gradients, sent, strict=True):
            if not at_once:
                dist.all_reduce(each)
            gradient.copy_(each / dist.get_world_size())

    return model, average


def sharded(**policy: torch.dtype) -> Made:
    model = dense()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
    return model, nothing


def packed(**precision: torch.dtype) -> Made:
    how: dict[str, Any] = dict(use_orig_params=True, device_id=torch.device("cpu"))
    return FullyShardedDataParallel(dense(), mixed_precision=MixedPrecision(**precision), **how), nothing


WIRE, NONE = "wire-in-16-bits", ""
RUNS: dict[str, tuple[Callable[[], Made], str]] = {
    "bf16 hook": (lambda: hooked(compressed), WIRE),
    "fp16 hook": (lambda: hooked(default_hooks.fp16_compress_hook), WIRE),
    "own hook in bf16": (lambda: hooked(own(BF16)), WIRE),
    "own hook in int8": (lambda: hooked(quantized), WIRE),
    "PowerSGD": (
        lambda: hooked(powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)),
        "wire-compressed"),
    "by hand in bf16": (lambda: by_hand(BF16), WIRE),
    "by hand in bf16, at once": (lambda: by_hand(BF16, at_once=True), WIRE),
    "fully_shard": (lambda: sharded(param_dtype=BF16), WIRE),
    "FSDP": (lambda: packed(param_dtype=BF16), WIRE),
    "whole hook": (lambda: hooked(default_hooks.allreduce_hook), NONE),
    "by hand in fp32, at once": (lambda: by_hand(FP32, at_once=True), NONE),
    "fully_shard in fp32": (lambda: sharded(param_dtype=BF16, reduce_dtype=FP32), NONE),
    "FSDP in fp32": (lambda: packed(param_dtype=BF16, reduce_dtype=FP32), NONE),
}  # fmt: skip


@on_ranks(2, timeout=200.0)
def test_a_narrow_wire_is_named_and_a_whole_one_is_not() -> str:
    wrong = {}
    every = {name for name, _ in dense().named_parameters()}
    for name, (make, kind) in RUNS.items():
        found = {finding.kind: {*finding.names} for finding in observed_as_made(make).findings()}
        if found != ({kind: every} if kind else {}):
            wrong[name] = found
    return str(wrong) if wrong else ""


def test_the_estimate_of_a_wire_is_that_of_sums() -> None:
    """The estimate is within a quarter of sums in fp64."""
    torch.manual_seed(0)
    for count in (2, 8, 64):
        parts = torch.randn(count, 1 << 14, dtype=torch.float64)
        total = parts[0].to(BF16)
        for part in parts[1:]:
            total = total + part.to(BF16)
        error = float((total.double() - parts.sum(0)).norm() / parts.sum(0).norm())
        assert abs(wire_error("bfloat16", count) / error - 1) < 0.25
