"""Products of fp8 operands on an accelerator: near the definition, alike at all stages, or refused."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.device import DEVICE, deterministic, needs_accelerator
from tests.gpu.test_engine import run
from tests.numerics.runs import same
from tests.numerics.test_products import matrix
from zerodrift.errors import UnsupportedError
from zerodrift.kernels import products

pytestmark = needs_accelerator
WHY = "" if DEVICE.type == "cpu" else products.obstacle(DEVICE)
FP8 = {"precision": {"compute": "fp8"}}
needs_products = pytest.mark.skipif(bool(WHY), reason=WHY)


@pytest.mark.skipif(not WHY, reason="this device has fp8 products")
def test_a_device_without_fp8_products_is_an_error_that_says_which() -> None:
    with pytest.raises(UnsupportedError, match=r"`precision.compute`: must be left out on a device without"):
        run(3, "bf16", **FP8)


@needs_products
@pytest.mark.parametrize("length", [64, 4096])
def test_a_device_is_near_exact_sums(length: int) -> None:
    """Hopper's tensor cores keep about 14 bits in an accumulation; long sums are added in fp32."""
    measured = products.deviation(DEVICE, length)
    assert measured.largest < 2.0**-10 and measured.differing < 0.5, measured


@needs_products
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(5, 32, 48), (0, 16, 16), (7, 0, 16), (3, 21, 10)])
def test_padding_and_places_are_those_of_the_definition(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows, length, columns = sizes
    left, right = products.operand(matrix(rows, length, 4)), products.operand(matrix(columns, length, 5))
    bias = matrix(1, columns, 6, dtype)[0]
    there = [products.Operand(of.codes.to(DEVICE), of.scales.to(DEVICE)) for of in (left, right)]
    found = products.product(there[0], there[1], dtype, bias.to(DEVICE)).cpu()
    exact = products.reference_product(left, right, dtype, bias)
    parts = [products.Operand(of.codes.float().abs().to(of.codes.dtype), of.scales) for of in (left, right)]
    sums = products.reference_product(parts[0], parts[1], torch.float32)
    allowed = 2.0**-10 * sums + exact.float().abs() * torch.finfo(dtype).eps
    assert found.shape == exact.shape
    assert bool(((found.float() - exact.float()).abs() <= allowed).all())


@needs_products
def test_all_stages_are_the_same_bits_in_fp8() -> None:
    with deterministic():
        runs = [run(stage, "bf16", **FP8) for stage in range(4)]
        plain = run(0, "bf16")
    assert same(runs) == []
    assert runs[0].losses != plain.losses and runs[0].losses == pytest.approx(plain.losses, rel=0.02)
