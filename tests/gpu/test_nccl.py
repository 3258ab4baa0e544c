"""Ranks that talk through NCCL, or the strict group of the stand-in: one, two and four, a device each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.gpu.device import COUNT, DEVICE, FEW_STEPS, needs_accelerator, waits_in
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, same, train
from zerodrift.api import initialize

pytestmark = needs_accelerator
SIZES = (1, 2, 4)


on_sizes = pytest.mark.parametrize("world", SIZES)


def on_each(function: Any, world: int, folder: Path, *args: Any) -> None:
    """Run `function(device, *args)` on so many ranks, a device each; raise the first error."""
    if world > COUNT:
        pytest.skip(f"needs {world} GPUs; this machine has {COUNT}")
    mp.start_processes(_rank, (function, world, str(folder), args), nprocs=world, start_method="spawn")


def _rank(rank: int, function: Any, world: int, folder: str, args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    device, backend = torch.device(DEVICE.type, rank), dist.get_default_backend_for_device(DEVICE)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    function(device, *args)
    dist.destroy_process_group()


def stages(device: torch.device, mode: str) -> None:
    runs = []
    for stage in range(4):
        engine = initialize(
            GPT(moe=True).to(device), config=config(stage, mode), device=device.type, quiet=True
        )
        runs.append(train(engine, FEW_STEPS, data=lambda *place: batch(*place).to(device)))
        engine.destroy()
    assert same(runs) == []


@pytest.mark.cells(1)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast-bf16"])
@on_sizes
def test_all_stages_are_the_same_bits(world: int, mode: str, tmp_path: Path) -> None:
    on_each(stages, world, tmp_path, mode)


def digest(device: torch.device, folder: str) -> None:
    """Return a digest of the state after three steps of four micro-batches, for any number of ranks."""
    world = dist.get_world_size()
    micro_batches = 4 // world
    settings = config(3, "fp32", micro_batches, precision={"reduce": {"order": "tree"}})
    engine = initialize(GPT().to(device), config=settings, device=device.type, quiet=True)

    def data(step: int, rank: int, micro: int) -> torch.Tensor:
        return batch(step, 0, engine.micro_batches_of_this_rank()[micro]).to(device)

    train(engine, 3, micro_batches, data)
    found = engine.digest()
    if dist.get_rank() == 0:
        Path(folder, f"digest-{world}").write_text(str(found))
    engine.destroy()


@pytest.mark.skipif(COUNT < 2, reason=f"needs 2 GPUs; this machine has {COUNT}")
def test_the_same_bits_on_any_number_of_devices(tmp_path: Path) -> None:
    for world in (size for size in SIZES if size <= COUNT):
        folder = tmp_path / str(world)
        folder.mkdir()
        on_each(digest, world, folder, str(tmp_path))
    assert len({path.read_text() for path in tmp_path.glob("digest-*")}) == 1


def lanes(device: torch.device) -> None:
    """Compare the bits of steps that gather everything at once and one unit ahead; each waits once."""
    runs, tokens = [], [batch(6, dist.get_rank(), micro).to(device) for micro in range(2)]
    for room in (1, 1 << 30):
        settings = config(3, "bf16", 2, sharding={"prefetch": room})
        engine = initialize(GPT(layers=6).to(device), config=settings, device=device.type, quiet=True)
        runs.append(train(engine, FEW_STEPS, 2, data=lambda *place: batch(*place).to(device)))

        def step(engine: Any = engine) -> None:
            for micro in tokens:
                engine.backward(engine(micro))
                engine.step()

        waits = waits_in(step)
        assert len(waits) == 1, waits
        engine.destroy()
    assert same(runs) == []


@on_sizes
def test_gathers_and_reductions_go_on_beside_the_computation(world: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    on_each(lanes, world, tmp_path)
