"""Silent errors of other engines, each with the numbers that were measured there.

The probe is one weight whose gradient is the model's input, so every sum and every rounding on the way to
the update shows as a number that can be worked out by hand. `2048 + 3 x 0.5 = 2049.5` over micro-batches
is 2048 as soon as it passes through 16 bits, `2048 + 1 = 2049` over two ranks too. The numbers in comments
marked "elsewhere" are DeepSpeed 0.19.6's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.runs import diff, make
from tests.ranks.harness import on_ranks
from zerodrift.engine.engine import Engine

STAGES = (0, 1, 2, 3)
MODES = ("fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16")

Written = dict[str, Any]


class Probe(nn.Module):
    """A weight of zeros, whose gradient is `factor` times the input."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return (self.linear(x).float() * factor).sum()


NAME = "linear.weight"


def probe_config(stage: int, mode: str, **rest: Any) -> Written:
    """Return a config of SGD with a learning rate of 1, so that the weight is minus the gradient."""
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
    """Take one optimizer step from micro-batches with these gradients; return minus the weights."""
    for gradient in gradients:
        engine.backward(engine(row(gradient)))
        result = engine.step()
    assert result.updated
    return [-each for each in weight(engine)]


def engines(
    mode: str,
    rest: Written | None = None,
    model: Callable[[], nn.Module] = Probe,
    stages: Sequence[int] = STAGES,
) -> Iterator[Engine]:
    """Yield an engine of each stage on this rank."""
    for stage in stages:
        engine = make(probe_config(stage, mode, **(rest or {})), model())
        yield engine
        engine.destroy()


# --- accumulation and the mean over ranks ---------------------------------------------------------------


ACCUMULATES: dict[str, dict[str | None, bool]] = {
    "fp32": {None: True, "bf16": False, "fp16": False},
    "bf16": {None: True, "fp32": True, "bf16": False},
    "fp16": {None: True, "fp32": True, "fp16": False, "bf16": False},
    "autocast-bf16": {None: True, "fp32": True, "bf16": False},
    "autocast-fp16": {None: True, "fp32": True, "fp16": False},
}
"""Mode -> accumulation dtype, or none -> whether the probe keeps all bits in it."""


def sums(
    mode: str, accumulate: str | None, wire: str | None, stages: Sequence[int]
) -> Iterator[tuple[list[float], list[float]]]:
    """Yield, by stage, the sums over micro-batches and over ranks."""
    told = {"gradient_accumulation_dtype": accumulate, "communication_data_type": wire}
    more: Written = {key: value for key, value in told.items() if value is not None}
    more |= {"precision": {"allow_narrow": True}, "gradient_accumulation_steps": 4}
    for engine in engines(mode, more, stages=stages):
        micro = [4 * value for value in updated(engine, [2048.0, 0.5, 0.5, 0.5])]
        engine.parameter(NAME).master = torch.zeros(1, 8)
        first = 1.0 if engine.mesh.rank() else 2048.0
        yield micro, [8 * value for value in updated(engine, [first, 0.0, 0.0, 0.0])]


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_every_accumulation_dtype_is_honoured_at_every_stage_and_keeps_the_mean() -> None:
    """Elsewhere: ignored at stage 2, refused at stage 0; at stage 1 a dtype other than the model's loses
    the mean, each shard keeping its owner's gradient (4096 and 2 for 2049). The wire is the widest that
    the accumulator allows, so that only the accumulator rounds."""
    pairs = [(mode, *each) for mode, dtypes in ACCUMULATES.items() for each in dtypes.items()]
    for number, (mode, accumulate, exact) in enumerate(pairs):
        right = ([2049.5] * 8, [2049.0] * 8) if exact else ([2048.0] * 8, [2048.0] * 8)
        for found in sums(mode, accumulate, accumulate or "fp32", ((0, 3), (1, 2))[number % 2]):
            assert found == right, (mode, accumulate, found)


@on_ranks(2)
def test_a_16_bit_wire_rounds_once_and_is_summed_in_fp32() -> None:
    """Autocast sends a safe module's gradient in bf16 by default: 2049.5 becomes 2048 where it is reduced
    once per step, and stays where each micro-batch, exact in bf16, travels by itself."""
    for stage, found in enumerate(sums("autocast-bf16", None, None, STAGES)):
        assert found == ([2048.0 if stage < 2 else 2049.5] * 8, [2049.0] * 8), found


