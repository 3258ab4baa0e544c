"""One rank against a loop that a person would write by hand: bit for bit the same training.

fp32 mode beside plain PyTorch with torch's own optimizers, and bf16 mode beside bf16 weights with an fp32
master. The loop here knows nothing of zerodrift but, for `split`, how it rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, make, masters_and_states
from zerodrift.engine.engine import Engine
from zerodrift.errors import UnsupportedError
from zerodrift.optim.rounding import round_away

STEPS = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As on the ranks of other tests: small tensors on several threads of a busy machine take seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]
MakeSchedule = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class Optimizer:
    """One of torch's optimizers with its arguments."""

    kind: type[torch.optim.Optimizer]
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return " ".join([self.kind.__name__, *(f"{key}={value}" for key, value in self.arguments.items())])

    def __call__(self, groups: Groups) -> torch.optim.Optimizer:
        return self.kind(groups, **self.arguments)


ADAMW = Optimizer(torch.optim.AdamW, {"lr": 3e-3, "betas": (0.9, 0.95)})
MOMENTUM = Optimizer(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
NADAM = Optimizer(torch.optim.NAdam, {"lr": 2e-3})
OPTIMIZERS = [
    ADAMW,
    MOMENTUM,
    NADAM,
    Optimizer(torch.optim.Adam, {"lr": 3e-3, "eps": 1e-6}),
    Optimizer(torch.optim.Adam, {"lr": 3e-3, "amsgrad": True}),
    Optimizer(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    Optimizer(torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
]


@dataclass
class Trained:
    """What a loop leaves, by parameter name."""

    losses: list[float] = field(default_factory=list)
    rates: list[tuple[float, ...]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """What the model sees."""
    masters: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Moments that have the shape of their parameter."""


def groups_of(parameters: Mapping[str, nn.Parameter]) -> Groups:
    """Matrices decay, vectors do not, and the embedding does not learn."""
    matrices = [p for name, p in parameters.items() if p.dim() > 1 and "embed" not in name]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    still = [p for name, p in parameters.items() if "embed" in name]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
        {"params": still, "lr": 0.0, "weight_decay": 0.0},
    ]


def run_engine(engine: Engine, steps: int = STEPS, micro_batches: int = 1) -> Trained:
    run = Trained()
    for step in range(steps):
        for micro in range(micro_batches):
            loss = engine(batch(step, micro=micro))
            engine.backward(loss)
            run.losses.append(loss.item())
            result = engine.step()
        run.rates.append(result.lr)
    names = [name for name, _ in engine.module.named_parameters()]
    with engine.gathered() as values:
        run.weights = {name: values[name].detach().clone() for name in names}
    run.masters, run.states = masters_and_states(engine)
    engine.destroy()
    return run


def run_plainly(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    make_schedule: MakeSchedule | None = None,
    *,
    rounding: Callable[[Tensor], Tensor] | None = None,
    micro_batches: int = 1,
    clip: float = 0.0,
    steps: int = STEPS,
) -> Trained:
    """A loop by hand. With `rounding` the model sees the parameters rounded, and the optimizer does not."""
    run = Trained()
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = make_optimizer(groups_of(masters))
    schedule = make_schedule(optimizer) if make_schedule else None
    for step in range(steps):
        for name, parameter in model.named_parameters():
            parameter.data = rounding(masters[name].detach()) if rounding else masters[name].detach()
        for micro in range(micro_batches):
            loss = model(batch(step, micro=micro))
            loss.backward()
            run.losses.append(loss.item())
            for name, parameter in model.named_parameters():
                # An expert that got no token has no gradient, which here is a gradient of zero.
                new = torch.zeros_like(masters[name]) if parameter.grad is None else parameter.grad.float()
                held = masters[name].grad
                masters[name].grad = new if held is None else held + new
                parameter.grad = None
        for master in masters.values():
            master.grad /= micro_batches
        if clip:
            nn.utils.clip_grad_norm_(masters.values(), clip)
        run.rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    run.masters = {name: master.detach() for name, master in masters.items()}
    run.weights = {name: rounding(m) if rounding else m for name, m in run.masters.items()}
    for name, master in masters.items():
        state = optimizer.state[master]
        run.states[name] = {
            key: value
            for key, value in state.items()
            if isinstance(value, Tensor) and value.shape == master.shape
        }
    return run


def assert_same_bits(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    assert one.rates == other.rates
    assert one.weights.keys() == other.weights.keys() and one.states.keys() == other.states.keys()
    for name, weight in one.weights.items():
        assert weight.dtype is other.weights[name].dtype
        assert torch.equal(weight, other.weights[name]), name
        assert torch.equal(one.masters[name], other.masters[name]), name
        assert one.states[name].keys() == other.states[name].keys()
        for key, value in one.states[name].items():
            assert torch.equal(value, other.states[name][key]), f"{name} {key}"


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


# --- fp32 beside plain PyTorch --------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_fp32_equals_plain_pytorch(optimizer: Optimizer) -> None:
    mine, plain = pair(GPT())
    engine = make(
        config(0, "fp32", gradient_clipping=0),
        mine,
        optimizer=optimizer(groups_of(dict(mine.named_parameters()))),
    )
    one, other = run_engine(engine), run_plainly(plain, optimizer)
    assert_same_bits(one, other)
    assert one.losses[-1] < one.losses[0]


@pytest.mark.parametrize(
    "make_schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8)),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-3, 1e-3, 1e-9], STEPS + 1),
    ],
    ids=["cosine", "warm-up", "one cycle"],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_fp32_equals_plain_pytorch_under_a_schedule_of_torch(make_schedule: MakeSchedule, stage: int) -> None:
    mine, plain = pair(GPT(moe=True))
    optimizer = ADAMW(groups_of(dict(mine.named_parameters())))
    engine = make(
        config(stage, "fp32", gradient_clipping=0), mine, optimizer=optimizer, schedule=make_schedule
    )
    one, other = run_engine(engine), run_plainly(plain, ADAMW, make_schedule)
    assert len(set(one.rates)) > STEPS // 2, "the schedule moved"
    assert_same_bits(one, other)


def test_a_schedule_that_is_already_made_is_taken_too() -> None:
    mine, plain = pair(GPT())
    optimizer = ADAMW(groups_of(dict(mine.named_parameters())))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    engine = make(config(0, "fp32", gradient_clipping=0), mine, optimizer=optimizer, schedule=schedule)
    other = run_plainly(plain, ADAMW, lambda held: torch.optim.lr_scheduler.StepLR(held, 5, 0.5))
    assert_same_bits(run_engine(engine), other)


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_fp32_equals_plain_pytorch_with_micro_batches(micro_batches: int) -> None:
    """Half a sum is exact. By 3 the loop divides and the engine multiplies by 1/3: half an ulp apart."""
    mine, plain = pair(GPT())
    optimizer = ADAMW(groups_of(dict(mine.named_parameters())))
    engine = make(config(0, "fp32", micro_batches, gradient_clipping=0), mine, optimizer=optimizer)
    one = run_engine(engine, micro_batches=micro_batches)
    other = run_plainly(plain, ADAMW, micro_batches=micro_batches)
    if micro_batches == 2:
        assert_same_bits(one, other)
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=1e-5, atol=1e-6)


def test_fp32_with_clipping_is_plain_pytorch_but_for_the_rounding_of_the_norm() -> None:
    """`clip_grad_norm_` sums squares in fp32, the engine in fp64: the factor differs by some ulps of fp32.

    Measured after 12 steps of AdamW: 1.2e-7, one ulp of the largest weights; without clipping it is 2e-3.
    """
    mine, plain = pair(GPT())
    optimizer = ADAMW(groups_of(dict(mine.named_parameters())))
    engine = make(config(0, "fp32", gradient_clipping=0.5), mine, optimizer=optimizer)
    one, other = run_engine(engine, 12), run_plainly(plain, ADAMW, clip=0.5, steps=12)
    free = run_plainly(GPT(), ADAMW, steps=12)
    assert worst(one, other) < 1e-6
    assert worst(one, free) > 1e-3, "the clip was active"


def worst(one: Trained, other: Trained) -> float:
    """The largest difference of a weight."""
    return max((one.masters[name] - other.masters[name]).abs().max().item() for name in one.masters)


# --- bf16 beside bf16 weights and an fp32 master --------------------------------------------------------


def with_ties(model: nn.Module) -> nn.Module:
    """Half of the weights halfway between two bf16 values, where the two roundings part."""
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(torch.int32).flatten()
            bits[::2] = (bits[::2] & ~0xFFFF) | 0x8000
    return model


def even(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("master", "rounding"), [("fp32", even), ("split", round_away)], ids=["fp32", "split"]
)
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM, NADAM], ids=str)
def test_bf16_equals_bf16_weights_and_an_fp32_master(
    optimizer: Optimizer, master: str, rounding: Callable[[Tensor], Tensor], micro_batches: int
) -> None:
    mine, plain = pair(with_ties(GPT(tied=False)))
    engine = make(
        config(0, "bf16", micro_batches, gradient_clipping=0, precision={"master": master}),
        mine,
        optimizer=optimizer(groups_of(dict(mine.named_parameters()))),
    )
    one = run_engine(engine, micro_batches=micro_batches)
    other = run_plainly(plain, optimizer, rounding=rounding, micro_batches=micro_batches)
    assert one.weights["layers.0.mlp.up.weight"].dtype is torch.bfloat16
    assert_same_bits(one, other)


@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_from_a_config_equals_the_loop(stage: int) -> None:
    """The optimizer of a config takes the correctly rounded root, as torch's fused one does."""
    mine, plain = pair(with_ties(GPT(moe=True, tied=False)))
    engine = make(config(stage, "bf16", gradient_clipping=0), mine)

    def one_group(groups: Groups) -> torch.optim.Optimizer:
        parameters = [parameter for group in groups for parameter in group["params"]]
        return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), fused=True)

    assert_same_bits(run_engine(engine), run_plainly(plain, one_group, rounding=round_away))


def test_the_uses_of_a_tied_weight_are_added_in_fp32() -> None:
    """Embedding and head each leave a bf16 gradient in one backward. A plain loop that says nothing adds
    them in bf16; one that says `grad_dtype` is ours, bit for bit."""
    mine, plain = pair(GPT())
    silent = copy.deepcopy(plain)
    for parameter in plain.parameters():
        parameter.grad_dtype = torch.float32
    optimizer = ADAMW(groups_of(dict(mine.named_parameters())))
    engine = make(config(0, "bf16", gradient_clipping=0), mine, optimizer=optimizer)
    one = run_engine(engine)
    assert_same_bits(one, run_plainly(plain, ADAMW, rounding=round_away))
    rounded = run_plainly(silent, ADAMW, rounding=round_away)
    moment = "exp_avg"
    assert not torch.equal(one.states["embed.weight"][moment], rounded.states["embed.weight"][moment]), (
        "the two ways differ"
    )


@pytest.mark.parametrize("state", ["bf16", "bf16-stochastic"])
def test_moments_that_an_optimizer_would_not_round_are_refused(state: str) -> None:
    """torch's NAdam keeps its moments in fp32: a plan that says otherwise is not run."""
    model = GPT()
    optimizer = NADAM([{"params": list(model.parameters())}])
    with pytest.raises(UnsupportedError, match="state"):
        make(config(0, "bf16", optimizer=None, precision={"state": state}), model, optimizer=optimizer)


def test_the_two_roundings_are_told_apart() -> None:
    """The comparison above can fail: from weights with ties the first loss already differs."""
    models = [with_ties(GPT()) for _ in range(2)]
    runs = [
        run_plainly(model, ADAMW, rounding=way) for model, way in zip(models, (even, round_away), strict=True)
    ]
    assert runs[0].losses[0] != runs[1].losses[0]
