"""Features of the engine on the stand-in device: the bits of the CPU, in every order of streams.

The functions are those that other tests run on the CPU. Here they get the device in its place.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerodrift as zd
from tests.device.build import needs_device
from tests.device.plugin import ROOT, environment
from tests.device.ranks import instead_of_cpu
from tests.device.standin import ORDERS, Order
from tests.e2e.jobs import job
from tests.numerics import experts, test_experts, test_offload, test_order, test_pipelines
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import Run, config, finish, make, same, train
from tests.ranks.harness import run_ranks
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.train.report.metrics import read

pytestmark = needs_device

STEPS = 2
PINS: dict[str, Any] = {"precision": {"rules": [{"match": "*.router.*", "pin": "fp32"}]}}
FP16: dict[str, Any] = {"fp16": {"initial_scale_power": 17, "hysteresis": 1}}
NARROW: dict[str, Any] = {"precision": {"gather": "fp8", "reduce": {"wire": "int4", "feedback": True}}}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: GPT(layers=1),
    "experts": lambda: GPT(layers=1, moe=True),
    "recomputed": lambda: GPT(recompute=False),
}


def train_model(stage: int, mode: str, micro_batches: int, model: str, rest: dict[str, Any]) -> Run:
    return train(make(config(stage, mode, micro_batches, **rest), MODELS[model]()), STEPS, micro_batches)


def without_synchronization(stage: int) -> Run:
    """Run two micro-batches without reduction, then one that ends the step."""
    engine = make(config(stage, "bf16", 3), MODELS["dense"]())
    with engine.no_sync():
        for micro in range(2):
            engine.backward(engine(batch(0, engine.mesh.rank("data"), micro)))
    engine.backward(engine(batch(0, engine.mesh.rank("data"), 2)))
    engine.step()
    return finish(engine)


def by_fully_shard(stage: int, mode: str) -> Run:
    written = config(stage, mode, 2, backend="fsdp2", precision={"storage": "fp32"})
    return train(make(written, MODELS["dense"]()), STEPS, 2)


def on_ranks_of_experts(stage: int) -> Run:
    """Send tokens to the ranks of their experts, in unequal numbers."""
    engine = test_experts.engine_of(test_experts.config(stage, "ep2"), skew=(2, 0, 0, -2))
    return train(engine, STEPS, test_experts.MICRO, data=experts.batch)


def summed_by_the_tree(stage: int, when: str, model: str) -> list[Any]:
    return list(test_order.train_cell(test_order.Cell(stage, when, model=model)))


FEATURES: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
    "stage 0": (2, train_model, (0, "bf16", 1, "experts", {})),
    "stage 1": (2, train_model, (1, "bf16", 1, "experts", {})),
    "fp16, pins and accumulation": (2, train_model, (2, "fp16", 2, "experts", {**FP16, **PINS})),
    "no_sync": (2, without_synchronization, (2,)),
    "recomputed": (2, train_model, (3, "bf16", 1, "recomputed", {})),
    "muon": (2, train_model, (3, "bf16", 1, "dense", test_offload.MUON)),
    "offload": (2, test_offload.run, (3, "cpu", {}, True)),
    "native": (2, train_model, (3, "bf16", 2, "dense", {"precision": {"reduce": {"order": "native"}}})),
    "tree": (2, summed_by_the_tree, (3, "every", "dense")),
    "narrow columns": (2, train_model, (3, "bf16", 2, "dense", NARROW)),
    "replicas": (4, train_model, (3, "fp32", 1, "dense", {"sharding": {"replicate": 2}})),
    "ranks of experts": (2, on_ranks_of_experts, (3,)),
    "fully_shard": (2, by_fully_shard, (3, "bf16")),
    "fully_shard over replicas": (2, by_fully_shard, (1, "autocast-fp16")),
    "1f1b, tied": (2, test_pipelines.train_stages, (0, "1f1b", None, True)),
    "zbv": (2, test_pipelines.train_stages, (0, "zbv", "queue")),
}
FEW = (
    *("stage 0", "stage 1", "fp16, pins and accumulation", "recomputed", "tree", "narrow columns", "offload"),
    *("ranks of experts", "fully_shard", "zbv", "replicas"),
)


@pytest.mark.parametrize(
    ("feature", "order"),
    [
        pytest.param(name, ORDERS[number % len(ORDERS)], marks=[pytest.mark.slow] * (name not in FEW))
        for number, name in enumerate(FEATURES)
    ],
)
def test_features_have_the_bits_of_the_cpu(feature: str, order: Order) -> None:
    """`test_suite.py` runs more of them, each on the device alone."""
    world, function, args = FEATURES[feature]
    expected = run_ranks(function, world, *args)
    found = instead_of_cpu(function, world, *args, order=order)
    if isinstance(expected[0], Run):
        assert [same(pair) for pair in zip(expected, found, strict=True)] == [[]] * world
    else:
        assert found == expected


def draw_numbers() -> tuple[list[float], bool]:
    """Draw numbers in three ways; return them, and whether the CPU's generator has moved."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    values = [torch.rand(4), nn.Dropout()(torch.ones(16)), torch.randn(4).normal_()]
    return torch.cat(values).tolist(), not torch.equal(before, torch.get_rng_state())


