"""Late weight gradients are formed from a queue and summed like others; `test_pipelines.py` runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.numerics.networks import GPT, VOCABULARY, WIDTH, batch
from tests.numerics.runs import config, make
from zerodrift.errors import ModelError
from zerodrift.pipeline.deferred import defer_weight_grads


class Product(nn.Module):
    """A product with a weight, in one of the forms that models use."""

    def __init__(self, way: str) -> None:
        super().__init__()
        shape, self.product = PRODUCTS[way]
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run on `x`. Shape [2, 5, 8]."""
        return self.product(x, x.reshape(-1, 8), self.weight, self.bias)


ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)
PRODUCTS: dict[str, Any] = {
    "linear with bias": ((16, 8), lambda x, flat, w, b: F.linear(x, w, bias=b)),
    "one of a stack": ((3, 16, 8), lambda x, flat, w, b: F.linear(x, w[1]) + F.linear(x, w[torch.tensor(2)])),
    "transposed": ((8, 16), lambda x, flat, w, b: F.linear(x, w.t())),
    "matmul": ((8, 16), lambda x, flat, w, b: x @ w),
    "addmm": ((8, 16), lambda x, flat, w, b: torch.addmm(b, flat, w)),
    "batched, transposed": ((2, 16, 8), lambda x, flat, w, b: x @ w.transpose(1, 2)),
    "grouped": ((3, 8, 16), lambda x, flat, w, b: F.grouped_mm(flat, w, offs=ENDS)),
}
"""Name -> shape of the weight, and the product of (x, x as a matrix, weight, bias)."""


def backward(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Return the output for `x`, and the gradients of a loss with respect to `x` and every parameter."""
    x = x.clone().requires_grad_()
    out = module(x)
    (out.double() * torch.linspace(-1, 1, out.numel()).double().view_as(out)).sum().backward()
    return out.detach(), {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", PRODUCTS)
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
