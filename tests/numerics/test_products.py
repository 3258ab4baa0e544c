"""`compute: fp8`: products are those of a loop over fractions.

Runs with them have the same bits at every stage and on any number of ranks: `test_stages.py` and
`test_order_families.py`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.numerics.networks import GPT
from tests.numerics.runs import config, make, train
from tests.ranks.harness import on_ranks
from zerodrift.dtypes import DType
from zerodrift.engine.habits import products as engine_products
from zerodrift.errors import ModelError
from zerodrift.kernels import products
from zerodrift.kernels.products import (
    EXACT_LENGTH,
    Operand,
    operand,
    product,
    reference_product,
    rounded_once,
)
from zerodrift.policy import LinearProducts

LAYOUT = {torch.float32: (24, -126, 127), torch.bfloat16: (8, -126, 127), torch.float16: (11, -14, 15)}
"""dtype -> (bits of a significand, least and largest exponent of a normal value)."""

E4M3 = sorted(
    {Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)}
    | {Fraction(8 + m, 8) * Fraction(2) ** e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)}
)


def nearest(value: Fraction, bits: int, least: int, largest: int) -> float:
    """Round to a format with so many bits, ties to even; beyond its largest value to infinity."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(math.floor(math.log2(magnitude)), least)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > least and magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - bits + 1)
    rounded = round(magnitude / unit) * unit  # Python rounds fractions half to even
    found = math.inf if rounded >= Fraction(2) ** (largest + 1) else float(rounded)
    return math.copysign(found, value)


def encoded(row: list[float]) -> tuple[list[Fraction], float]:
    """Return the numbers of a row's codes and its scale, as the format is defined."""
    if not all(map(math.isfinite, row)):
        return [Fraction(0)] * len(row), math.nan
    amax = max(map(abs, row), default=0.0)
    if amax < 2.0**-96:
        return [Fraction(0)] * len(row), 0.0
    scale = np.float32(min(amax, 2.0**126)) / np.float32(448)
    codes = []
    for value in row:
        quotient = Fraction(float(np.float32(value) / scale))
        magnitude = min(abs(quotient), Fraction(448))
        above = min(bisect.bisect_left(E4M3, magnitude), len(E4M3) - 1)
        near = [(abs(magnitude - E4M3[k]), k % 2, E4M3[k]) for k in (max(above - 1, 0), above)]
        number = min(near)[2]  # of two that are as near, the even code
        codes.append(-number if quotient < 0 else number)
    return codes, float(scale)


