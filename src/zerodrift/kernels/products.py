"""Matrix products of fp8 operands: the exact definition, and the product of a GPU.

An operand is a matrix in e4m3 with one fp32 scale per row, encoded in the format `fp8-row`
(`narrow.py`). The product of two operands sums along their rows: `left [rows, k]` and `right [columns, k]`
give `[rows, columns]`. Element (i, j) is

    dot(left[i], right[j]) * (left scale[i] * right scale[j]) + bias[j]

The dot product of the decoded codes is exact, the rest is computed in fp64, and the result is rounded once,
to the requested dtype. An exact sum has no order, so no bit depends on how it is computed.

A code of e4m3 is a multiple of 2^-9 of at most 448. So a product of two is a multiple of 2^-18, and fp64
holds the sum of up to `EXACT_LENGTH` of them. Longer sums are formed in pieces, which int64 adds exactly.

On CUDA torch's scaled product multiplies the same codes. Its tensor cores do not sum exactly: `deviation`
measures by how much.

Invariant: on a CPU every bit is that of the definition; a device without such a product is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from zerodrift.dtypes import NARROW, DType
from zerodrift.errors import UnsupportedError
from zerodrift.kernels.narrow import scales_of

MULTIPLE = 16
"""Rows and columns of an operand of torch's scaled product on CUDA are multiples of this."""

EXACT_LENGTH = 2**53 // (448 * 512) ** 2
"""Most products of two codes whose sum fp64 holds exactly: 171,196."""

CAPABILITY = (8, 9)
"""Least compute capability of a GPU with products in e4m3."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix in e4m3 with a scale per row. Shapes [rows, k], float8_e4m3fn; [rows], fp32."""

    codes: Tensor
    scales: Tensor


def operand(matrix: Tensor) -> Operand:
    """Encode a matrix row by row, in few passes. Shape [rows, k], any floating dtype.

    A row with an infinity or a NaN has the scale NaN. Its codes mean nothing: no result of it is finite.
    """
    form = NARROW[DType.FP8_ROW]
    amax = matrix.abs().amax(1).float() if matrix.shape[1] else matrix.new_zeros(len(matrix)).float()
    scales = scales_of(form, amax)
    divisors = torch.where(scales > 0, scales, torch.inf)
    largest = form.element.largest
    quotients = (matrix / divisors[:, None]).clamp(-largest, largest)  # promoted to fp32
    return Operand(quotients.to(torch.float8_e4m3fn), scales)


