"""Checkpoints and weights with `backend: fsdp2`: saved by one backend, resumed by the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.checkpoint_files import misplaced_chunks
from tests.numerics.networks import GPT
from tests.numerics.runs import config, make, train
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift import empty
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.weights.exporter import export
from zerodrift.weights.load import load_weights

SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}


def config_of(backend: str, **rest: Any) -> dict[str, Any]:
    precision = {"storage": "fp32", "rules": [{"match": "*.router.*", "pin": "fp32"}]}
    return config(3, "bf16", 2, backend=backend, precision=precision, **rest)


def saved(backend: str, folder: str, rest: dict[str, Any]) -> list[float]:
    engine = make(config_of(backend, **rest), GPT(layers=1, moe=True))
    train(engine, 2, 2)
    Checkpoints(engine, folder).save()
    masters = {row.name: engine.parameter(row.name).master for row in engine.plan.rows}
    if engine.mesh.rank() == 0:
        torch.save(masters, f"{folder}.masters")
    losses = train(engine, 2, 2).losses
    engine.destroy()
    return losses


def resumed(backend: str, folder: str, rest: dict[str, Any]) -> list[float]:
    engine = make(config_of(backend, **rest), GPT(layers=1, moe=True, seed=5))
    assert Checkpoints(engine, folder).load().step == 2
    assert engine.global_steps == 2
    losses = train(engine, 2, 2).losses
    engine.destroy()
    return losses


@pytest.mark.cells(1)
@pytest.mark.parametrize("rest", [{}, {"optimizer": SGD}], ids=["AdamW", "SGD"])
@pytest.mark.parametrize(("first", "second"), [("native", "fsdp2"), ("fsdp2", "native"), ("fsdp2", "fsdp2")])
def test_a_run_goes_on_with_the_other_backend(
    first: str, second: str, rest: dict[str, Any], tmp_path: Path
) -> None:
    straight = run_ranks(saved, 2, first, str(tmp_path), rest)
    assert misplaced_chunks(tmp_path / "step-00000002") == []
    assert run_ranks(resumed, 2, second, str(tmp_path), rest) == straight


def spread(folder: str) -> None:
    """Load on twice as many ranks, as two replicas, and at stage 1."""
    for rest in ({"sharding": {"replicate": 2}}, {"zero_optimization": {"stage": 1}}):
        engine = make({**config_of("fsdp2"), **rest}, GPT(layers=1, moe=True, seed=5))
        Checkpoints(engine, folder).load()
        require_masters(engine, torch.load(f"{folder}.masters"))
        assert engine.parameter("embed.weight").state["exp_avg_sq"].gt(0).any()
        train(engine, 1, 2)
        engine.destroy()


def test_on_other_ranks(tmp_path: Path) -> None:
    run_ranks(saved, 2, "native", str(tmp_path), {})
    run_ranks(spread, 4, str(tmp_path))


def require_masters(engine: Any, expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(engine.parameter(name).master, value.detach()), name


@on_ranks(2)
def test_weights_stream_into_shards(tmp_path: Path) -> None:
    source = GPT(layers=1, moe=True, seed=3)
    expected, file = dict(source.named_parameters()), tmp_path / "model.safetensors"
    if torch.distributed.get_rank() == 0:
        save_file({name: value.detach() for name, value in expected.items()} | {"scale": source.scale}, file)
    torch.distributed.barrier()
    with empty():
        model = GPT(layers=1, moe=True)
    engine = make(config_of("fsdp2"), model, weights=str(file))
    require_masters(engine, expected)
    train(engine, 1, 2)
    load_weights(engine, str(file), quiet=True)
    require_masters(engine, expected)
    assert engine.parameter("embed.weight").state["exp_avg_sq"].gt(0).any()


@on_ranks(2)
def test_an_empty_model_gets_its_first_values() -> None:
    """A model without memory gets the initial values of its own modules on either backend."""
    found = []
    for backend in ("native", "fsdp2"):
        torch.manual_seed(4)
        with empty():
            model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3))
        engine = make(config(3, "fp32", backend=backend), model)
        found.append({row.name: engine.parameter(row.name).master for row in engine.plan.rows})
        engine.destroy()
    native, fsdp2 = found
    assert all(torch.equal(native[name], fsdp2[name]) for name in native)
    assert any(value.abs().sum() > 0 for value in native.values())


@on_ranks(2)
def test_an_export_has_the_bytes_of_the_native_backends(tmp_path: Path) -> None:
    for backend in ("native", "fsdp2"):
        engine = make(config_of(backend), GPT(layers=1, moe=True))
        train(engine, 2, 2)
        export(engine, str(tmp_path / backend))
        engine.destroy()
    torch.distributed.barrier()
    first, second = (tmp_path / backend / "model.safetensors" for backend in ("native", "fsdp2"))
    assert first.read_bytes() == second.read_bytes()
