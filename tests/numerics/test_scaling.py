"""The loss scale, the norm and the skip: against DeepSpeed's rule written down by hand, and on real ranks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.runs import make
from tests.ranks.harness import run_ranks
from zerodrift.engine.progress import Scaler
from zerodrift.engine.step.norm import Norm
from zerodrift.errors import NonFiniteError
from zerodrift.policy.nouns import LossScale

STAGES = (0, 1, 2, 3)


# --- the rule -----------------------------------------------------------------------------------------------


@dataclass
class ByHand:
    """The dynamic scale of DeepSpeed 0.19.6: it remembers the step of the last overflow."""

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


@pytest.mark.parametrize("seed", range(40))
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


def test_a_static_scale_and_none_never_move() -> None:
    fixed = Scaler(LossScale(False, 128.0, 1, 1, False, 1.0))
    absent = Scaler(None)
    for overflow in (True, False, True, True, False):
        fixed.update(overflow)
        absent.update(overflow)
    assert (fixed.scale, fixed.active, absent.scale, absent.active) == (128.0, True, 1.0, False)


def test_the_multiplier_is_unscaling_and_clipping_at_once() -> None:
    assert Norm(0.5).multiplier(1 / 1024, 1.0) == 1 / 1024
    assert Norm(4.0).multiplier(1 / 1024, 0.0) == 1 / 1024
    # torch's clip_grad_norm_ divides by the norm plus 1e-6.
    assert Norm(4.0).multiplier(1 / 1024, 1.0) == 1 / 1024 * (1.0 / (4.0 + 1e-6))
    assert not Norm(math.inf).finite and not Norm(math.nan).finite


# --- on ranks -----------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two weights whose gradients are the inputs given for them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(300, 1, bias=False), nn.Linear(300, 1, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.first(x).float() + self.second(y).float()).sum()


def written(stage: int, mode: str, **rest: Any) -> dict[str, Any]:
    return {
        "precision": {"mode": mode},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "fp16": {"initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 10}},
        **rest,
    }


def everything(engine: Any) -> list[torch.Tensor]:
    values = [engine.parameter(name).master for name in NAMES]
    return values + [tensor for name in NAMES for _, tensor in sorted(engine.parameter(name).state.items())]


NAMES = ("first.weight", "second.weight")


def skipping(mode: str) -> list[Any]:
    """A good step, an overflow on one rank in one weight, and another good step."""
    found = []
    for stage in STAGES:
        engine = make(written(stage, mode), Two())
        x, bad = torch.full((1, 300), 0.01), torch.full((1, 300), 0.01)
        bad[0, 299] = math.inf
        engine.backward(engine(x, x))
        engine.step()
        before, rate = everything(engine), engine.updater.learning_rates()
        steps = engine.schedule.last_batch_iteration
        engine.backward(engine(x, bad if engine.mesh.rank() == engine.mesh.size("data") - 1 else x))
        result = engine.step()
        after = everything(engine)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "weights and moments stay"
        assert (engine.updater.learning_rates(), engine.schedule.last_batch_iteration) == (rate, steps)
        assert not result.updated and result.skipped and result.bad == ("second.weight",)
        assert result.grad_norm is not None and not math.isfinite(result.grad_norm)
        engine.backward(engine(x, x))
        last = engine.step()
        assert last.updated and (engine.global_steps, engine.skipped_steps) == (2, 1)
        found.append((last.grad_norm, last.loss_scale, [value.sum().item() for value in everything(engine)]))
        engine.destroy()
    return found


MODES = ("fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16")


def all_skipping() -> dict[str, list[Any]]:
    return {mode: skipping(mode) for mode in MODES}


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_that_is_not_finite_changes_nothing_in_any_mode_or_stage(world: int) -> None:
    ranks = run_ranks(all_skipping, world)
    for found in ranks:
        assert found == ranks[0], "ranks skip together"
        for mode, stages in found.items():
            assert all(stage == stages[0] for stage in stages), f"{mode}: the same at every stage"
            assert stages[0][1] == (256.0 if mode.endswith("fp16") else 1.0), "hysteresis takes the first"


def raising() -> list[str]:
    said = []
    for mode in MODES:
        engine = make(written(3, mode), Two())
        x = torch.full((1, 300), math.nan)
        engine.backward(engine(torch.ones(1, 300), x))
        with pytest.raises(NonFiniteError) as caught:
            engine.step(error_if_nonfinite=True)
        said.append(str(caught.value))
        engine.backward(engine(torch.ones(1, 300), torch.ones(1, 300)))
        assert engine.step().updated
        engine.destroy()
    return said


def test_an_error_instead_names_the_parameter_and_leaves_the_engine_usable() -> None:
    for said in run_ranks(raising, 2):
        assert all("`gradient`: must be finite" in text and "second.weight" in text for text in said)


def unscaled(mode: str, scale: float) -> list[Any]:
    """Norm, gradient and clipped update of a run with a loss scale."""
    found = []
    for stage in STAGES:
        sgd = {"type": "SGD", "params": {"lr": 1.0}}
        # A scale of 1 is a static one too.
        config = written(stage, mode, fp16={"loss_scale": scale}, optimizer=sgd, gradient_clipping=0.5)
        del config["scheduler"]
        engine = make(config, Two())
        before = engine.parameter(NAMES[0]).master
        x = torch.full((1, 300), 2.0**-5)
        loss = engine(x, torch.zeros(1, 300))
        engine.backward(loss)
        gradient = engine.parameter(NAMES[0]).gradient
        result = engine.step()
        moved = before - engine.parameter(NAMES[0]).master
        found.append((result.grad_norm, gradient.unique().tolist(), moved.norm().item(), loss.item()))
        engine.destroy()
    return found


@pytest.mark.parametrize("mode", ["fp16", "autocast-fp16"])
def test_norm_clip_and_gradient_are_of_the_unscaled_loss(mode: str) -> None:
    """Every scale that is a power of two gives the same bits, at every stage."""
    (plain, _), (scaled, _) = run_ranks(unscaled, 2, mode, 1.0), run_ranks(unscaled, 2, mode, 4096.0)
    assert plain == scaled
    for norm, gradient, moved, _ in scaled:
        assert gradient == [2.0**-5]
        assert norm == pytest.approx(2.0**-5 * math.sqrt(300), rel=1e-12)
        # Clipped from 0.54 to 0.5; the sum of 300 fp32 weights' rounding is below 1e-5 of it.
        assert moved == pytest.approx(0.5, rel=1e-5)
