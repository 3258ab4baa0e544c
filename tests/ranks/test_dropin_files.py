"""The drop-in loads checkpoints of DeepSpeed, without frozen parameters, and of models that differ."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import zerodrift.deepspeed as deepspeed
from tests.numerics.networks import batch
from tests.ranks.harness import run_ranks
from tests.ranks.saved_by_deepspeed import BETAS, EPS, LR, STEPS, Case, Truth, groups, model, save
from zerodrift.errors import CheckpointError

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, which is not installed"
)

MORE = 3
NEAR = 2e-6
"""Tolerance of losses, as in `test_deepspeed_resume.py`: a few ulps of fp32 at 4 in every step."""


def engine_for(case: Case, stage: int, zero: bool = True) -> Any:
    """Make the engine of `saved_by_deepspeed`, with other values."""
    made = model(case)
    if zero:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()  # what is not loaded would be seen
    optimizer = torch.optim.AdamW(groups(made, case), lr=LR, betas=BETAS, eps=EPS)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0 if case.hard else 0.0,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine, *_ = deepspeed.initialize(model=made, optimizer=optimizer, config=config, lr_scheduler=schedule)
    return engine


def step(engine: Any, number: int) -> float:
    loss = engine(batch(number, engine.global_rank))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def save_all(root: str) -> list[Truth]:
    return [save(case, f"{root}/{number}", after=MORE) for number, case in enumerate(CASES)]


def go_on(root: str, number: int, stage: int) -> dict[str, Any]:
    folder = f"{root}/{number}"
    engine = engine_for(CASES[number], stage)
    path, client = engine.load_checkpoint(folder)
    told = {"path": path, "client": client, "steps": engine.global_steps, "samples": engine.global_samples}
    told["losses"] = [step(engine, STEPS + more) for more in range(MORE)]
    tag = f"later-{stage}"
    engine.save_checkpoint(folder, tag, client_state={"epoch": 8})
    told["after"] = step(engine, STEPS + MORE)
    assert engine.load_checkpoint(folder) == (str(Path(folder) / tag), {"epoch": 8})
    told["again"] = step(engine, STEPS + MORE)
    back = engine.load_checkpoint(folder, f"global_step{STEPS}", load_optimizer_states=False)
    told["back"] = (back[1], step(engine, STEPS))
    engine.destroy()
    return told


CASES = [Case(2, "fp32"), Case(3, "fp32"), Case(1, "bf16")]


@needs_deepspeed
def test_what_deepspeed_saved_is_loaded_and_goes_on(tmp_path: Path) -> None:
    truths = run_ranks(save_all, 2, str(tmp_path), timeout=120)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pt")}
    for number, case in enumerate(CASES):
        found = run_ranks(go_on, 2, str(tmp_path), number, 3 if case.stage == 2 else case.stage, timeout=60)
        for rank, told in enumerate(found):
            assert told["path"] == str(tmp_path / str(number) / f"global_step{STEPS}")
            assert told["client"] == {"epoch": 7, "note": "hello"}
            assert told["steps"] == STEPS and told["samples"] == STEPS * 4
            near = NEAR if case.dtype == "fp32" else 0.05
            assert told["losses"] == pytest.approx(truths[rank][number].losses, abs=near), case.name
            assert told["again"] == told["after"]
            client, loss = told["back"]
            assert client == {"epoch": 7, "note": "hello"}
            assert loss == pytest.approx(truths[rank][number].losses[0], abs=near)
    assert not list(tmp_path.rglob(".zerodrift-*")), "nothing stays beside it"
    assert {path: path.read_bytes() for path in before} == before, "and what was saved is as it was"


def without_frozen(root: str) -> None:
    case = Case(3, "bf16")
    engine = engine_for(case, 3, zero=False)
    frozen = [name for name, p in model(case).named_parameters() if not p.requires_grad]
    assert len(frozen) == 2
    step(engine, 0)
    engine.save_checkpoint(root, "lean", exclude_frozen_parameters=True)
    engine.save_checkpoint(root, "whole", save_latest=False)
    expected = [step(engine, 1), step(engine, 2)]
    masters = {name: engine.running.parameter(name).master for name in ("embed.weight", *frozen)}
    with pytest.raises(CheckpointError, match=r"must hold every parameter of the model.*norm1.weight"):
        engine.load_checkpoint(root, "lean")
    path, _ = engine.load_checkpoint(root, "lean", load_module_strict=False)
    assert path == str(Path(root) / "lean")
    assert [step(engine, 1), step(engine, 2)] == expected
    engine.load_checkpoint(root, "whole")
    assert [step(engine, 1), step(engine, 2)] == expected
    engine.destroy()

    other = engine_for(case, 2)
    other.load_checkpoint(root, "lean", load_module_strict=False)
    for name in frozen:
        assert not other.running.parameter(name).master.any(), "left as it was"
    assert torch.equal(other.running.parameter("embed.weight").master, masters["embed.weight"]) is False
    with other.running.gathered(write=True) as values:
        for name in frozen:
            values[name].copy_(masters[name])
    assert [step(other, 1), step(other, 2)] == pytest.approx(expected, abs=2e-2)
    other.destroy()


def test_frozen_parameters_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    run_ranks(without_frozen, 2, str(tmp_path))
    lean, whole = (
        sum(path.stat().st_size for path in (tmp_path / tag).glob("*.distcp")) for tag in ("lean", "whole")
    )
    assert whole - lean > 33 * 66 * 2


class Headed(torch.nn.Module):
    def __init__(self, name: str, width: int = 1) -> None:
        super().__init__()
        torch.manual_seed(len(name))
        self.body = torch.nn.Linear(8, 8)
        self.add_module(name, torch.nn.Linear(8, width))
        self.register_buffer(f"of_{name}", torch.ones(2))
        self._head = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self._head)(self.body(x)).square().mean()


def headed(name: str, width: int = 1) -> Any:
    adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": adamw, "zero_optimization": {"stage": 2}}
    return deepspeed.initialize(model=Headed(name, width), config=config)[0]


def another_head(root: str) -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    engine = headed("old")
    engine.backward(engine(x))
    engine.step()
    engine.save_checkpoint(root)
    trained = engine.running.parameter("body.weight")
    body, moments = trained.master, dict(trained.state)
    engine.destroy()

    engine = headed("fresh")
    fresh = engine.running.parameter("fresh.weight").master
    with pytest.raises(CheckpointError, match=r"`fresh.weight`"):
        engine.load_checkpoint(root)
    assert not torch.equal(engine.running.parameter("body.weight").master, body)
    engine.load_checkpoint(root, load_module_strict=False)
    loaded, own = (engine.running.parameter(name) for name in ("body.weight", "fresh.weight"))
    assert torch.equal(loaded.master, body) and torch.equal(loaded.state["exp_avg"], moments["exp_avg"])
    assert torch.equal(own.master, fresh) and not own.state["exp_avg"].any()
    engine.backward(engine(x))
    engine.step()
    assert not torch.equal(engine.running.parameter("fresh.weight").master, fresh)
    engine.destroy()

    engine = headed("old", width=3)
    with pytest.raises(CheckpointError, match=r"`old.weight`: must have shape \[3, 8\]"):
        engine.load_checkpoint(root, load_module_strict=False)
    engine.destroy()


def test_a_model_with_another_head(tmp_path: Path) -> None:
    run_ranks(another_head, 2, str(tmp_path))
