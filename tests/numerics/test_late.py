"""Late weight gradients are formed from a queue, in any order, at every stage, and summed like others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.numerics.networks import GPT, VOCABULARY, WIDTH, batch
from tests.numerics.runs import config, gradients, make
from tests.ranks.harness import on_ranks
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError
from zerodrift.pipeline.deferred import defer_weight_grads

STEPS, MICRO_BATCHES = 2, 3


class Product(nn.Module):
    """A product with a weight, in one of the forms that models use."""

    SHAPES = {
        "linear": (16, 8), "linear with bias": (16, 8), "one of a stack": (3, 16, 8), "transposed": (8, 16),
        "matmul": (8, 16), "matmul of one of a stack": (3, 8, 16), "mm": (8, 16), "addmm": (8, 16),
        "bmm": (2, 8, 16), "batched matmul": (2, 8, 16), "batched, transposed": (2, 16, 8),
        "grouped": (3, 8, 16), "grouped, transposed": (3, 16, 8),
    }  # fmt: skip

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(self.SHAPES[way]))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run on `x`. Shape [2, 5, 8]."""
        return PRODUCTS[self.way](x, x.reshape(-1, 8), self.weight, self.bias)


ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)
PRODUCTS: dict[str, Any] = {
    "linear": lambda x, flat, w, b: F.linear(x, w),
    "linear with bias": lambda x, flat, w, b: F.linear(x, w, bias=b),
    "one of a stack": lambda x, flat, w, b: F.linear(x, w[1]) + F.linear(x, w[torch.tensor(2)]),
    "transposed": lambda x, flat, w, b: F.linear(x, w.t()),
    "matmul": lambda x, flat, w, b: x @ w,
    "matmul of one of a stack": lambda x, flat, w, b: torch.matmul(x, w[1]) + x.matmul(w[0]),
    "mm": lambda x, flat, w, b: flat.mm(w),
    "addmm": lambda x, flat, w, b: torch.addmm(b, flat, w),
    "bmm": lambda x, flat, w, b: torch.bmm(x, w),
    "batched matmul": lambda x, flat, w, b: x @ w,
    "batched, transposed": lambda x, flat, w, b: x @ w.transpose(1, 2),
    "grouped": lambda x, flat, w, b: F.grouped_mm(flat, w, offs=ENDS),
    "grouped, transposed": lambda x, flat, w, b: F.grouped_mm(flat, w.transpose(1, 2), offs=ENDS),
}


