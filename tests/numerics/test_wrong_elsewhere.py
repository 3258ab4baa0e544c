"""What other engines get wrong without a word, each with the numbers that were measured there.

The probe is one weight whose gradient is the model's input, so every sum and every rounding on the way to
the update shows as a number that can be worked out by hand. `2048 + 3 x 0.5 = 2049.5` over micro-batches
is 2048 as soon as it passes through 16 bits, `2048 + 1 = 2049` over two ranks too. The numbers in comments
marked "elsewhere" are DeepSpeed 0.19.6's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import make, unlike, whole_values
from tests.ranks.harness import run_ranks
from zerodrift.engine.engine import Engine
from zerodrift.errors import ConfigError, NonFiniteError

STAGES = (0, 1, 2, 3)
MODES = ("fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16")

Written = dict[str, Any]


class Probe(nn.Module):
    """One weight, zeros, whose gradient is `factor` times the input."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return (self.linear(x).float() * factor).sum()


NAME = "linear.weight"


def written(stage: int, mode: str, **rest: Any) -> Written:
    """A config of the probe: SGD with a learning rate of 1, so that the weight is minus the gradient."""
    precision = {"mode": mode, **rest.pop("precision", {})}
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    base: Written = {"precision": precision, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}
    if mode.endswith("fp16"):
        base["fp16"] = {"loss_scale": 8}
    return {**base, "optimizer": sgd, **rest}


def row(value: float, width: int = 8) -> torch.Tensor:
    return torch.full((1, width), value)


def weight(engine: Engine) -> list[float]:
    return engine.parameter(NAME).master.flatten().tolist()


def updated(engine: Engine, gradients: Sequence[float]) -> list[float]:
    """One optimizer step from micro-batches with these gradients; minus the weights afterwards."""
    for gradient in gradients:
        engine.backward(engine(row(gradient)))
        result = engine.step()
    assert result.updated
    return [-each for each in weight(engine)]


def at_stages(
    look: Callable[[Engine], Any],
    mode: str,
    rest: Written | None = None,
    model: Callable[[], nn.Module] = Probe,
    stages: Sequence[int] = STAGES,
) -> list[Any]:
    """On a rank: what is found in an engine of each stage."""
    found = []
    for stage in stages:
        engine = make(written(stage, mode, **(rest or {})), model())
        found.append(look(engine))
        engine.destroy()
    return found


# --- accumulation and the mean over ranks ---------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A mode and an accumulation dtype; whether the probe keeps all bits in it."""

    mode: str
    accumulate: str | None
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.mode}+{self.accumulate or 'default'}"


PAIRS = [
    Pair("fp32", None),
    Pair("fp32", "bf16", False),
    Pair("fp32", "fp16", False),
    Pair("bf16", None),
    Pair("bf16", "fp32"),
    Pair("bf16", "bf16", False),
    Pair("fp16", None),
    Pair("fp16", "fp32"),
    Pair("fp16", "fp16", False),
    Pair("fp16", "bf16", False),
    Pair("autocast-bf16", None),
    Pair("autocast-bf16", "fp32"),
    Pair("autocast-bf16", "bf16", False),
    Pair("autocast-fp16", None),
    Pair("autocast-fp16", "fp32"),
    Pair("autocast-fp16", "fp16", False),
]


def sums(engine: Engine) -> tuple[list[float], list[float]]:
    """What micro-batches add up to, and what ranks add up to."""
    micro = [4 * value for value in updated(engine, [2048.0, 0.5, 0.5, 0.5])]
    engine.parameter(NAME).master = torch.zeros(1, 8)
    first = 1.0 if engine.mesh.rank() else 2048.0
    return micro, [8 * value for value in updated(engine, [first, 0.0, 0.0, 0.0])]


def accumulated(pair: Pair, wire: str | None, stages: Sequence[int] = STAGES) -> list[Any]:
    told = {"gradient_accumulation_dtype": pair.accumulate, "communication_data_type": wire}
    more: Written = {key: value for key, value in told.items() if value is not None}
    more |= {"precision": {"allow_narrow": True}, "gradient_accumulation_steps": 4}
    return at_stages(sums, pair.mode, more, stages=stages)


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "others"])
def test_every_accumulation_dtype_is_honoured_at_every_stage_and_keeps_the_mean(half: int) -> None:
    """Elsewhere: ignored at stage 2, refused at stage 0; at stage 1 a dtype other than the model's loses
    the mean, each shard keeping its owner's gradient (4096 and 2 for 2049). The widest wire that the
    accumulator allows, so that its own rounding alone is seen."""
    asked = [(pair, ((0, 3), (1, 2))[(number + half) % 2]) for number, pair in enumerate(PAIRS)]
    for found in run_ranks(all_accumulated, 2, asked, timeout=120):
        for (pair, stages), seen in zip(asked, found, strict=True):
            right = ([2049.5] * 8, [2049.0] * 8) if pair.exact else ([2048.0] * 8, [2048.0] * 8)
            assert seen == [right] * len(stages), (str(pair), stages)


