"""A step makes the host wait for the device once, where it reads the norm: gathers and reductions run in
streams of their own, and the update reads its numbers from pinned memory.

The CPU plays the device: see `tests/waits.py`. `tests/gpu` has the tests on a real one.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import nn

from tests.ranks.harness import run_ranks
from tests.ranks.test_host import like_gpus
from tests.waits import Waits, play_a_gpu
from zerodrift import initialize

pytestmark = pytest.mark.fresh_ranks
MODES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": {"mode": "fp32"}},
    "bf16": {"precision": {"mode": "bf16"}},
    "fp16": {"fp16": {"enabled": True}},
    "autocast-bf16": {"precision": {"mode": "autocast-bf16"}},
    "8bit": {"precision": {"mode": "bf16", "state": "8bit"}},
    "native": {"precision": {"mode": "fp32", "reduce": {"order": "native"}}},
    "tree": {"precision": {"mode": "fp32", "reduce": {"order": "tree"}}},
}
READ = "tolist in collectives.read"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3)))


def in_steps(cases: list[tuple[int, str]]) -> list[tuple[list[str], list[tuple[str, ...]]]]:
    """Return the waits of the host in the sixth step of each case, and the calls of streams."""
    dist.destroy_process_group()
    patch = pytest.MonkeyPatch()
    like_gpus()
    streams = play_a_gpu(patch)
    found = [waits_of(stage, mode, streams) for stage, mode in cases]
    patch.undo()
    return found


def waits_of(stage: int, mode: str, streams: Any) -> tuple[list[str], list[tuple[str, ...]]]:
    dist.init_process_group("fake", rank=0, world_size=8, store=dist.HashStore())
    config = {
        **MODES[mode],
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "sharding": {"units": ["0", "1", "2"]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine = initialize(network(), config=config, device="cpu", quiet=True)
    engine.progress.scaler.scale = 1.0
    batch = torch.ones(2, 8)

    def step() -> None:
        for _ in range(2):
            engine.backward(engine(batch).square().mean())
            engine.step()

    for _ in range(5):  # more is looked at in the first steps
        step()
    streams.told.clear()
    with Waits() as waits:
        step()
    assert engine.global_steps == 6
    engine.destroy()
    dist.destroy_process_group()
    # The state of a generator is the host's own.
    return [wait for wait in waits.found if wait != "equal in determinism.forward"], list(streams.told)


def test_a_step_waits_for_the_device_once() -> None:
    cases = [*itertools.product(range(4), ("fp32", "fp16")), *((3, mode) for mode in MODES)]
    (found,) = run_ranks(in_steps, 1, cases)
    expected = {case: [READ] for case in cases}
    assert {case: waits for case, (waits, _) in zip(cases, found, strict=True)} == expected


def test_gathers_and_reductions_have_lanes_of_their_own() -> None:
    ((_, told),) = run_ranks(in_steps, 1, [(3, "fp32")])[0]
    lanes: dict[str, set[str]] = {}
    for stream, *what in told:
        lanes.setdefault(what[0], set()).add(stream)
    (reductions,) = lanes["all_to_all_single"]
    (gathers,) = lanes["all_gather_single"] - {"main"}
    assert len({reductions, gathers, "main"}) == 3 and lanes["update"] == {"main"}
    # What is begun in a lane comes after what the computation was told before, and is waited for later.
    for place, (stream, *what) in enumerate(told):
        if what in (["all_gather_single"], ["all_to_all_single"]) and stream != "main":
            assert told[place - 1] == (stream, "waits for", "main")
            name, _, number = told[place + 1]
            assert ("main", "waits for", f"{name} event {number}") in told[place:]


def test_what_would_wait_is_seen() -> None:
    values = torch.arange(4.0)
    ways = {
        "_local_scalar_dense": [values.sum().item, lambda: bool(values.any()), lambda: float(values[0])],
        "tolist": [values.tolist],
        "numpy": [values.numpy],
        "cpu": [values.cpu],
        "to": [lambda: values.to(torch.device("cpu"))],
        "tensor": [lambda: torch.tensor([1.0], device=values.device)],
        "nonzero": [values.nonzero],
        "index": [lambda: values[values > 1]],
        "masked_select": [lambda: values.masked_select(values > 1)],
        "equal": [lambda: torch.equal(values, values)],
        "__setitem__": [lambda: values.__setitem__(-1, 0.5)],
        "_unique2": [values.unique],
    }
    for name, calls in ways.items():
        for call in calls:
            with Waits() as waits:
                call()
            assert waits.found == [f"{name} in the model"]
    with Waits() as waits:
        values.add_(1).to(torch.float64)[1:3] = 2.0
        torch.full((), 3.0, device=values.device)
    assert waits.found == []