def test_random_numbers_come_from_the_devices_generator() -> None:
    """A seed gives the numbers of the CPU, whose own generator stays where it is."""
    (numbers, _), *_ = run_ranks(draw_numbers, 1)
    assert instead_of_cpu(draw_numbers, 1, order="side streams last") == [(numbers, False)]


def asked_by_the_engine(expression: str) -> str:
    file = str(Path(zd.__file__).with_name("asked.py"))
    try:
        eval(compile(expression, file, "eval"), {"torch": torch})
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (
            "torch.rand(4, generator=torch.Generator())",
            "Expected a 'standin' device type for generator but found 'cpu'",
        ),
        (
            "torch.ones(2) + torch.ones(2, device='cpu')",
            "Expected all tensors to be on the same device, but found cpu, standin:0 in aten.add.Tensor",
        ),
        ("torch.ones(2) + torch.ones((), device='cpu')", ""),
    ],
)
def test_the_engine_must_not_use_what_is_of_the_cpu_on_the_device(expression: str, words: str) -> None:
    assert instead_of_cpu(asked_by_the_engine, 1, expression) == [words]


# --- files ---------------------------------------------------------------------------------------------


def saved(folder: str, stage: int) -> Run:
    engine = make(config(stage, "bf16", **PINS), MODELS["experts"]())
    train(engine, 1)
    Checkpoints(engine, folder, quiet=True).save()
    zd.export(engine, Path(folder) / "export")
    return train(engine, 1)


def resumed(folder: str, stage: int) -> tuple[Run, list[str]]:
    engine = make(config(stage, "bf16", **PINS), MODELS["experts"]())
    loaded = Checkpoints(engine, folder, quiet=True).load()
    return finish(engine), [str(each) for each in loaded.differences if each.what == "random numbers"]


def test_files_have_the_same_bytes_and_load_on_either(tmp_path: Path) -> None:
    """Two ranks save; two ranks and one rank at another stage load. Random numbers are the device's own."""
    after = [
        run(saved, 2, str(tmp_path / name), 3)
        for name, run in (("cpu", run_ranks), ("device", instead_of_cpu))
    ]
    assert same([after[0][0], after[1][0]]) == []
    files = sorted(path.name for path in (tmp_path / "cpu/export").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "device/export").iterdir())
    for name in files:
        assert (tmp_path / "cpu/export" / name).read_bytes() == (
            tmp_path / "device/export" / name
        ).read_bytes()
    assert instead_of_cpu(resumed, 2, str(tmp_path / "device"), 2)[0][1] == []
    moved = "random numbers: of a {} -> of a {} (what a model draws differs from here on)"
    loaded = []
    for folder, run, world, expected in (
        ("cpu", instead_of_cpu, 2, moved.format("CPU", "GPU")),
        ("device", run_ranks, 2, moved.format("GPU", "CPU")),
        ("device", run_ranks, 1, "random numbers: of 2 ranks -> as they are"),
    ):
        found, notes = run(resumed, world, str(tmp_path / folder), 2)[0]
        assert notes == [expected]
        loaded.append(found)
    assert same(loaded) == []


@pytest.mark.slow
def test_the_command_trains_the_same_model(tmp_path: Path) -> None:
    """Two ranks that `zerodrift train` starts, with dropout, without and with the device."""
    file, found = str(job(tmp_path, "dropping", steps=4)), []
    for name, variables in {"cpu": dict(os.environ), "device": environment()}.items():
        asked = [f"run.folder={tmp_path / name}", "run.checkpoint_every=2"]
        words = [word for each in asked for word in ("--set", each)]
        command = [sys.executable, "-m", "zerodrift", "train", file, "--nproc", "2", *words]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = read(tmp_path / name / "metrics.jsonl")
        assert (lines[0].get("device") == "the stand-in device") is (name == "device")
        losses = [line["loss"] for line in lines if line["kind"] == "step"]
        found.append((losses, (tmp_path / name / "export/model.safetensors").read_bytes()))
    assert len(found[0][0]) == 4 and found[0] == found[1]