def all_accumulated(asked: Sequence[tuple[Pair, Sequence[int]]]) -> list[list[Any]]:
    return [accumulated(pair, pair.accumulate or "fp32", stages) for pair, stages in asked]


def test_a_16_bit_wire_rounds_once_and_is_summed_in_fp32() -> None:
    """Autocast sends a safe module's gradient in bf16 unless told: 2049.5 becomes 2048 where it is reduced
    once per step, and stays where each micro-batch, exact in bf16, travels by itself."""
    for found in run_ranks(accumulated, 2, Pair("autocast-bf16", None), None):
        for stage, (micro, ranks) in enumerate(found):
            assert micro == [2048.0 if stage < 2 else 2049.5] * 8
            assert ranks == [2049.0] * 8


@pytest.mark.parametrize("mode", ["bf16", "autocast-bf16"])
def test_a_dtype_that_cannot_hold_gradients_is_refused_with_its_reason(mode: str) -> None:
    with pytest.raises(ConfigError, match="fp16 ends at 65504"):
        make(written(1, mode, gradient_accumulation_dtype="fp16"), Probe())


def thirds(engine: Engine) -> list[float]:
    return updated(engine, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("mode", MODES)
def test_the_division_by_micro_batches_comes_after_the_sum(mode: str) -> None:
    """Three gradients of 1 have the mean 1. Elsewhere the loss is divided first: 1.00195 in bf16."""
    for found in run_ranks(at_stages, 2, thirds, mode, {"gradient_accumulation_steps": 3}):
        assert found == [[1.0] * 8] * len(STAGES)


def three_backwards(engine: Engine) -> tuple[list[float], list[float]]:
    """The gradient of three forwards with a backward each, and the weight after one step."""
    for gradient in (1.0, 0.5, 1.5):
        engine.backward(engine(row(gradient)))
    gradients = engine.parameter(NAME).gradient.flatten().tolist()
    engine.step()
    return gradients, weight(engine)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast-fp16"])
def test_several_backwards_before_one_step_add_up(mode: str) -> None:
    """As in a plain loop: 1 + 0.5 + 1.5 = 3. Elsewhere stages 1 and 2 keep only the last."""
    for found in run_ranks(at_stages, 2, three_backwards, mode):
        assert found == [([3.0] * 8, [-3.0] * 8)] * len(STAGES)


# --- fp16 -----------------------------------------------------------------------------------------------


def scaled(engine: Engine) -> tuple[list[float], list[float], float]:
    ones = updated(engine, [1.0])
    engine.parameter(NAME).master = torch.zeros(1, 8)
    engine.backward(engine(row(2.0**-13), 2.0**-13))
    scale = engine.step().loss_scale
    return ones, weight(engine), scale


@pytest.mark.parametrize("mode", ["fp16", "autocast-fp16"])
def test_the_loss_is_scaled_wherever_gradients_are_unscaled(mode: str) -> None:
    """Elsewhere stage 0 never multiplies the loss: the weight is -1/1024 instead of -1. And the scale does
    what it is for: 2^-26, below the smallest fp16 number, arrives."""
    for found in run_ranks(at_stages, 2, scaled, mode, {"fp16": {"loss_scale": 1024}}):
        assert found == [([1.0] * 8, [-(2.0**-26)] * 8, 1024.0)] * len(STAGES)


def wide() -> Probe:
    return Probe(16)


def clipped(engine: Engine) -> tuple[float | None, list[float], float]:
    """16 elements of 1/16: a gradient of norm 0.25."""
    engine.backward(engine(row(1.0, 16), 1 / 16))
    result = engine.step()
    assert engine.grad_norm == result.grad_norm
    return result.grad_norm, weight(engine), result.loss_scale


@pytest.mark.parametrize("mode", MODES)
def test_norm_and_clip_are_of_the_true_gradient_at_every_stage(mode: str) -> None:
    """0.25. Elsewhere autocast-fp16 reports 16384, stage 0 nothing at all; and a clip at 100, which should
    be idle, makes the update 164 times too small."""
    scale = 65536.0 if mode.endswith("fp16") else 1.0
    more: Written = {"fp16": {"initial_scale_power": 16}} if mode.endswith("fp16") else {}
    for found in run_ranks(at_stages, 2, clipped, mode, {"gradient_clipping": 100.0, **more}, wide):
        assert found == [(0.25, [-0.0625] * 16, scale)] * len(STAGES)
    for found in run_ranks(at_stages, 2, clipped, mode, {"gradient_clipping": 0.125, **more}, wide):
        # torch's own formula adds 1e-6 to the norm: 4e-6 of the result.
        assert found[0] == (0.25, pytest.approx([-0.03125] * 16, rel=5e-6), scale)
        assert found == [found[0]] * len(STAGES), "the same bits at every stage"


# --- gradients that are not finite ----------------------------------------------------------------------
# That ranks skip together and share one scale, in every mode and at every stage: `test_scaling.py`.


def checked(check: bool) -> str:
    engine = make(written(3, "bf16", bf16={"check_grad_overflow": check}), Probe())
    engine.backward(engine(row(math.inf)))
    try:
        return f"skipped {engine.step().skipped}"
    except NonFiniteError as error:
        return str(error)
    finally:
        assert engine.parameter(NAME).master.abs().max().item() == 0.0
        engine.destroy()


def test_a_user_who_wants_no_skip_gets_an_error_not_an_update() -> None:
    assert run_ranks(checked, 2, True) == ["skipped True"] * 2
    for told in run_ranks(checked, 2, False):
        assert told.startswith("`gradient`: must be finite; got ") and NAME in told


# --- what an engine starts from -------------------------------------------------------------------------


def seeded() -> GPT:
    return GPT(seed=5)


def as_given(engine: Engine) -> tuple[list[str], torch.dtype]:
    """Parameters whose master has not the bits that the model was given, and what dtype is visible."""
    given = {name: parameter.detach() for name, parameter in seeded().named_parameters()}
    with engine.gathered([NORM]) as values:
        return unlike(given, whole_values(engine)["master"]), values[NORM].dtype


NORM = "norm.weight"
WIDE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize(
    ("mode", "master"),
    [("fp32", None), ("bf16", None), ("bf16", "fp32"), ("fp16", None), ("autocast-bf16", None)],
)
def test_masters_are_made_from_the_bits_that_were_given(mode: str, master: str | None) -> None:
    """Elsewhere from the rounded copy: off by up to 1.9e-3 for weights between -1 and 1."""
    more: Written = {"precision": {"master": master}} if master else {}
    shown = torch.float32 if "autocast" in mode else getattr(torch, WIDE[mode])
    assert run_ranks(at_stages, 2, as_given, mode, more, seeded) == [[([], shown)] * len(STAGES)] * 2


def ones() -> Probe:
    model = Probe()
    nn.init.ones_(model.linear.weight)
    return model


def first_update(engine: Engine) -> Any:
    """AdamW on a weight of 1 with decay: after construction, and after one real step."""
    parameter = engine.parameter(NAME)
    before = set(weight(engine)), dict(parameter.state)
    assert engine.global_steps == 0 and not engine.optimizer.state
    engine.backward(engine(row(0.5)))
    engine.step()
    return before, parameter.master, dict(parameter.state)


@pytest.mark.parametrize("mode", MODES)
def test_the_optimizer_takes_no_step_when_it_is_built(mode: str) -> None:
    """Elsewhere stage 0 in 16 bits steps on zero gradients: the weight starts as 0.999, at step 1."""
    adamw: Written = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}}
    plain = nn.Parameter(torch.ones(1, 8))
    optimizer = torch.optim.AdamW([plain], lr=0.01, weight_decay=0.1)
    plain.grad = torch.full((1, 8), 0.5)
    optimizer.step()
    for found in run_ranks(at_stages, 2, first_update, mode, adamw, ones):
        for (start, states), master, moments in found:
            assert start == {1.0} and not any(value.any() for value in states.values())
            assert torch.equal(master, plain.detach())
            assert unlike(moments, {key: optimizer.state[plain][key] for key in moments}) == []


