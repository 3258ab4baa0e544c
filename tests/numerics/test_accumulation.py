"""Many micro-batches: what the engine accumulates against the fp64 sum of the very same gradients.

The reference runs a plain copy of the model with the engine's own low-precision weights, takes each
micro-batch's gradient as autograd leaves it, and adds them up in fp64 over micro-batches and ranks. So
neither the model nor its compute dtype is judged here, only the sum.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import gradients, make
from tests.ranks.harness import run_ranks
from zerodrift.dtypes import DType
from zerodrift.engine.engine import Engine

SCALE = 1024.0


def engine_of(mode: str, accumulate: str, stage: int, count: int) -> Engine:
    """An engine that sends what it accumulates as it is."""
    written = {
        "precision": {"mode": mode, "accumulate": accumulate, "allow_narrow": True},
        "communication_data_type": accumulate,
        "zero_optimization": {"stage": stage},
        "fp16": {"loss_scale": SCALE},
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    return make(written, network())


def network() -> nn.Module:
    return GPT(layers=1, tied=False, width=16)


def data(rank: int, micro: int) -> Tensor:
    return batch(0, rank, micro, samples=1)


def true_sum(engine: Engine, mode: str, count: int) -> dict[str, Tensor]:
    """The mean gradient, added up in fp64; each rank adds up its own micro-batches."""
    plain, rank, scale = network(), engine.mesh.rank(), SCALE if mode == "fp16" else 1.0
    parameters = dict(plain.named_parameters())
    with engine.gathered() as values:
        for name, parameter in parameters.items():
            parameter.data = values[name].detach().clone()
    totals = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    for micro in range(count):
        loss = plain(data(rank, micro)).float() * scale
        for name, gradient in zip(
            parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True
        ):
            assert gradient.dtype is parameters[name].dtype is DType(mode).torch
            totals[name] += gradient.double()
    everywhere = engine.comm.all_gather_object(totals)
    divisor = scale * count * len(everywhere)
    return {name: sum(of_rank[name] for of_rank in everywhere) / divisor for name in totals}


def errors(mode: str, accumulate: str, count: int, stages: tuple[int, ...]) -> dict[int, list[float]]:
    """On a rank: stage -> relative errors by parameter."""
    found, reference = {}, None
    for stage in stages:
        engine = engine_of(mode, accumulate, stage, count)
        reference = reference or true_sum(engine, mode, count)
        for micro in range(count):
            engine.backward(engine(data(engine.mesh.rank(), micro)))
        mine = gradients(engine)
        found[stage] = [float((mine[key] - exact).norm() / exact.norm()) for key, exact in reference.items()]
        engine.destroy()
    return found


COUNTS = [32, *(pytest.param(count, marks=pytest.mark.slow) for count in (64, 256))]
STAGES = [(0, 3), pytest.param((1, 2), marks=pytest.mark.slow)]
"""Of each two, one that reduces once per step, and one that reduces every micro-batch."""


@pytest.mark.long
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("stages", STAGES, ids=str)
def test_fp32_accumulation_is_the_true_sum_and_a_narrow_one_is_not(
    stages: tuple[int, ...], mode: str, count: int
) -> None:
    """Measured of 256: 3e-8 in bf16 and 6e-8 in fp16, of the worst parameter. The contrast: over 256 a 16-bit
    accumulator is off by 2.9e-2 in bf16, 2.2e-3 in fp16."""
    found, other = run_ranks(errors, 2, mode, "fp32", count, stages, timeout=120)
    assert found == other and all(max(each) < 1e-6 for each in found.values()), found
    narrow, _ = run_ranks(errors, 2, mode, mode, count, stages, timeout=120)
    assert all(max(each) > 1e-4 for each in narrow.values()), narrow
