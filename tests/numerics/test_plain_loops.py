"""One rank has the bits of a loop by hand.

fp32 mode beside plain PyTorch with torch's own optimizers, and 16 bits beside rounded weights with an fp32
master that is made from the values that were given. The loop here knows nothing of zerodrift but, for
`split` and narrow gathers, how they round.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import Run, config, make, require_alike, train
from zerodrift.dtypes import DType
from zerodrift.engine.engine import Engine
from zerodrift.errors import UnsupportedError
from zerodrift.kernels.narrow import round_trip
from zerodrift.optim import learning_rates
from zerodrift.optim.rounding import round_away

STEPS = 6


pytestmark = pytest.mark.usefixtures("one_thread")

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]
MakeSchedule = Callable[[torch.optim.Optimizer], Any]


ADAMW = partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95))
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NADAM = partial(torch.optim.NAdam, lr=2e-3)
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": ADAMW,
    "momentum": MOMENTUM,
    "nadam": NADAM,
    "amsgrad": partial(torch.optim.Adam, lr=3e-3, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
}


def groups_of(parameters: Mapping[str, nn.Parameter]) -> Groups:
    """Return groups: matrices decay, vectors do not, and the embedding does not learn."""
    matrices = [p for name, p in parameters.items() if p.dim() > 1 and "embed" not in name]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    still = [p for name, p in parameters.items() if "embed" in name]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
        {"params": still, "lr": 0.0, "weight_decay": 0.0},
    ]


def engine_of(
    model: nn.Module,
    mode: str,
    optimizer: MakeOptimizer,
    micro_batches: int = 1,
    schedule: Any = None,
    stage: int = 0,
    **rest: Any,
) -> Engine:
    """Make an engine with a caller's optimizer, by default without clipping."""
    written = config(stage, mode, micro_batches, **{"gradient_clipping": 0, **rest})
    given = optimizer(groups_of(dict(model.named_parameters())))
    return make(written, model, optimizer=given, schedule=schedule)