# --- one engine after another ---------------------------------------------------------------------------


def precision_state() -> dict[str, Any]:
    """Everything global in torch that decides in what precision it computes."""
    matmul = torch.backends.cuda.matmul
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cuda": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "fp32 matmul": torch.get_float32_matmul_precision(),
        "tf32": (matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "reduced sums": (
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
        ),
        "flush denormal": torch.tensor(1e-310, dtype=torch.float64).mul(1.0).item() == 0.0,
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def bf16_run(other: Engine | None = None) -> list[Any]:
    """Losses, norms, scales and wire dtypes of some steps, with another engine stepping in between."""
    engine = make({**written(2, "bf16"), "communication_data_type": "fp32"}, GPT())
    seen: list[Any] = []
    rank = engine.mesh.rank()
    for step in range(3):
        with engine.comm.record() as log:
            loss = engine(batch(step, rank))
            engine.backward(loss)
            if other is not None:
                other.backward(other(batch(step, rank)))
                other.step()
            result = engine.step()
        wires = {str(entry.dtype) for entry in log if entry.op == "reduce_scatter"}
        seen.append((loss.item(), result.grad_norm, result.loss_scale, wires, loss.dtype))
    engine.destroy()
    return seen


def one_after_another() -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    clean = precision_state()
    alone = bf16_run()
    first = make(written(3, "autocast-fp16"), GPT())
    first.backward(first(batch(0)))
    first.step()
    between = precision_state()
    beside = bf16_run(first)
    with pytest.raises(Exception):  # noqa: B017 (whatever torch says of an embedding of floats)
        first(torch.zeros(2, 3))
    assert precision_state() == clean
    first.destroy()
    after = bf16_run()
    assert precision_state() == clean
    return clean, between, [alone, beside, after]


def test_precision_belongs_to_one_engine() -> None:
    """Elsewhere autocast's settings outlive their engine: the next one in bf16 gets a loss scale (a norm of
    185363 for 2.83) and ignores its own wire dtype."""
    for clean, between, (alone, beside, after) in run_ranks(one_after_another, 2):
        assert between == clean
        assert alone == beside == after
        assert all(scale == 1.0 and wires == {"fp32"} for _, _, scale, wires, _ in alone)


# --- models of mixed dtypes, and buffers ----------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen bf16 layer with a low-rank fp32 adapter beside it, as PEFT builds them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).to(torch.bfloat16).requires_grad_(False)
        self.lora_a = nn.Linear(width, 4, bias=False)
        self.lora_b = nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out + self.lora_b(self.lora_a(x.to(self.lora_a.weight.dtype))).to(out.dtype)


class Mixed(nn.Module):
    """Two of them, and a rotary table."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Adapted(width) for _ in range(2))
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(width) / width), persistent=False)
        self.register_buffer("counts", torch.arange(3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            self.seen.append(x.dtype)
        return (x.float() * self.inv_freq).square().mean()


PINNED = {"precision": {"rules": [{"match": "*lora*", "pin": "fp32", "output": "input"}]}}


def adapters(engine: Engine) -> Any:
    model, bases = engine.module, {n: p for n, p in Mixed().named_parameters() if "base" in n}
    kept = {str(engine.plan.row(name).columns.storage.dtype) for name in bases}
    generator = torch.Generator().manual_seed(engine.mesh.rank())
    losses = []
    for _ in range(3):
        loss = engine(torch.randn(4, 16, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with engine.gathered() as values:
        assert unlike(bases, {name: values[name] for name in bases}) == [], "these are frozen"
        shown = {str(value.dtype) for name, value in values.items() if "lora" in name}
        assert "inv_freq" not in model.state_dict()
    assert model.inv_freq.dtype is torch.float32 and torch.equal(model.inv_freq, Mixed().inv_freq)
    assert model.counts.dtype is torch.int64
    return losses, kept, shown, set(model.seen)


ADAPTERS = [
    # What the adapters are when they compute, and what a layer returns.
    ("bf16", False, "torch.bfloat16", torch.bfloat16),
    ("bf16", True, "torch.float32", torch.bfloat16),
    ("fp32", False, "torch.float32", torch.float32),
    ("autocast-bf16", False, "torch.bfloat16", torch.bfloat16),
    ("autocast-bf16", True, "torch.float32", torch.bfloat16),
]


@pytest.mark.parametrize(("mode", "pinned", "computes", "returns"), ADAPTERS)
def test_a_model_of_mixed_dtypes_is_neither_promoted_nor_crashed(
    mode: str, pinned: bool, computes: str, returns: torch.dtype
) -> None:
    """The frozen base rests in bf16 as it came, in every mode. Elsewhere every parameter becomes fp32, or
    stage 3 dies on an assertion; and buffers are rounded with the parameters."""
    for found in run_ranks(at_stages, 2, adapters, mode, PINNED if pinned else {}, Mixed):
        for losses, kept, shown, seen in found:
            assert losses == found[0][0] and losses[-1] != losses[0]
            assert (kept, shown, seen) == ({"bf16"}, {computes}, {returns})


def buffers(engine: Engine) -> tuple[torch.Tensor, torch.dtype]:
    return engine.module.inv_freq.clone(), engine.module.counts.dtype


@pytest.mark.parametrize("mode", MODES)
def test_buffers_are_not_rounded_unless_told(mode: str) -> None:
    exact = Mixed().inv_freq
    told = {"data_types": {"buffer_dtype": "bf16"}}
    for found in run_ranks(at_stages, 2, buffers, mode, {}, Mixed, (0, 3)):
        assert all(torch.equal(kept, exact) and kept.dtype is torch.float32 for kept, _ in found)
    for found in run_ranks(at_stages, 2, buffers, mode, told, Mixed, (0, 3)):
        assert all(torch.equal(cast, exact.to(torch.bfloat16)) for cast, _ in found)
        assert all(counts is torch.int64 for _, counts in found), "whole numbers are kept"
