"""Compiled code for narrow formats has the bits of the definition, which are those of the formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.numerics.test_fused import GRADIENTS, compiled, generator
from zerodrift.dtypes import BLOCK, NARROW, DType, Element, Format, Scale
from zerodrift.kernels import block_keys, build, narrow, native, parameter_key
from zerodrift.kernels.native import contraction

FLAT = [dtype for dtype, form in NARROW.items() if form.is_flat]


def block_of(dtype: DType) -> int:
    form = NARROW[dtype]
    assert isinstance(form.block, int)
    return form.block


def batches(dtype: DType, kind: torch.dtype) -> Iterator[Tensor]:
    """Yield flat values of whole blocks: usual, wild, special, at and around ties, and any bits at all."""
    block, form = block_of(dtype), NARROW[dtype]
    normal = torch.randn(40 * block, generator=generator(1))
    yield (normal * 0.02).to(kind)
    yield (normal * 10.0 ** (12 * torch.randn(40, generator=generator(2)).repeat_interleave(block))).to(kind)
    yield (normal * 10.0 ** (4 * torch.randn(40 * block, generator=generator(3)))).to(kind)
    numbers = narrow.numbers_of(form.element, torch.device("cpu"))
    numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    around = torch.cat([numbers, middles, middles.nextafter(torch.tensor(9e9)), -middles, middles * 1.001])
    for scale in (1.0, 2.0**-90, 2.0**100, 0.3):
        rows = around[torch.randint(len(around), (16, block), generator=generator(4))] * scale
        rows[:, 0] = form.element.largest * scale
        rows[8:, 1] = 1.9 * form.element.largest * scale  # floor saturates
        yield rows.flatten().to(kind)
    odd = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-40, 2.0**-96, -(2.0**-97)]
    special = (normal * 1e-3).view(40, block).clone()
    for row, value in enumerate([*odd, 2.0**126, -(2.0**127), 3.4e38, 1e-30, 65504.0]):
        special[row, row % block] = value
    special[20:22], special[22], special[23] = 0.0, -0.0, 1e-39
    yield special.flatten().to(kind)
    width = torch.int32 if kind is torch.float32 else torch.int16
    limits = torch.iinfo(width)
    any_bits = torch.randint(limits.min, limits.max + 1, (200 * block,), generator=generator(5))
    finite = any_bits.to(width).view(kind)
    yield finite
    yield torch.where(finite.isfinite(), finite, 0.0).to(kind)
    for blocks in (0, 1, 2, 3, 5):
        yield normal[: blocks * block].to(kind)


def reference(dtype: DType, values: Tensor, draws: narrow.Draws | None = None) -> tuple[Tensor, Tensor]:
    """Return the packed bytes, and their decoded values in the values' dtype."""
    form, shape = NARROW[dtype], (-1, block_of(dtype))
    words = None if draws is None else draws.words(values.numel()).view(shape)
    codes, scales = narrow.reference_encode(form, values.view(shape), words)
    packed = torch.cat([narrow.pack(form.element, codes.flatten()), scales.view(torch.uint8)])
    return packed, narrow.reference_decode(form, codes, scales).flatten().to(values.dtype)


def assert_same(found: Tensor, wanted: Tensor, what: object) -> None:
    """Compare bit for bit, with any NaN equal to any NaN."""
    if found.is_floating_point():
        assert torch.equal(found.isnan(), wanted.isnan()), what
        numbers = ~wanted.isnan()
        bits = torch.int32 if found.dtype is torch.float32 else torch.int16
        found, wanted = found[numbers].view(bits), wanted[numbers].view(bits)
    assert torch.equal(found, wanted), (what, torch.nonzero(found != wanted).flatten()[:8])


DRAWN = [dtype for dtype in FLAT if NARROW[dtype].element is not Element.NF4]


