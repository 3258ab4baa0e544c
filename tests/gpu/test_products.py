"""Products of fp8 operands on an accelerator: near the definition, alike at all stages, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.device import DEVICE, deterministic, needs_accelerator
from tests.gpu.test_engine import run
from tests.numerics.runs import same
from tests.numerics.test_products import LAYOUT, SIZES, require_near
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
@pytest.mark.parametrize("dtype", list(LAYOUT), ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_padding_and_places_are_those_of_the_definition(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    def there(of: products.Operand) -> products.Operand:
        return products.Operand(of.codes.to(DEVICE), of.scales.to(DEVICE))

    def scaled(left: products.Operand, right: products.Operand, dtype: torch.dtype, bias: Any) -> Any:
        return products.product(there(left), there(right), dtype, bias.to(DEVICE)).cpu()

    require_near(scaled, sizes, dtype, 2.0**-10)


@needs_products
def test_all_stages_are_the_same_bits_in_fp8() -> None:
    with deterministic():
        runs = [run(stage, "bf16", **FP8) for stage in range(4)]
        plain = run(0, "bf16")
    assert same(runs) == []
    assert runs[0].losses != plain.losses and runs[0].losses == pytest.approx(plain.losses, rel=0.02)
