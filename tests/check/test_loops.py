"""Every loop of `loops.py` as it should not be, with its finding, and as it should, without one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest
import torch

import zerodrift
from tests.check import loops
from tests.check.loops import BF16, FP16, FP32, made
from tests.check.tiny import Dense, loss_of
from zerodrift.inspect.check.table import BITS
from zerodrift.inspect.trace import narrowest

Run = Callable[[], zerodrift.Observation]


def _(call: Callable[..., zerodrift.Observation], *arguments: object, **named: object) -> Run:
    return functools.partial(call, *arguments, **named)


def through(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value.to(dtype).to(value.dtype)


def set_through(dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
    return lambda parameter: setattr(parameter, "data", through(dtype)(parameter.data))


def by(kind: type[torch.optim.SGD], rate: float) -> Run:
    return _(made, loops.dense, BF16, by=lambda model: kind(model.parameters(), lr=rate))


def by_hand(update: Callable[[torch.nn.Parameter], object], dtype: torch.dtype = FP32) -> Run:
    return _(made, loops.dense, dtype, by=lambda model: loops.ByHand(model, update))


def loss(kind: str, dtype: torch.dtype) -> Run:
    return _(made, Dense, loss=lambda x, t: loops.LOSSES[kind](x.to(dtype), t))


BUGS: dict[str, tuple[Run, str, str]] = {
    **{
        f"masters of {kind}, not written": (_(loops.masters, kind, 1e-3, False), "never-updated", "up.weight")
        for kind in ("copy_", "flat, vector")
    },
    "an optimizer of bf16": (by(loops.WithoutMasters, 1e-2), "no-master", "up.weight"),
    "a moment that decays": (by(loops.Averaging, 1e-2), "no-master", "up.weight"),
    **{f"by hand, {kind}": (by_hand(loops.UPDATES[kind], BF16), "no-master", "up.weight")
        for kind in loops.UPDATES},
    **{f"average, {kind}": (_(loops.average, kind, BF16), "average-in-16-bits", "up.weight")
        for kind in loops.AVERAGES},
    "average, fp16": (_(loops.average, "lerp_", FP16), "average-in-16-bits", "up.weight"),
    "AveragedModel": (_(loops.averaged_model, BF16), "average-in-16-bits", "up.weight"),
    **{f"loss, {kind}": (loss(kind, BF16), "loss-in-16-bits", "") for kind in loops.LOSSES},
    "loss, fp16": (loss("cross_entropy", FP16), "loss-in-16-bits", ""),
    "loss inside": (_(made, loops.WithLoss, BF16, loss=lambda x, t: x), "loss-in-16-bits", ""),
    "logits cast down": (_(made, Dense, loss=lambda x, t: loss_of(x.to(BF16), t)), "logits-rounded", ""),
    "head in bf16": (lambda: loops.head(loops.NarrowHead()), "logits-rounded", "head.weight"),
    "head of large logits": (_(loops.head, scale=200.0, autocast=True), "logits-rounded", "head.weight"),
    "a rollout": (_(loops.rollout, BF16), "loss-in-16-bits", ""),
    "a loss that is cast": (
        _(made, Dense, loss=lambda x, t: loss_of(x, t).to(BF16) / 4), "loss-in-16-bits", ""),
    **{f"positions, {kind}": (_(made, loops.Counting, how, BF16), "whole-numbers-rounded", "")
        for kind, how in loops.POSITIONS.items()},
    **{f"statistic, {kind}": (_(made, loops.Counting, how, BF16), "statistic-in-16-bits", "")
        for kind, how in loops.STATISTICS.items()},
    "whole numbers in fp32": (_(loops.given, autocast=True), "whole-numbers-rounded", ""),
    "a head that a cast untied": (loops.untied, "untied", "head.weight"),
    "a loss without a scale": (_(loops.scaled, steps=False), "loss-not-scaled", "up.weight"),
    "clipped scaled": (
        _(loops.scaled, before=lambda _, __, model: loops.clip(model)), "norm-of-scaled-gradients", ""),
    "stepped scaled": (
        _(loops.scaled, before=lambda _, optimizer, __: optimizer.step()), "norm-of-scaled-gradients", ""),
    "clipped scaled by hand": (
        _(loops.scaled, before=lambda _, __, model: loops.norm_by_hand(model)),
        *("norm-of-scaled-gradients", "")),
    "a rate in bf16": (_(loops.numbers, "lr", BF16), "state-too-narrow", ""),
    "a counter in bf16": (_(loops.numbers, "step", BF16), "state-too-narrow", ""),
    "states parked in bf16": (_(loops.parked, BF16), "states-rounded", "up.weight"),
    "weights, copy_": (
        _(loops.rounded_weights, lambda p: p.copy_(p.to(BF16))), "weights-rounded", "up.weight"),
    "weights, fp16": (_(loops.rounded_weights, set_through(FP16)), "weights-rounded", "up.weight"),
    **{f"gradients in {dtype}": (_(loops.rounded_gradients, through(dtype)), "gradients-rounded", "up.weight")
        for dtype in (BF16, FP16)},
    "gradients added in bf16": (_(loops.added, BF16), "gradients-rounded", "up.weight"),
    **{f"running, {kind}": (_(loops.running, kind, BF16), "average-in-16-bits", "")
        for kind in loops.RUNNING},
    "gradients in a hook": (
        _(loops.gradients_in_a_hook, through(BF16)), "gradients-rounded", "up.weight"),
    "gradients of a buffer": (_(loops.in_one_buffer, BF16), "gradients-rounded", "up.weight"),
    **{f"gradients between modules, {when}": (
        _(loops.gradients_between_modules, through(BF16), when), "gradients-rounded", "")
        for when in ("backward_hook", "backward_pre_hook")},
}  # fmt: skip
"""Name -> loop, the kind of its finding, and a parameter of the finding; none for a finding of the run."""

HEALTHY: dict[str, Run] = {
    **{f"masters, {kind}": _(loops.masters, kind) for kind in loops.MASTERS},
    "masters in an optimizer": by(loops.WithMasters, 1e-6),
    "what rounding lost": by(loops.Compensated, 1e-4),
    "weights in halves": by(loops.Halves, 1e-4),
    "stochastic rounding": by(loops.Stochastic, 1e-4),
    **{f"by hand, {kind}": by_hand(update) for kind, update in loops.UPDATES.items()},
    "signs of gradients": _(loops.rounded_gradients, torch.sign),
    "clipped gradients": _(loops.rounded_gradients, lambda gradient: gradient.clamp(-(0.5**10), 0.5**10)),
    "gradients added in fp32": _(loops.added, FP32),
    "an adapter in fp32": loops.adapted,
    "masters in a hook": loops.post_hook,
    "masters in a model": loops.second_model,
    **{f"average, {kind}": _(loops.average, kind, FP32) for kind in loops.AVERAGES},
    "AveragedModel": _(loops.averaged_model, FP32),
    **{f"loss, {kind}": loss(kind, FP32) for kind in loops.LOSSES},
    "loss inside": _(made, loops.WithLoss, FP32, loss=lambda x, t: x),
    "head": loops.head,
    "whole numbers in fp32": _(loops.given, autocast=False),
    "states parked in fp32": _(loops.parked, FP32),
    "gradients of a buffer": _(loops.in_one_buffer, FP32),
    "head under autocast": _(loops.head, autocast=True),
    "a rollout": _(loops.rollout, FP32),
    "a loss that is cast": _(made, Dense, loss=lambda x, t: loss_of(x, t) / 4),
    **{f"positions, {kind}": _(made, loops.Counting, how, FP32) for kind, how in loops.POSITIONS.items()},
    **{f"positions, {kind}": _(made, loops.Counting, how, BF16) for kind, how in loops.PARTS.items()},
    **{f"statistic, {kind}": _(made, loops.Counting, how, FP32) for kind, how in loops.STATISTICS.items()},
    "scaled": _(loops.scaled, before=loops.unscaled),
    "skipped by a fused optimizer": _(loops.scaled, power=60),
    "scaled by hand": _(loops.scaled, lambda loss: loss * 1024.0, steps=False),
    "a rate in fp32": _(loops.numbers, "lr", FP32),
    "a counter in fp32": _(loops.numbers, "step", FP32),
    "an optimizer in another": _(made, Dense, by=loops.Around),
    "an optimizer of closures": loops.closures,
    **{f"running, {kind}": _(loops.running, kind, FP32) for kind in loops.RUNNING},
    **{f"replaced, {kind}": _(loops.running, kind, BF16) for kind in loops.REPLACED},
    "gradients in a hook": _(loops.gradients_in_a_hook, lambda gradient: gradient * 0.5),
    "gradients between modules": _(loops.gradients_between_modules, lambda gradient: gradient * 0.5),
    "weights that are written": _(loops.rounded_weights, lambda parameter: parameter.copy_(parameter + 0)),
}


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Reset torch.compile, because nothing is observed in a process that has compiled code."""
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()