# --- the norm -------------------------------------------------------------------------------------------
# Gradients that are not finite: `test_scaling.py`. What masters and optimizers start from, elsewhere rounded
# values and a step on zero gradients: `test_plain_loops.py`.


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_norm_and_clip_are_of_the_true_gradient_at_every_stage(mode: str) -> None:
    """16 elements of 1/16: a norm of 0.25. Elsewhere autocast-fp16 reports 16384, stage 0 nothing at all; and
    a clip at 100, which should be idle, makes the update 164 times too small."""
    more: Written = {"fp16": {"initial_scale_power": 16}} if mode.endswith("fp16") else {}
    found = []
    for clip in (100.0, 0.125):
        for engine in engines(mode, {"gradient_clipping": clip, **more}, lambda: Probe(16)):
            engine.backward(engine(row(1.0, 16), 1 / 16))
            result = engine.step()
            assert engine.grad_norm == result.grad_norm == 0.25, result
            assert result.loss_scale == (65536.0 if more else 1.0)
            found.append(weight(engine))
    assert found[:4] == [[-0.0625] * 16] * 4, found
    # torch's own formula adds 1e-6 to the norm: 4e-6 of the result.
    assert found[4] == pytest.approx([-0.03125] * 16, rel=5e-6), found
    assert found[4:] == [found[4]] * 4, "the same bits at every stage"


# --- models of mixed dtypes, and buffers ----------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen bf16 layer with a low-rank fp32 adapter, as PEFT builds them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).to(torch.bfloat16).requires_grad_(False)
        self.lora_a = nn.Linear(width, 4, bias=False)
        self.lora_b = nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out + self.lora_b(self.lora_a(x.to(self.lora_a.weight.dtype))).to(out.dtype)


class Mixed(nn.Module):
    """Two adapted layers and a rotary table."""

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


@pytest.mark.parametrize(
    ("mode", "pinned", "computes", "returns"),
    [
        ("bf16", False, torch.bfloat16, torch.bfloat16),
        ("bf16", True, torch.float32, torch.bfloat16),
        ("fp32", False, torch.float32, torch.float32),
        ("autocast-bf16", True, torch.float32, torch.bfloat16),
    ],
)
@on_ranks(2)
def test_a_model_of_mixed_dtypes_is_neither_promoted_nor_crashed(
    mode: str, pinned: bool, computes: torch.dtype, returns: torch.dtype
) -> None:
    """The frozen base rests in bf16 in every mode; adapters compute and layers return in the given dtypes.
    Elsewhere every parameter becomes fp32, or stage 3 dies on an assertion; and buffers are rounded with
    the parameters."""
    bases = {name: p for name, p in Mixed().named_parameters() if "base" in name}
    runs = []
    for engine in engines(mode, PINNED if pinned else {}, Mixed):
        model = engine.module
        assert {str(engine.plan.row(name).columns.storage.dtype) for name in bases} == {"bf16"}
        generator = torch.Generator().manual_seed(engine.mesh.rank())
        losses = []
        for _ in range(3):
            loss = engine(torch.randn(4, 16, generator=generator))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with engine.gathered() as values:
            assert diff(bases, {name: values[name] for name in bases}) == [], "these are frozen"
            shown = {value.dtype for name, value in values.items() if "lora" in name}
            assert "inv_freq" not in model.state_dict()
        assert (shown, set(model.seen)) == ({computes}, {returns}), (shown, set(model.seen))
        assert model.inv_freq.dtype is torch.float32 and torch.equal(model.inv_freq, Mixed().inv_freq)
        assert model.counts.dtype is torch.int64
        runs.append(losses)
    assert runs == [runs[0]] * len(STAGES) and runs[0][-1] != runs[0][0], runs


@on_ranks(1)
def test_buffers_are_rounded_where_that_is_told() -> None:
    expected = Mixed().inv_freq.bfloat16()
    for engine in engines("bf16", {"data_types": {"buffer_dtype": "bf16"}}, Mixed, (0, 3)):
        kept = engine.module.inv_freq
        assert kept.dtype is torch.bfloat16 and torch.equal(kept, expected)
        assert engine.module.counts.dtype is torch.int64, "whole numbers are kept"
