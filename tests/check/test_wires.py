"""Gradients on the wire between two ranks: narrowed by a hook, by a policy or by hand, and whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from tests.check.loops import BF16, FP32, dense, nothing, observed_as_made
from tests.check.tiny import Dense
from tests.ranks.harness import on_ranks
from zerodrift.inspect.check.findings import run_findings
from zerodrift.inspect.check.script_findings import wire_error

Made = tuple[nn.Module, Callable[[], Any]]


def hooked(hook: Any, state: Any = None) -> Made:
    model = DistributedDataParallel(dense())
    model.register_comm_hook(state, hook)
    return model, nothing


def by_hand(
    dtype: torch.dtype, parts: int = 2, seed: int = 0, gathers: bool = False, has_own: bool = False
) -> Made:
    """Make a model from a seed, whose gradients are summed in a dtype and divided into parts.

    Each rank may have a part of its own, such as an expert, whose gradients are not averaged.
    """
    torch.manual_seed(seed)
    model = Dense()
    shared = [p for name, p in model.named_parameters() if not (has_own and name.startswith("down."))]
    if has_own:
        torch.manual_seed(dist.get_rank())
        model.down.reset_parameters()

    def average() -> None:
        gradients = [p.grad for p in shared if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(dtype)
        if gathers:
            every = [torch.empty_like(flat) for _ in range(2)]
            dist.all_gather(every, flat)
            flat = torch.stack(every).float().sum(0)
        else:
            dist.all_reduce(flat)
        sums = flat.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient) / parts)

    return model, average


def stage() -> Made:
    """Make a model of each rank's own, which sends activations to the next."""
    torch.manual_seed(dist.get_rank())
    activations = torch.ones(64)
    return Dense(), lambda: dist.recv(activations, 0) if dist.get_rank() else dist.send(activations, 1)


def cut() -> Made:
    """Make a model with a layer that is cut over ranks, which sums in 16 bits."""
    model = dense()
    model.norm.register_forward_pre_hook(lambda _, args: (all_reduce(args[0].to(BF16)).float(),))
    return DistributedDataParallel(model), nothing


def sharded(**policy: torch.dtype) -> Made:
    model = dense()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
    return model, nothing


def packed(**precision: torch.dtype) -> Made:
    how: dict[str, Any] = dict(use_orig_params=True, device_id=torch.device("cpu"))
    return FullyShardedDataParallel(dense(), mixed_precision=MixedPrecision(**precision), **how), nothing


WIRE, NONE = "wire-in-16-bits", ""
RUNS: dict[str, tuple[Callable[[], Made], str]] = {
    "hook": (lambda: hooked(default_hooks.fp16_compress_hook), WIRE),
    "PowerSGD": (
        lambda: hooked(powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)),
        "wire-compressed"),
    "by hand in bf16": (lambda: by_hand(BF16), WIRE),
    "fully_shard": (lambda: sharded(param_dtype=BF16), WIRE),
    "FSDP": (lambda: packed(param_dtype=BF16), WIRE),
    "gathered in bf16": (lambda: by_hand(BF16, gathers=True), WIRE),
    "gathered in fp32": (lambda: by_hand(FP32, gathers=True), NONE),
    "stages of a pipeline": (stage, NONE),
    "a layer that is cut": (cut, NONE),
    "a part of each rank's own": (lambda: by_hand(FP32, has_own=True), NONE),
    "by hand in fp32": (lambda: by_hand(FP32), NONE),
    "fully_shard in fp32": (lambda: sharded(param_dtype=BF16, reduce_dtype=FP32), NONE),
    "FSDP in fp32": (lambda: packed(param_dtype=BF16, reduce_dtype=FP32), NONE),
    "a sum": (lambda: by_hand(FP32, parts=1), "not-averaged"),
    "no average": (lambda: (dense(), nothing), "not-averaged"),
    "no common seed": (lambda: by_hand(FP32, seed=dist.get_rank()), "ranks-differ"),
}  # fmt: skip
"""Name of a run -> what it makes, and the kind of the finding, which names all parameters."""


@on_ranks(2, timeout=200.0)
def test_what_goes_over_the_wire_is_named_and_a_whole_average_is_not() -> str:
    wrong = {}
    every = {name for name, _ in dense().named_parameters()}
    drawn = {name for name in every if not name.startswith("norm.")}
    for name, (make, kind) in RUNS.items():
        processes: list[Any] = [None] * 2
        dist.all_gather_object(processes, observed_as_made(make).process)
        found = {finding.kind: {*finding.names} for finding in run_findings(processes)}
        if found != ({kind: drawn if kind == "ranks-differ" else every} if kind else {}):
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