def by_hand(left: Tensor, right: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return the product of two matrices by a loop over fractions. Shapes [m, k], [n, k] -> [m, n]."""
    rows, columns = ([encoded(row) for row in of.double().tolist()] for of in (left, right))
    result = torch.empty(len(rows), len(columns), dtype=dtype)
    for i, (one, one_scale) in enumerate(rows):
        for j, (other, other_scale) in enumerate(columns):
            dot = float(sum((a * b for a, b in zip(one, other, strict=True)), Fraction(0)))
            value = dot * (one_scale * other_scale) + (0.0 if bias is None else float(bias[j]))
            known = math.isfinite(value)
            result[i, j] = nearest(Fraction(value), *LAYOUT[dtype]) if known else value
    return result


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor, with one NaN for all."""
    whole = torch.where(tensor.isnan(), torch.nan, tensor)
    return whole.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


def matrix(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, columns, generator=draws).mul(2).exp2()
    return (torch.randn(rows, columns, generator=draws) * spread).to(dtype)


def special(dtype: torch.dtype) -> Tensor:
    """Return rows of zeros of both signs, tiny and huge values, ties of e4m3, infinities and NaNs."""
    info = torch.finfo(dtype)
    rows = [
        [0.0] * 6,
        [-0.0, 0.0, -0.0, 0.0, -0.0, 0.0],
        [info.tiny, -info.tiny / 2, info.tiny / 4, 0.0, info.tiny, -info.tiny],
        [info.max, -info.max, 1.0, info.max / 3, 0.0, -2.0],
        [448.0, 17.0, -19.0, 0.0009765625, 0.0029296875, -232.0],
        [1.0, math.inf, 0.0, 2.0, 3.0, 4.0],
        [1.0, math.nan, 0.0, 2.0, 3.0, 4.0],
        [2.0**-10, 3.0, -5.0, 7.0, -11.0, 13.0],
    ]
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("given", list(LAYOUT), ids=str)
@pytest.mark.parametrize("dtype", list(LAYOUT), ids=str)
def test_a_product_is_the_loop_over_fractions(dtype: torch.dtype, given: torch.dtype) -> None:
    pairs = [(matrix(9, 40, 1, given), matrix(7, 40, 2, given)), (special(given), special(given))]
    for left, right in pairs:
        for bias in (None, matrix(1, len(right), 3, given)[0]):
            found = product(operand(left), operand(right), dtype, bias)
            assert torch.equal(bits(found), bits(by_hand(left, right, dtype, bias)))


@pytest.mark.parametrize("dtype", list(LAYOUT), ids=str)
def test_results_are_rounded_once(dtype: torch.dtype) -> None:
    """Values lie just beside a tie, which an intermediate fp32 would make one."""
    count, *_ = LAYOUT[dtype]
    ties = [1 + Fraction(2 * k + 1, 2**count) for k in range(8)]
    near = [float(tie + shift) for tie in ties for shift in (0, Fraction(1, 2**45), Fraction(-1, 2**45))]
    near += [0.0, 2.0**-160, 2.0**-134, 3 * 2.0**-135, 2.0**128, 3.39e38, 65520.0, 65519.9]
    values = [sign * value for sign in (1.0, -1.0) for value in near]
    found = rounded_once(torch.tensor(values, dtype=torch.float64), dtype)
    expected = torch.tensor([nearest(Fraction(value), *LAYOUT[dtype]) for value in values]).to(dtype)
    assert torch.equal(found, expected)
    unlike = torch.tensor(values, dtype=torch.float64).to(dtype) != expected
    assert bool(unlike.any()) is (dtype is not torch.float32), "torch's own cast rounds twice"


@pytest.mark.parametrize("length", [EXACT_LENGTH, EXACT_LENGTH + 1, 3 * EXACT_LENGTH])
def test_long_sums_are_exact(length: int) -> None:
    """The largest products meet 64 of the smallest, of which an fp64 sum of more may lose some."""
    codes = torch.full((2, length), 448.0)
    codes[:, 7:71], codes[1, 71] = 2.0**-9, -448.0
    of = Operand(codes.to(torch.float8_e4m3fn), torch.ones(2))
    exact = [(length - many) * 448**2 + Fraction(64, 2**18) for many in (64, 66)]
    assert products._exact_dot(of.codes, of.codes)[0].tolist() == list(map(float, exact))


SIZES = [(5, 32, 48), (0, 16, 16), (7, 0, 16), (3, 21, 10)]
"""(rows, summed length, columns)"""


def require_near(scaled: Any, sizes: tuple[int, int, int], dtype: torch.dtype, of_sums: float) -> None:
    """Compare a product with the definition, up to a share of the sum of magnitudes, and one rounding."""
    rows, length, columns = sizes
    left, right = operand(matrix(rows, length, 4)), operand(matrix(columns, length, 5))
    bias = matrix(1, columns, 6, dtype)[0]
    found, exact = (of(left, right, dtype, bias) for of in (scaled, reference_product))
    assert found.shape == exact.shape == (rows, columns)
    sums = reference_product(
        *(Operand(of.codes.float().abs().to(of.codes.dtype), of.scales) for of in (left, right)),
        torch.float32,
    )
    allowed = of_sums * sums + exact.float().abs() * torch.finfo(dtype).eps
    assert bool(((found.float() - exact.float()).abs() <= allowed).all())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", list(LAYOUT), ids=str)
def test_torchs_scaled_product_differs_by_its_accumulator_alone(
    dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    """A CPU, whose accumulator is fp32, makes the calls of a GPU: padding and places are right."""
    require_near(products.scaled_product, sizes, dtype, sizes[1] * 2.0**-23)


# --- the three products of a layer ------------------------------------------------------------------------

FP8, BF16 = DType.FP8_ROW, DType.BF16


def formula(part: DType, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a product of rows with rows, by the plan of one of the three products."""
    if part is FP8:
        return by_hand(left, right, dtype)
    return F.linear(left.bfloat16(), right.bfloat16()).to(dtype)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("layout", ["linear", "addmm", "matmul", "transposed"])
@pytest.mark.parametrize("cells", [(FP8, FP8, FP8), (FP8, FP8, BF16), (BF16, BF16, FP8)], ids=str)
def test_gradients_are_products_of_their_own(
    cells: tuple[DType, DType, DType], layout: str, autocast: bool
) -> None:
    """Inputs have two leading dimensions; the sides are quantised along the summed one."""
    own = torch.float32 if autocast else torch.bfloat16
    weight = matrix(6, 10, 1, own)  # [out, in]
    stored = weight.clone() if layout in ("linear", "transposed") else weight.t().contiguous()
    parameter = nn.Parameter(stored)
    parameter.__class__ = engine_products.class_for("layer.weight", LinearProducts(*cells))
    bias = matrix(1, 6, 2, own)[0].requires_grad_(layout in ("linear", "addmm"))
    x = matrix(12, 10, 3, own).view(3, 4, 10).requires_grad_()
    calls: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: F.linear(x, parameter, bias=bias),
        "addmm": lambda: torch.addmm(bias, x.view(-1, 10), parameter).view(3, 4, 6),
        "matmul": lambda: x @ parameter,
        "transposed": lambda: x.view(-1, 10).mm(parameter.t()).view(3, 4, 6),
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = calls[layout]()
    assert output.dtype is torch.bfloat16
    grad = matrix(12, 6, 4, torch.bfloat16)
    output.backward(grad.view(3, 4, 6))
    rows = x.detach().view(-1, 10)
    if cells[0] is FP8:
        added = bias.detach() if bias.requires_grad else None
        assert torch.equal(output.view(-1, 6), by_hand(rows, weight, torch.bfloat16, added))
    assert x.grad is not None and parameter.grad is not None
    assert torch.equal(x.grad.view(-1, 10), formula(cells[1], grad, weight.t(), own))
    found = parameter.grad if stored.shape == weight.shape else parameter.grad.t()
    assert torch.equal(found, formula(cells[2], grad.t(), rows.t(), own))
    if bias.requires_grad:
        assert torch.equal(bias.grad, grad.sum(0).to(own))


@pytest.mark.parametrize("cells", [(FP8, FP8, FP8), (FP8, FP8, BF16)], ids=str)
def test_experts_of_a_stack_are_layers_of_their_own(cells: tuple[DType, DType, DType]) -> None:
    """Each expert's rows have their own products; one has no rows, and the last rows have no expert."""
    stack = matrix(3 * 6, 10, 1, torch.bfloat16).view(3, 6, 10)
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)
    x, grad = matrix(11, 10, 2, torch.bfloat16), matrix(11, 6, 3, torch.bfloat16)
    expected: list[Tensor] = [torch.zeros(11, 6, dtype=x.dtype), torch.zeros_like(x), torch.zeros_like(stack)]
    for number, rows in enumerate((slice(0, 4), slice(4, 4), slice(4, 9))):
        expected[0][rows] = by_hand(x[rows], stack[number], x.dtype)
        expected[1][rows] = formula(cells[1], grad[rows], stack[number].t(), x.dtype)
        expected[2][number] = formula(cells[2], grad[rows].t(), x[rows].t(), x.dtype)
    for is_grouped in (True, False):
        parameter = nn.Parameter(stack.clone())
        parameter.__class__ = engine_products.class_for("experts.up", LinearProducts(*cells))
        given = x.clone().requires_grad_()
        if is_grouped:
            output = F.grouped_mm(given, parameter.transpose(-2, -1), offs=ends)
        else:
            parts = [F.linear(given[:4], parameter[0]), F.linear(given[4:9], parameter[torch.tensor(2)])]
            output = torch.cat([*parts, x.new_zeros(2, 6)])
        output.backward(grad)
        for found, wanted in zip((output, given.grad, parameter.grad), expected, strict=True):
            assert found is not None and torch.equal(found, wanted)


# --- runs -------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Experts in two parameters, whose products are grouped."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=len(self.up)).cumsum(0).to(torch.int32)
        inner = F.gelu(F.grouped_mm(x[order], self.up.transpose(-2, -1), offs=ends))
        made = F.grouped_mm(inner, self.down.transpose(-2, -1), offs=ends)
        return torch.zeros_like(x).index_copy(0, order, made)


class Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4, bias=False), Stack(width)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        return (self.experts(flat, chosen) * weights[:, None].to(x.dtype)).view_as(x)


def stacked(layers: int = 1, tied: bool = True) -> GPT:
    model = GPT(layers, tied=tied)
    torch.manual_seed(1)
    for layer in model.layers:
        layer.mlp = Mixture(32)
    return model


class Elsewhere(GPT):
    """A GPT that multiplies by the weight of a layer outside of the layer, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(layers=1)
        self.way = way

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens))
        weight = self.layers[0].attention.out.weight
        x = x + WAYS[self.way](x, weight)
        return self.head(self.norm(x))


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "transposed": lambda x, weight: x @ weight.t(),
    "einsum": lambda x, weight: torch.einsum("bti,oi->bto", x, weight),
    "from the left": lambda x, weight: (weight @ x.transpose(-1, -2)).transpose(-1, -2),
    "alone": lambda x, weight: (weight @ weight.t()).norm() + weight.float().pow(2).sum().to(x.dtype),
}


@pytest.mark.parametrize("way", list(WAYS))
@on_ranks(1)
def test_a_product_outside_of_the_layer_is_in_fp8_or_refused(way: str) -> None:
    engine = make(config(3, "bf16", precision={"compute": "fp8"}), Elsewhere(way))
    if way in ("linear", "transposed", "alone"):
        assert all(map(math.isfinite, train(engine, 2).losses))
        return
    with pytest.raises(ModelError, match=r"layers\.0\.attention.out\.weight.*as a linear layer does"):
        train(engine, 1)