def draws_of(values: Tensor, number: int = 3, where: torch.device | None = None) -> narrow.Draws:
    keys = block_keys(parameter_key("weight"), 7, -(-values.numel() // BLOCK))
    return narrow.Draws(keys if where is None else keys.to(where), number)


def require_definition(
    dtype: DType, values: Tensor, number: int, outs: Iterable[torch.dtype], where: torch.device | None = None
) -> None:
    """Compare codes, decoded values, sums with decoded values, and drawn codes with the definition."""
    packed, decoded = reference(dtype, values.float())
    found, given = torch.full_like(packed, 0xA5, device=where), values.to(where or "cpu")
    narrow.encode(dtype, given, found)
    assert_same(found.cpu(), packed, (dtype, values.dtype, number))
    for kind in outs:
        out = torch.full_like(given, 3.0, dtype=kind)
        narrow.decode(dtype, found, out)
        assert_same(out.cpu(), decoded.to(kind), (dtype, values.dtype, number, kind))
        held = (values.float() * 0.3).flip(0).to(kind)
        out.copy_(held)
        narrow.decode(dtype, found, out, add=True)
        assert_same(out.cpu(), held + decoded.to(kind), (dtype, values.dtype, number, kind, "added"))
    if NARROW[dtype].element is not Element.NF4:
        packed, _ = reference(dtype, values.float(), draws_of(values, number))
        narrow.encode(dtype, given, found, draws_of(values, number, where))
        assert_same(found.cpu(), packed, (dtype, values.dtype, number, "drawn"))


@compiled
@pytest.mark.parametrize("kind", GRADIENTS, ids=str)
@pytest.mark.parametrize("dtype", FLAT, ids=str)
def test_compiled_equals_the_definition(dtype: DType, kind: torch.dtype) -> None:
    for number, values in enumerate(batches(dtype, kind)):
        require_definition(dtype, values, number, GRADIENTS)


@compiled
@pytest.mark.long
def test_plain_loops_equal_the_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library for any processor has the same bits as the vectors of this one."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    plain = build.native_flags(contraction())[-1]
    build.compile_library(compiler, [(*plain, "-O1")], tmp_path / "plain.so")
    library = native.Library(tmp_path / "plain.so", "")
    monkeypatch.setattr(native, "library", lambda: library)
    for dtype in FLAT:
        test_compiled_equals_the_definition(dtype, torch.bfloat16)
        test_any_code_and_scale_is_decoded(dtype)


@compiled
@pytest.mark.parametrize("scale", get_args(Scale))
@pytest.mark.parametrize("element", Element)
def test_other_scales(element: Element, scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats without a name agree too."""
    monkeypatch.setitem(NARROW, DType.FP8_128, Format(element, 64, scale))
    test_compiled_equals_the_definition(DType.FP8_128, torch.float32)


@compiled
@pytest.mark.parametrize("dtype", FLAT, ids=str)
def test_any_code_and_scale_is_decoded(dtype: DType) -> None:
    """Files may hold codes that `encode` never writes: NaN, -128, subnormal and infinite scales."""
    numel = block_of(dtype) * 600
    packed = torch.randint(256, (dtype.nbytes(numel),), generator=generator(6)).to(torch.uint8)
    out, plain = (torch.empty(numel) for _ in range(2))
    narrow.decode(dtype, packed, out)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "library", lambda: None)
        narrow.decode(dtype, packed, plain)
    assert_same(out, plain, dtype)


@compiled
@pytest.mark.parametrize("dtype", FLAT, ids=str)
def test_threads_do_not_change_a_bit(dtype: DType) -> None:
    values = torch.randn(1 << 18, generator=generator(7))
    whole, _ = reference(dtype, values)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = torch.empty_like(whole)
        narrow.encode(dtype, values, found)
        assert torch.equal(found, whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DRAWN, ids=str)
def test_runs_draw_what_their_blocks_draw_in_one_run(dtype: DType) -> None:
    values = torch.randn(1 << 12, generator=generator(11))
    whole, draws = narrow.encode_runs(dtype, values, 1, draws_of(values)), draws_of(values)
    out, other = torch.empty_like(values), torch.empty_like(values)
    narrow.decode_runs(dtype, whole, out, 1)
    narrow.decode_runs(dtype, narrow.encode_runs(dtype, values, 4, draws), other, 4)
    assert torch.equal(out, other)
    again = narrow.encode_runs(dtype, values, 1, draws_of(values, number=4))
    assert not torch.equal(again, whole), "another number draws others"


@pytest.mark.parametrize("dtype", DRAWN, ids=str)
def test_drawn_codes_keep_the_mean(dtype: DType) -> None:
    """Values go to a neighbour above or below, right on average; a number of the format stays."""
    form, count = NARROW[dtype], 1 << 14
    wanted = torch.cat([torch.linspace(-1.0, 1.0, 31), torch.tensor([1e-3, -1e-4, 3e-6])])
    wanted *= form.element.largest
    block = torch.zeros(block_of(dtype))
    block[: len(wanted)] = wanted[: len(block)]
    values = block.repeat(count)
    packed = torch.empty(dtype.nbytes(len(values)), dtype=torch.uint8)
    narrow.encode(dtype, values, packed, draws_of(values))
    found = torch.empty_like(values)
    narrow.decode(dtype, packed, found)
    found = found.view(count, -1).double()
    gaps = found.amax(0) - found.amin(0)
    # Five deviations of the mean of the draws; a share below 2^-16 of a step is never drawn.
    tolerance = gaps * 5 * 0.5 / count**0.5 + form.element.largest * 2.0**-18
    assert ((found.mean(0) - block).abs() <= tolerance).all()
    numbers = narrow.numbers_of(form.element, torch.device("cpu"))
    is_number = (block[:, None] == numbers).any(1)
    assert (gaps[is_number] == 0).all() and (gaps > 0).any()
    assert all(len(column.unique()) <= 2 for column in found.unbind(1))


# --- the definition ---------------------------------------------------------------------------------------


def nearest(element: Element, quotients: Tensor, numbers: Tensor) -> Tensor:
    """Return the codes of quotients by a search over all numbers. A zero has the sign of its quotient."""
    allowed = numbers.abs() <= element.largest
    if element in (Element.E4M3, Element.E5M2, Element.E2M1):
        allowed = allowed & (numbers.signbit() == quotients.signbit()[..., None])
    gaps = (numbers.double() - quotients.double()[..., None]).abs().where(allowed, torch.inf)
    code = torch.arange(len(numbers))
    preference = code if element is Element.NF4 else code % 2
    return preference.where(gaps == gaps.amin(-1, keepdim=True), 999).argmin(-1)


@pytest.mark.parametrize("dtype", FLAT, ids=str)
def test_codes_are_the_nearest_numbers_to_the_quotients(dtype: DType) -> None:
    form = NARROW[dtype]
    element = form.element
    numbers = narrow.numbers_of(element, torch.device("cpu"))
    for values in itertools.islice(batches(dtype, torch.float32), 7):
        blocks = values.view(-1, block_of(dtype))[:16]
        codes, scales = narrow.reference_encode(form, blocks)
        amax = blocks.abs().amax(1)
        wanted = amax / element.largest
        if form.scale == "bf16":
            wanted = wanted.bfloat16().float()
        if form.scale == "e8m0":
            wanted = 2.0 ** (amax.double().log2().floor() - math.floor(math.log2(element.largest))).float()
        quotients = blocks / wanted[:, None]
        if element is Element.NF4:  # a middle of two numbers is rounded to fp32
            middles = (numbers[1:] + numbers[:-1]) / 2
            quotients = quotients.where((quotients[..., None] - middles).abs().amin(-1) > 1e-7, 0.0)
            codes = codes.where(quotients != 0, 7)
        assert torch.equal(codes, nearest(element, quotients, numbers).to(torch.uint8))
        assert torch.equal(
            narrow.reference_decode(form, codes, scales), numbers[codes.int()] * wanted[:, None]
        )


def test_blocks_without_a_usable_scale() -> None:
    """Zeros and tiny values become zeros; a NaN or an infinity fills its block, so that it is found."""
    for dtype in FLAT:
        block = block_of(dtype)
        values = torch.ones(6, block)
        values[0], values[1], values[2, 1:] = 0.0, -0.0, 0.5
        values[3, 2], values[4, 3], values[5] = torch.inf, torch.nan, -(2.0**-97)
        found = narrow.round_trip(dtype, values.flatten()).view(6, block)
        assert (found[[0, 1, 5]].view(torch.int32) == 0).all(), "positive zeros"
        rounded = 2.0**-8 if NARROW[dtype].scale == "bf16" else 0.0
        assert abs(found[2, 0] - 1.0) <= rounded and found[2].isfinite().all()
        assert found[3:5].isnan().all()
        largest = torch.full((block,), -torch.finfo(torch.float32).max)
        found = narrow.round_trip(dtype, largest)
        assert found.isfinite().all() and (found < -(2.0**125)).all()


# --- beside other libraries -------------------------------------------------------------------------------