@pytest.mark.parametrize("case", BUGS)
def test_a_bug_is_named(case: str) -> None:
    run, kind, name = BUGS[case]
    seen = run()
    found = {finding.kind: finding for finding in seen.findings()}
    assert kind in found and not seen.process.notes, (list(found), seen.process.notes)
    assert name in found[kind].names or not (name or found[kind].names)
    assert found[kind].what.endswith(".") and found[kind].do and 0 < found[kind].cost <= 1
    others = {"norm-in-16-bits", "state-too-narrow"} if kind == "no-master" else set()
    assert found.keys() <= {kind} | others


class Narrow(Dense):
    """A model whose parts each lose something in bf16: a buffer, a router, a decay, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(16) / 16)
        self.w_router = torch.nn.Linear(16, 2)
        self.decay = torch.nn.Parameter(torch.full((16,), 0.1))
        self.head.weight = torch.nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        gate = self.w_router(x).softmax(-1)[..., :1]
        return self.head(self.block(x * gate * self.frequencies) * self.decay.float().exp().to(x.dtype))


def test_a_model_in_bf16_is_named_part_by_part() -> None:
    seen = made(lambda: Narrow().bfloat16())
    found = {finding.kind: finding.names for finding in seen.findings()}
    assert {"embed.weight", "decay", "up.weight"} < {*found["no-master"]}
    assert {"norm.weight", "w_router.weight", "up.bias"} < {*found["state-too-narrow"]}
    assert found["norm-in-16-bits"] == ("norm.weight", "norm.bias")
    assert found["upcast-without-effect"] == ("decay",)
    assert found["router-in-16-bits"] == ("w_router.weight", "w_router.bias")
    assert found["buffer-rounded"] == ("frequencies",)
    assert found["untied"] == ("embed.weight", "head.weight")
    assert len(found) == 7


def test_a_sum_beyond_fp32_is_of_no_narrow_dtype() -> None:
    assert narrowest([1e39, 1.0]) == narrowest([1.5, 1e38]) == narrowest([float("nan")]) == ""
    assert narrowest([1.5, 2.0**100], BITS) == "bfloat16" and narrowest([1 + 2**-10]) == "float16"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, BF16, FP16])
def test_what_a_narrow_dtype_holds_is_what_torch_says(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.randn(99) * 2.0**e for e in (-30, -14, -6, 0, 7, 15)]).double()
    name = str(dtype).removeprefix("torch.")
    rounded = values.to(dtype).double()
    for value in (*values.tolist(), *rounded[rounded.isfinite()].tolist()):
        held = torch.tensor(value, dtype=torch.float64).to(dtype).double().item() == value
        assert (narrowest([value], (name,)) == name) == held, value


@pytest.mark.parametrize("case", ["masters, copy_", "an optimizer in another", "an optimizer of closures"])
def test_watching_ends_after_its_steps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerodrift.inspect.check.launch._FOREVER", 3)
    assert HEALTHY[case]().process.steps == 3


def test_steps_that_a_scaler_skips_for_good_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerodrift.inspect.trace.steps._SKIPPED", 4)
    seen = loops.scaled(power=100)
    assert "skipped all 4 steps" in seen.process.notes[0] and not seen.findings()


def test_moments_of_one_element_are_no_counters() -> None:
    model = torch.nn.Linear(4, 1, dtype=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with zerodrift.observe() as seen:
        for _ in range(4):
            model(torch.ones(2, 4, dtype=BF16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (states,) = (finding for finding in seen.findings() if finding.kind == "state-too-narrow")
    assert states.names == ("weight", "bias")


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_loop_has_no_finding(case: str) -> None:
    seen = HEALTHY[case]()
    assert not seen.findings() and not seen.process.notes
    others = {"masters in a model": 3, "skipped by a fused optimizer": 0}  # its first is of another model
    assert seen.process.steps == others.get(case, 4)
    if case.startswith(("masters", "what rounding lost")):
        (up,) = (p for p in seen.models[0].parameters if p.name == "up.weight")
        assert up.dtypes("master") == (("float32",) if "masters" in case else ("split",))
        assert up.dtypes("state")[-1:] == (("float32",) if "masters" in case else ())
