"""The loss scale, the norm and skipped steps follow DeepSpeed's rule, also on real ranks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.runs import make, require_alike, whole_values
from tests.ranks.harness import on_ranks
from zerodrift.engine.engine import Engine
from zerodrift.engine.progress import Scaler
from zerodrift.errors import NonFiniteError
from zerodrift.optim import learning_rates
from zerodrift.policy.decisions import LossScale

STAGES = (0, 1, 2, 3)


@dataclass
class ByHand:
    """The dynamic scale of DeepSpeed 0.19.6, with the step of the last overflow."""

    spec: LossScale
    scale: float
    patience: int
    step: int = 0
    last: int = -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.patience == 1:
                if self.scale == self.spec.minimum:
                    raise OverflowError
                self.scale = max(self.scale / 2, self.spec.minimum)
            else:
                self.patience -= 1
            self.last = self.step
        else:
            if self.spec.consecutive:
                self.patience = self.spec.hysteresis
            stable = self.step - self.last - 1
            if stable > 0 and stable % self.spec.window == 0:
                self.patience = self.spec.hysteresis
                self.scale *= 2
        self.step += 1


@pytest.mark.parametrize("seed", range(20))
def test_the_dynamic_scale_is_deepspeeds_over_any_sequence_of_overflows(seed: int) -> None:
    chance = random.Random(seed)
    spec = LossScale(
        dynamic=True,
        initial=2.0 ** chance.randint(0, 16),
        window=chance.choice([1, 2, 3, 7, 20]),
        hysteresis=chance.randint(1, 4),
        consecutive=chance.random() < 0.5,
        minimum=chance.choice([0.25, 1.0, 3.0]),
    )
    spec = spec if spec.initial > spec.minimum else LossScale(True, 4.0, 2, 2, False, 1.0)
    ours, theirs = Scaler(spec), ByHand(spec, spec.initial, spec.hysteresis)
    rate = chance.choice([0.05, 0.3, 0.6])
    for number in range(400):
        overflow = chance.random() < rate
        try:
            theirs.update(overflow)
        except OverflowError:
            with pytest.raises(NonFiniteError, match="min_loss_scale"):
                ours.update(overflow)
            return
        ours.update(overflow)
        assert ours.scale == theirs.scale, f"after step {number}"
        if number % 37 == 0:
            ours, held = Scaler(spec), ours.state_dict()
            ours.load_state_dict(held)


class Two(nn.Module):
    """A model of two weights whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(300, 1, bias=False), nn.Linear(300, 1, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.first(x).float() + self.second(y).float()).sum()


MODES = ("fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16")


def engine_of(stage: int, mode: str, hysteresis: int, **rest: Any) -> Engine:
    written = {
        **rest,
        "precision": {"mode": mode},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "fp16": {"initial_scale_power": 8, "hysteresis": hysteresis, "loss_scale_window": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 10}},
    }
    return make(written, Two())


def everything(engine: Engine) -> dict[str, torch.Tensor]:
    return {
        f"{kind} {name}": value for kind, of in whole_values(engine).items() for name, value in of.items()
    }


def inputs(value: float = 0.01, place: int = 0) -> torch.Tensor:
    x = torch.full((1, 300), 0.01)
    x[0, place] = value
    return x


def skip_once(engine: Engine, value: float, place: int) -> tuple[Any, ...]:
    """Run a good step, one with a non-finite gradient in one element on one rank, and another good step."""
    x = inputs()
    engine.backward(engine(x, x))
    engine.step()
    before, rate = everything(engine), learning_rates(engine.updater)
    steps = engine.schedule.last_batch_iteration
    last = engine.mesh.rank() == engine.mesh.size("data") - 1
    engine.backward(engine(x, inputs(value, place) if last else x))
    result = engine.step()
    require_alike(before, everything(engine))
    assert (learning_rates(engine.updater), engine.schedule.last_batch_iteration) == (rate, steps)
    assert not result.updated and result.skipped and result.bad == ("second.weight",), result
    assert result.grad_norm is not None and not math.isfinite(result.grad_norm)
    engine.backward(engine(x, x))
    result = engine.step()
    assert result.updated and (engine.global_steps, engine.skipped_steps) == (2, 1), result
    return result.grad_norm, result.loss_scale, {key: v.sum().item() for key, v in everything(engine).items()}


@pytest.mark.long
@pytest.mark.cells(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("world", "hysteresis", "value", "place", "scale"),
    [(1, 2, math.inf, 299, 256.0), (2, 2, math.inf, 299, 256.0), (2, 1, math.nan, 3, 128.0)],
    ids=["alone", "patient", "at once"],
)
@on_ranks("world")
def test_a_gradient_that_is_not_finite_changes_nothing_in_any_mode_or_stage(
    world: int, hysteresis: int, value: float, place: int, scale: float, mode: str
) -> None:
    """DeepSpeed skips on one rank, steps on the other, and their scales differ; outside of fp16 it
    updates. The place is in the first slice or the last; the scale is that of fp16 afterwards."""
    found = []
    for stage in STAGES:
        engine = engine_of(stage, mode, hysteresis)
        found += engine.comm.all_gather_object(skip_once(engine, value, place))
    assert found == [found[0]] * world * len(STAGES), "the same on every rank and at every stage"
    assert found[0][1] == (scale if mode.endswith("fp16") else 1.0), found[0]


@on_ranks(2)
def test_an_error_instead_names_the_parameter_and_leaves_the_engine_usable() -> None:
    """An argument of the step asks for it, or a key."""
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        *((mode, {}, {"error_if_nonfinite": True}) for mode in MODES),
        ("bf16", {"bf16": {"check_grad_overflow": False}}, {}),
    ]
    for mode, keys, asked in cases:
        engine = engine_of(3, mode, 2, **keys)
        before = everything(engine)
        engine.backward(engine(torch.ones(1, 300), inputs(math.nan)))
        with pytest.raises(NonFiniteError, match=r"`gradient`: must be finite.*second\.weight"):
            engine.step(**asked)
        require_alike(before, everything(engine))
        engine.backward(engine(torch.ones(1, 300), torch.ones(1, 300)))
        assert engine.step().updated
