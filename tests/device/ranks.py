"""Run a function on ranks that each have a stand-in device, and the strict process group between them."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from tests.device.build import library
from tests.device.standin import NAME, Order, install, ordered
from tests.device.strict import StrictError, StrictGroup, begin
from tests.ranks import harness
from zerodrift.comm import mesh
from zerodrift.kernels import products


def on_devices(function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Return `function(device, *args)` of every rank, in rank order."""
    return _on_devices(function, world, args, None, timeout)


def instead_of_cpu(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    order: Order = "at once",
    timeout: float = 120.0,
    dying: Collection[int] = (),
) -> list[Any]:
    """Return `function(*args)` of every rank, where the device takes the CPU's place, unless it is named."""
    return _on_devices(function, world, args, order, timeout, dying)


def _on_devices(
    function: Callable[..., Any],
    world: int,
    args: tuple[Any, ...],
    order: Order | None,
    timeout: float,
    dying: Collection[int] = (),
) -> list[Any]:
    library()  # compiled here, which takes longer than a rank may
    given = (_with_device, world, function, args, order)
    may_die = range(world) if dying else ()  # NCCL's watchdog ends those that wait for a dead rank
    answers = harness.run_here(*given, timeout=timeout, dying=may_die, kind=NAME)
    return [None if answer is None else pickle.loads(answer) for answer in answers]


def _with_device(function: Callable[..., Any], args: tuple[Any, ...], order: Order | None) -> bytes:
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("strict", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    device = install()
    begin()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.accelerator.set_device_index(rank)
    torch.get_device_module(NAME).set_rng_state(torch.get_rng_state())
    dist.init_process_group("strict", store=store, rank=rank, world_size=world)
    place, find = torch.device(NAME, rank), mesh._device
    obstacle, scaled = products.obstacle, products.scaled_product
    try:
        # Products of fp8 operands are those of a CPU, as all kernels are.
        products.obstacle = lambda of: "" if of.type == NAME else obstacle(of)
        products.scaled_product = products.reference_product
        if order is None:
            value = function(place, *args)
            with contextlib.suppress(StrictError):  # the function may have caught it
                device.run()
            return _on_host(value)
        mesh._device = lambda process, asked: find(process, place if str(asked or "cpu") == "cpu" else asked)
        torch.set_default_device(place)
        with ordered(order, seed=rank):
            value = function(*args)
            harness.destroy_engines()
        return _on_host(value)
    except RuntimeError:
        if StrictGroup.aborted:
            os._exit(1)
        raise
    finally:
        mesh._device, products.obstacle, products.scaled_product = find, obstacle, scaled
        torch.set_default_device(None)
        device.forget()


class _HostPickler(pickle.Pickler):
    """Pickles tensors of the device as those of the host."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == NAME:
            return value.detach().cpu().__reduce_ex__(2)
        return NotImplemented


def _on_host(value: Any) -> bytes:
    out = io.BytesIO()
    _HostPickler(out).dump(value)
    return out.getvalue()