def backward(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Return the output for `x`, and the gradients of a loss with respect to `x` and every parameter."""
    x = x.clone().requires_grad_()
    out = module(x)
    (out.double() * torch.linspace(-1, 1, out.numel()).double().view_as(out)).sum().backward()
    return out.detach(), {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", Product.SHAPES)
def test_a_deferred_product_has_torchs_bits_and_its_weights_gradient_later(
    way: str, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    plain = Product(way).to(dtype)
    out, expected = backward(plain, x)
    late = Product(way).to(dtype)
    queue = defer_weight_grads(late)
    found_out, found = backward(late, x)
    assert torch.equal(found_out, out)
    assert torch.equal(found["x"], expected["x"])
    assert found["weight"] is None and len(queue) == (2 if "of a stack" in way else 1)
    assert queue.held > 0
    assert queue.drain() > 0 and queue.held == 0
    assert late.weight.grad is not None and late.weight.grad.dtype is dtype
    tight = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(late.weight.grad, expected["weight"], **tight)
    if expected["bias"] is not None:
        assert torch.equal(found["bias"], expected["bias"])


def test_a_gradient_is_formed_in_the_dtype_of_accumulation_and_not_rounded_before() -> None:
    """A late gradient of bf16 factors is the fp64 product up to fp32 rounding; an eager one is bf16."""
    module = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = torch.ones(32, 128, dtype=torch.float64) @ x.double()

    def error(grad: torch.Tensor) -> float:
        return float((grad.double() - exact).norm() / exact.norm())

    module.weight.grad_dtype = torch.float32
    module(x).sum().backward()
    eager = error(module.weight.grad)
    module.weight.grad = None
    queue = defer_weight_grads(module)
    module(x).sum().backward()
    queue.drain()
    assert module.weight.grad.dtype is torch.float32
    assert error(module.weight.grad) < 1e-6 < 1e-4 < eager


def test_the_bound_on_what_is_held_is_kept_and_changes_nothing() -> None:
    model, other = GPT(), GPT()
    free, bound = defer_weight_grads(model), defer_weight_grads(other, limit=40_000)
    for micro in range(MICRO_BATCHES):
        model(batch(0, 0, micro)).backward()
        other(batch(0, 0, micro)).backward()
        assert bound.held <= 40_000
    assert free.peak > 40_000 >= bound.peak
    assert bound.formed > 0 == free.formed
    free.drain()
    bound.drain()
    for name, parameter in model.named_parameters():
        near = {"rtol": 1e-6, "atol": 1e-8, "msg": name}
        torch.testing.assert_close(other.get_parameter(name).grad, parameter.grad, **near)


def test_one_module_has_one_queue_until_it_is_detached() -> None:
    model = GPT()
    queue = defer_weight_grads(model)
    with pytest.raises(ModelError, match="must have one queue"):
        defer_weight_grads(model.layers[0])
    model(batch(0)).backward()
    assert len(queue) > 0
    queue.detach()
    assert len(queue) == 0 and model.layers[0].mlp.up.weight.grad is not None
    model.zero_grad()
    model(batch(0)).backward()
    assert len(queue) == 0 and model.layers[0].mlp.up.weight.grad is not None
    defer_weight_grads(model)


def full_gradients(engine: Engine, step: int) -> dict[str, torch.Tensor]:
    """Return the gradients of several micro-batches, and update."""
    for micro in range(MICRO_BATCHES):
        engine.backward(engine(batch(step, engine.mesh.rank(), micro)))
        if micro < MICRO_BATCHES - 1:
            engine.step()
    found = gradients(engine)
    assert engine.step().updated
    return found


@pytest.mark.long
@pytest.mark.cells(1)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_all_weight_gradients_queued_to_the_end_of_the_step_equal_eager_ones(
    stage: int, mode: str, moe: bool
) -> None:
    """They agree up to fp32 rounding; in bf16, up to the rounding of each eager product."""
    tolerance = 2e-6 if mode == "fp32" else 2e-2
    eager, late = (make(config(stage, mode, MICRO_BATCHES), GPT(moe=moe)) for _ in range(2))
    queue = defer_weight_grads(late)
    for step in range(STEPS if mode == "fp32" else 1):  # in bf16 the weights differ from then on
        expected, before = full_gradients(eager, step), queue.formed
        found = full_gradients(late, step)
        assert queue.formed - before >= MICRO_BATCHES * 8 and len(queue) == 0
        errors = {n: float((found[n] - v).norm() / v.norm().clamp_min(1e-12)) for n, v in expected.items()}
        assert max(errors.values()) < tolerance, errors


@on_ranks(2)
def test_ranks_may_differ_in_what_is_late() -> None:
    """Rank 1 has no late gradients, so its queue stays empty."""
    for stage in (0, 3):
        engine = make(config(stage, "fp32"), GPT(moe=True))
        rank, queue = engine.mesh.rank(), defer_weight_grads(engine)
        for handle in queue._handles if rank else ():
            handle.remove()
        for step in range(2):
            engine.backward(engine(batch(step, rank)))
            assert bool(len(queue)) == (rank == 0)
            norms = engine.comm.all_gather_object(engine.step().grad_norm)
            assert norms[0] == norms[1] is not None, norms


def test_a_failed_or_forgotten_step_forgets_what_was_queued() -> None:
    engine = make(config(0, "fp32", 2))
    queue = defer_weight_grads(engine)
    engine.backward(engine(batch(0)))
    assert len(queue) > 0
    engine.zero_grad()
    assert len(queue) == 0 and queue.held == 0


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_is_replaced_is_caught(stage: int) -> None:
    engine = make(config(stage, "fp32", 2), GPT(tied=False))
    queue = defer_weight_grads(engine)
    engine.backward(engine(batch(0)))
    queue.drain()
    engine.module.head.weight.grad = torch.ones(VOCABULARY, WIDTH)
    with pytest.raises(ModelError, match=r"(?s)`head\.weight`.*added to.*something else"):
        engine.backward(engine(batch(0)))
        engine.step()
        engine.step()
    engine.zero_grad()
    for _ in range(2):
        engine.backward(engine(batch(0)))
        result = engine.step()
    assert result.updated
    engine.destroy()
