"""Frozen parameters that rest in a narrow format: nothing but the format rounds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.numerics.networks import GPT
from tests.numerics.runs import Run, config, make, masters, require_alike, train
from tests.ranks.harness import on_ranks, run_ranks
from tests.unit.models import at, parameter, plan
from zerodrift import ConfigError
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.dtypes import ADMITTED, SHORT, DType
from zerodrift.engine.digest import Digest
from zerodrift.engine.engine import Engine
from zerodrift.kernels import narrow
from zerodrift.model.spec import ModelSpec

FORMATS = {next((word for word in SHORT if SHORT[word] is d), str(d)): d for d in ADMITTED["frozen"]}


def adapted(decoded: DType | None = None) -> GPT:
    """A GPT with frozen linear layers, which hold what a format leaves of them if one is named."""
    torch.manual_seed(0)
    model = GPT(moe=True)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "head":
            module.weight.requires_grad_(False)
            if decoded is not None:
                module.weight.copy_(narrow.round_trip(decoded, module.weight))
    return model


def run(stage: int, mode: str, frozen: str | None, decoded: DType | None = None) -> Run:
    written = config(stage, mode, 2, precision={"frozen": frozen})
    return train(make(written, adapted(decoded)), 3, 2)


@pytest.mark.cells(1)
@pytest.mark.parametrize("frozen", FORMATS)
@pytest.mark.parametrize("mode", ["bf16", "autocast-bf16", "fp32"])
@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks("world", timeout=200)
def test_a_run_has_the_bits_of_one_on_decoded_values_at_every_stage(
    world: int, mode: str, frozen: str
) -> None:
    for stage in range(4):
        plain = run(stage, mode, None, FORMATS[frozen])
        require_alike(run(stage, mode, frozen), plain)
    assert run(0, mode, None).losses != plain.losses


def engine_of(stage: int, frozen: str | None, moved: bool = False) -> Engine:
    """An engine on a base that is the same, or another one."""
    model = adapted()
    if moved:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.37)
    return make(config(stage, "bf16", precision={"frozen": frozen, "storage": "fp32"}), model)


def saved_by(folder: Path, stage: int, frozen: str) -> tuple[dict[str, torch.Tensor], Digest]:
    engine = engine_of(stage, frozen)
    train(engine, 2)
    Checkpoints(engine, folder, quiet=True).save()
    return masters(engine), engine.digest()


def resumed_by(folder: Path, stage: int, frozen: str | None) -> tuple[dict[str, torch.Tensor], Digest]:
    engine = engine_of(stage, frozen, moved=True)
    Checkpoints(engine, folder, quiet=True).resume()
    return masters(engine), engine.digest()


@pytest.mark.parametrize(("frozen", "first", "world"), [("fp8", 3, 2), ("nf4", 0, 4), ("mxfp4", 3, 1)])
def test_a_checkpoint_holds_the_blocks_whatever_stage_and_ranks_load_it(
    frozen: str, first: int, world: int, tmp_path: Path
) -> None:
    (expected, digest), *_ = run_ranks(saved_by, world, tmp_path, first, frozen)
    for stage, ranks in ((0, 1), (3, 1), (2, 2), (3, 4)):
        found, other = run_ranks(resumed_by, ranks, tmp_path, stage, frozen)[0]
        require_alike(found, expected)
        assert str(other) == str(digest)
    plain, _ = run_ranks(resumed_by, 2, tmp_path, 3, None)[0]
    require_alike(plain, expected)
    again, _ = run_ranks(resumed_by, 2, tmp_path, 3, "int8")[0]
    assert all(torch.allclose(again[name], expected[name], atol=0.03) for name in expected)


@on_ranks(2)
def test_a_write_encodes_the_blocks_that_it_changes(tmp_path: Path) -> None:
    for stage in (0, 3):
        engine = engine_of(stage, "fp8")
        name = "layers.0.attention.qkv.weight"
        before = engine.parameter(name).master
        with engine.gathered(write=True) as values:
            values[name].view(-1)[300] = 7.0
        after = engine.parameter(name).master
        differs = (after != before).view(-1, 128).any(1).nonzero().view(-1).tolist()
        assert differs == [300 // 128] and abs(after.view(-1)[300].item() - 7) < 0.25
        engine.destroy()


def test_experts_of_a_rank_must_fill_blocks() -> None:
    stack = parameter("layers.0.experts.up", (4, 7, 16), trained=False)
    model = ModelSpec("stacks", (stack, parameter("head.weight", (8, 8))))
    written = {**at(3, frozen="nf4"), "experts": {"ranks": 2}}
    with pytest.raises(ConfigError, match="must have blocks of 64 that the experts of a rank fill"):
        plan(written, model)
    assert plan(written, replace(model, parameters=(replace(stack, shape=(4, 8, 16)), model.parameters[1])))