def run_engine(engine: Engine, steps: int = STEPS, micro_batches: int = 1) -> Run:
    """Train, and keep the learning rates of each step in the place of norms."""
    rates: list[Any] = []
    engine.before_update = lambda: rates.append(tuple(learning_rates(engine.updater)))
    run = train(engine, steps, micro_batches)
    names = [name for name, _ in engine.module.named_parameters()]
    run.weights = {name: run.weights[name] for name in names}
    run.norms, run.scales = rates, []
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
    mode: str = "",
) -> Run:
    """Run a loop by hand. With `rounding` the model has rounded parameters; the optimizer has not. In fp16
    losses are scaled."""
    run, scale = Run(), SCALE if mode == "fp16" else 1.0
    under = torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast-bf16", cache_enabled=False)
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = make_optimizer(groups_of(masters))
    schedule = make_schedule(optimizer) if make_schedule else None
    for step in range(steps):
        for name, parameter in model.named_parameters():
            parameter.data = rounding(masters[name].detach()) if rounding else masters[name].detach()
        for micro in range(micro_batches):
            with under:
                loss = model(batch(step, micro=micro))
            (loss * scale).backward()
            run.losses.append(loss.item())
            for name, parameter in model.named_parameters():
                # An expert that got no token has no gradient, which here is a gradient of zero.
                new = torch.zeros_like(masters[name]) if parameter.grad is None else parameter.grad.float()
                held = masters[name].grad
                masters[name].grad = new if held is None else held + new
                parameter.grad = None
        for master in masters.values():
            master.grad /= micro_batches * scale
        if clip:
            nn.utils.clip_grad_norm_(masters.values(), clip)
        run.norms.append(tuple(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    run.masters = {name: master.detach() for name, master in masters.items()}
    run.weights = {name: rounding(m) if rounding else m for name, m in run.masters.items()}
    for name, master in masters.items():
        state = optimizer.state[master].items()
        tensors = {key: value for key, value in state if isinstance(value, Tensor)}
        run.states[name] = {key: value for key, value in tensors.items() if value.shape == master.shape}
    return run


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_equals_plain_pytorch(name: str) -> None:
    mine, plain = pair(GPT())
    one = run_engine(engine_of(mine, "fp32", OPTIMIZERS[name]))
    require_alike(one, run_plainly(plain, OPTIMIZERS[name]))
    assert one.losses[-1] < one.losses[0]


@pytest.mark.parametrize(
    "make_schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8)),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-3, 1e-3, 1e-9], STEPS + 1),
    ],
    ids=["warm-up", "one cycle"],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_fp32_equals_plain_pytorch_under_a_schedule_of_torch(make_schedule: MakeSchedule, stage: int) -> None:
    mine, plain = pair(GPT(moe=True))
    one = run_engine(engine_of(mine, "fp32", ADAMW, schedule=make_schedule, stage=stage))
    assert len(set(one.norms)) > STEPS // 2, "the schedule moved"
    require_alike(one, run_plainly(plain, ADAMW, make_schedule))


def test_fp32_equals_plain_pytorch_with_micro_batches() -> None:
    """The loop divides by 3 and the engine multiplies by 1/3: half an ulp."""
    mine, plain = pair(GPT())
    one = run_engine(engine_of(mine, "fp32", ADAMW, 3), micro_batches=3)
    other = run_plainly(plain, ADAMW, micro_batches=3)
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=1e-5, atol=1e-6)


def test_fp32_with_clipping_is_plain_pytorch_but_for_the_rounding_of_the_norm() -> None:
    """`clip_grad_norm_` sums squares in fp32, the engine in fp64: the factor differs by some ulps of fp32.

    Measured after 12 steps of AdamW: 1.2e-7, one ulp of the largest weights; without clipping it is 2e-3.
    """
    mine, plain = pair(GPT())
    engine = engine_of(mine, "fp32", ADAMW, gradient_clipping=0.5)
    one, other = run_engine(engine, 12), run_plainly(plain, ADAMW, clip=0.5, steps=12)
    free = run_plainly(GPT(), ADAMW, steps=12)
    assert worst(one, other) < 1e-6
    assert worst(one, free) > 1e-3, "the clip was active"


def worst(one: Run, other: Run) -> float:
    """Return the largest difference of a weight."""
    return max((one.masters[name] - other.masters[name]).abs().max().item() for name in one.masters)


def with_ties(model: nn.Module) -> nn.Module:
    """Put half of the weights halfway between two bf16 values, where the two roundings differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(torch.int32).flatten()
            bits[::2] = (bits[::2] & ~0xFFFF) | 0x8000
    return model


SCALE = 1024.0
"""Loss scale of the loops in fp16: a power of two, which rounds nothing."""


def narrowed(values: Tensor) -> Tensor:
    """Round matrices to blocks of fp8, decoded in bf16, and vectors as `split` does."""
    return round_away(values) if values.dim() < 2 else round_trip(DType.FP8_128, values, torch.bfloat16)


SCHEMES: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], Tensor] | None]] = {
    "bf16, fp32 master": ("bf16", {"master": "fp32"}, Tensor.bfloat16),
    "bf16, split master": ("bf16", {"master": "split"}, round_away),
    "bf16, gathered in fp8": ("bf16", {"gather": "fp8"}, narrowed),
    "bf16, with statistics": ("bf16", {"statistics": True}, round_away),
    "fp16": ("fp16", {}, Tensor.half),
    "autocast": ("autocast-bf16", {}, None),
}
"""Name -> mode, precision, and how the loop rounds its parameters."""


@pytest.mark.cells(2)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM, NADAM], ids=["adamw", "momentum", "nadam"])
def test_16_bits_equal_a_loop_with_an_fp32_master(
    optimizer: MakeOptimizer, scheme: str, micro_batches: int
) -> None:
    mode, precision, rounding = SCHEMES[scheme]
    mine, plain = pair(with_ties(GPT(tied=False)))
    keys: dict[str, Any] = {"fp16": {"loss_scale": SCALE}} if mode == "fp16" else {}
    engine = engine_of(mine, mode, optimizer, micro_batches, precision=precision, **keys)
    called = engine.module(batch(0)).item()  # as `generate` calls it
    one = run_engine(engine, micro_batches=micro_batches)
    assert called == one.losses[0]
    other = run_plainly(plain, optimizer, rounding=rounding, micro_batches=micro_batches, mode=mode)
    name = "layers.0.mlp.up.weight"
    if rounding is None:  # the engine gathers in bf16 what autocast would round
        one.weights = other.weights = {}
    else:
        assert one.weights[name].dtype is other.weights[name].dtype
    require_alike(one, other)


@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_from_a_config_equals_the_loop(stage: int) -> None:
    """A config's optimizer takes the correctly rounded root, as torch's fused one does."""
    mine, plain = pair(with_ties(GPT(moe=True, tied=False)))
    engine = make(config(stage, "bf16", gradient_clipping=0), mine)

    def one_group(groups: Groups) -> torch.optim.Optimizer:
        parameters = [parameter for group in groups for parameter in group["params"]]
        return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), fused=True)

    assert run_engine(engine).differs(run_plainly(plain, one_group, rounding=round_away)) == []


def test_the_uses_of_a_tied_weight_are_added_in_fp32() -> None:
    """Embedding and head each leave a bf16 gradient in one backward. A plain loop adds them in bf16; with
    `grad_dtype` it has our bits."""
    mine, plain = pair(GPT())
    silent = copy.deepcopy(plain)
    for parameter in plain.parameters():
        parameter.grad_dtype = torch.float32
    one = run_engine(engine_of(mine, "bf16", ADAMW))
    require_alike(one, run_plainly(plain, ADAMW, rounding=round_away))
    rounded = run_plainly(silent, ADAMW, rounding=round_away)
    moments = (run.states["embed.weight"]["exp_avg"] for run in (one, rounded))
    assert not torch.equal(*moments), "the two ways differ"


@pytest.mark.parametrize(
    ("optimizer", "state", "beta2", "told"),
    [
        ("NAdam", "8bit", 0.999, "`state: 8bit`: must be fp32"),
        ("NAdam", "fp32", 0.999, ""),
        ("AdamW", "bf16", 0.999, r"param_groups\[0\].*0\.999"),
        ("AdamW", "bf16", 0.98, ""),
        ("AdamW", "8bit", 0.999, ""),
    ],
)
def test_an_optimizer_of_torch_has_moments_that_follow_it_or_is_refused(
    optimizer: str, state: str, beta2: float, told: str
) -> None:
    """NAdam keeps its moments in fp32; of AdamW the plan does not see the beta2."""
    model = GPT()
    own = getattr(torch.optim, optimizer)(model.parameters(), betas=(0.9, beta2))
    written = config(0, "bf16", optimizer=None, precision={"state": state})
    with pytest.raises(UnsupportedError, match=told) if told else contextlib.nullcontext():
        make(written, model, optimizer=own).destroy()
