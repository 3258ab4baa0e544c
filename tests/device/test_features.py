"""Features of the engine on the stand-in device: the bits of the CPU, in every order of streams.

The functions are those that other tests run on the CPU. Here they get the device in its place.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zerodrift as zd
from tests.check import loops
from tests.check.tiny import Dense
from tests.device.build import needs_device
from tests.device.plugin import ROOT, environment
from tests.device.ranks import instead_of_cpu
from tests.device.standin import ORDERS, Order
from tests.e2e.jobs import job
from tests.numerics import experts, test_experts, test_offload, test_order, test_pipelines
from tests.numerics.networks import GPT
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
}


def train_model(stage: int, mode: str, micro_batches: int, model: str, rest: dict[str, Any]) -> Run:
    return train(make(config(stage, mode, micro_batches, **rest), MODELS[model]()), STEPS, micro_batches)


def by_fully_shard(stage: int, mode: str) -> Run:
    written = config(stage, mode, 2, backend="fsdp2", precision={"storage": "fp32"})
    return train(make(written, MODELS["dense"]()), STEPS, 2)


def on_ranks_of_experts(stage: int) -> Run:
    """Send tokens to the ranks of their experts, in unequal numbers."""
    engine = test_experts.engine_of(test_experts.config(stage, "ep2"), skew=(2, 0, 0, -2))
    return train(engine, STEPS, test_experts.MICRO, data=experts.batch)


def summed_by_the_tree(stage: int, when: str, model: str) -> list[Any]:
    return list(test_order.train_cell(test_order.Cell(stage, when, model=model)))


def watched() -> list[Any]:
    """Return what was seen of gradients, with lines: a device runs the backward in a thread of its own."""
    seen = loops.made(Dense).process.models[0].parameters
    return [record.cells[column] for record in seen for column in ("grad", "accumulate")]


FEATURES: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
    "stage 0": (2, train_model, (0, "bf16", 1, "experts", {})),
    "fp16, pins and accumulation": (2, train_model, (2, "fp16", 2, "experts", {**FP16, **PINS})),
    "offload": (2, test_offload.run, (3, "cpu", {}, True)),
    "tree": (2, summed_by_the_tree, (3, "every", "dense")),
    "narrow columns": (2, train_model, (3, "bf16", 2, "dense", NARROW)),
    "replicas": (4, train_model, (3, "fp32", 1, "dense", {"sharding": {"replicate": 2}})),
    "ranks of experts": (2, on_ranks_of_experts, (3,)),
    "fully_shard": (2, by_fully_shard, (3, "bf16")),
    "watched": (1, watched, ()),
    "zbv": (2, test_pipelines.train_stages, (0, "zbv", "queue")),
}


@pytest.mark.parametrize(("feature", "order"), list(zip(FEATURES, itertools.cycle(ORDERS), strict=False)))
def test_features_have_the_bits_of_the_cpu(feature: str, order: Order) -> None:
    """`test_suite.py` runs more of them, each on the device alone."""
    world, function, args = FEATURES[feature]
    expected = run_ranks(function, world, *args)
    found = instead_of_cpu(function, world, *args, order=order)
    if isinstance(expected[0], Run):
        assert [same(pair) for pair in zip(expected, found, strict=True)] == [[]] * world
    else:
        assert found == expected


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
    moved = "random numbers: of a {} -> of a {} (random numbers differ from this step on)"
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
