"""Run a function on ranks that each have a stand-in device, and the strict process group between them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.device.build import library
from tests.device.standin import NAME, install
from tests.device.strict import begin
from tests.ranks.harness import run_ranks


def on_devices(function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Return `function(device, *args)` of every rank, in rank order."""
    library()  # compiled here, which takes longer than a rank may
    return run_ranks(_with_device, world, function, args, timeout=timeout, kind=NAME)


def _with_device(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("strict", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    device = install()
    begin()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("strict", store=store, rank=rank, world_size=world)
    try:
        return function(torch.device(NAME, rank), *args)
    finally:
        device.forget()