def product(left: Operand, right: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Multiply two operands on their device. Shapes [rows, k], [columns, k] -> [rows, columns]."""
    if left.codes.device.type == "cpu":
        return reference_product(left, right, dtype, bias)
    return scaled_product(left, right, dtype, bias)


def reference_product(
    left: Operand, right: Operand, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Multiply two operands by the definition, in fp64 on their device."""
    return _finished(_exact_dot(left.codes, right.codes), left, right, dtype, bias)


def _exact_dot(left: Tensor, right: Tensor) -> Tensor:
    """Return exact dot products in fp64. A zero is positive, whatever the signs of what was added."""
    length = left.shape[1]
    one, other = left.double(), right.double()
    if length <= EXACT_LENGTH:
        return one @ other.t() + 0.0
    total = torch.zeros(len(left), len(right), dtype=torch.int64, device=left.device)
    for start in range(0, length, EXACT_LENGTH):
        part = slice(start, start + EXACT_LENGTH)
        total += ((one[:, part] @ other[:, part].t()) * 2.0**18).long()
    return total.double() * 2.0**-18


def _finished(dots: Tensor, left: Operand, right: Operand, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Apply the scales and the bias to fp64 dot products, and round the result once."""
    result = dots * (left.scales.double()[:, None] * right.scales.double()[None, :])
    return rounded_once(result if bias is None else result + bias.double(), dtype)


def rounded_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp64 values to the nearest of a dtype, ties to even.

    torch casts fp64 to 16 bits by way of fp32, which rounds twice. Here the fp32 value between is rounded to
    odd: then the second rounding goes where a single one would.
    """
    single = values.float()
    if dtype is torch.float32:
        return single
    lost = values - single.double()
    inexact = (lost != 0) & values.isfinite()
    bits = single.view(torch.int32)
    away = (lost > 0) == ~single.signbit()
    step = torch.where(away, 1, -1).to(torch.int32)
    odd = torch.where(inexact & (bits & 1 == 0), bits + step, bits)
    return odd.view(torch.float32).to(dtype)


# --- on a GPU ---------------------------------------------------------------------------------------------


def obstacle(device: torch.device) -> str:
    """Return why a device has no products of fp8 operands, or `""` if it has them."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"zerodrift has no fp8 product for devices of type {device.type}"
    if torch.version.hip is not None:
        return "zerodrift has no fp8 product for ROCm, whose e4m3 differs between GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return "{} has compute capability {}.{}, and e4m3 needs 8.9".format(name, *capability)
    return ""


def require_products(device: torch.device) -> None:
    """Raise an error that names the device if it has no products of fp8 operands."""
    why = obstacle(device)
    if why:
        must = "must be left out on a device without fp8 products"
        do = "Train on a CPU or on an NVIDIA GPU from Ada or Hopper on, or leave `compute: fp8` out."
        raise UnsupportedError("precision.compute", must, got=why, do=do)


def scaled_product(left: Operand, right: Operand, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Multiply with torch's scaled product. Zeros that pad an operand change no sum."""
    one, other = _padded(left.codes, rows=False), _padded(right.codes, rows=True)
    count = len(right.codes)
    if not count or not len(one):
        return torch.empty(len(one), count, dtype=dtype, device=one.device)
    if dtype is not torch.bfloat16:  # the rowwise product returns bf16 alone on most GPUs
        unit = torch.ones((), device=one.device)
        dots = torch._scaled_mm(one, other.t(), unit, unit, out_dtype=torch.float32)
        return _finished(dots[:, :count].double(), left, right, dtype, bias)
    scales = F.pad(right.scales, (0, len(other) - count))
    added = None if bias is None else F.pad(bias.to(dtype), (0, len(other) - count))
    result = torch._scaled_mm(
        one, other.t(), left.scales[:, None], scales[None, :], bias=added, out_dtype=dtype
    )
    return result[:, :count]


def _padded(codes: Tensor, *, rows: bool) -> Tensor:
    """Append zeros to the rows of codes, and rows of zeros, up to multiples of `MULTIPLE`; at least one."""
    down = -len(codes) % MULTIPLE if rows else 0
    across = -codes.shape[1] % MULTIPLE or (0 if codes.shape[1] else MULTIPLE)
    padded = F.pad(codes.view(torch.uint8), (0, across, 0, down)).view(torch.float8_e4m3fn)
    return padded.contiguous()


@dataclass(frozen=True, slots=True)
class ProductDeviation:
    """A device's products of random operands beside the definition."""

    length: int
    """Products in each sum."""
    differing: float
    """Share of the bf16 results with different bits."""
    largest: float
    """Largest error of a result before it is rounded, relative to the sum of magnitudes."""


def deviation(device: torch.device, length: int = 4096, size: int = 256) -> ProductDeviation:
    """Measure a device's products of normal values against the definition."""
    draws = torch.Generator().manual_seed(0)
    one, other = (operand(torch.randn(size, length, generator=draws)) for _ in range(2))
    exact = reference_product(one, other, torch.bfloat16)
    found = product(_moved(one, device), _moved(other, device), torch.bfloat16).cpu()
    ones = torch.ones(size)
    one, other = Operand(one.codes, ones), Operand(other.codes, ones)
    dots = product(_moved(one, device), _moved(other, device), torch.float32).cpu().double()
    magnitudes = one.codes.double().abs() @ other.codes.double().abs().t()
    errors = (dots - _exact_dot(one.codes, other.codes)).abs() / magnitudes
    return ProductDeviation(length, (found != exact).double().mean().item(), errors.max().item())


def _moved(of: Operand, device: torch.device) -> Operand:
    return Operand(of.codes.to(device), of.scales.to(device))
