"""Compiled code for narrow formats has the bits of the definition, which are those of the formulas."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK, NARROW, DType, Element, Format, ScaleRule
from zerodrift.kernels import block_keys, build, narrow, native, parameter_key
from zerodrift.kernels.native import contraction

FLAT = [dtype for dtype, form in NARROW.items() if form.is_flat]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

compiled = pytest.mark.skipif(native.library() is None, reason="no compiled kernels on this machine")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    odd = [
        0.0,
        -0.0,
        torch.inf,
        -torch.inf,
        torch.nan,
        1e-45,
        -1e-40,
        2.0**-96,
        -(2.0**-97),
        3.4e38,
        2.0**126,
    ]
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
@pytest.mark.parametrize("kind", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FLAT, ids=str)
def test_compiled_equals_the_definition(dtype: DType, kind: torch.dtype) -> None:
    for number, values in enumerate(batches(dtype, kind)):
        require_definition(dtype, values, number, DTYPES)


@pytest.mark.parametrize("dtype", FLAT, ids=str)
def test_without_compiled_code_the_definition_runs(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    for number, values in enumerate(itertools.islice(batches(dtype, torch.float32), 8)):
        require_definition(dtype, values, number, DTYPES)


@compiled
@pytest.mark.long
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_plain_loops_equal_the_definition(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library for any processor has the same bits as the vectors of this one, compiled quickly too."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    plain = build.native_flags(astuple(contraction()))[-1]
    build.compile_library(compiler, [(*plain, *(["-O1"] if quick else []))], tmp_path / "plain.so")
    library = native.Library(tmp_path / "plain.so", "")
    monkeypatch.setattr(native, "library", lambda: library)
    for dtype in FLAT:
        test_compiled_equals_the_definition(dtype, torch.bfloat16)
        test_any_code_and_scale_is_decoded(dtype)


@compiled
@pytest.mark.parametrize("scale", ["fp32", "e8m0"])
@pytest.mark.parametrize("rule", ["floor", "ceil"])
@pytest.mark.parametrize("element", Element)
def test_other_rules_and_scales(
    element: Element, rule: ScaleRule, scale: Literal["fp32", "e8m0"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats without a name agree too, such as the power-of-two scales of DeepSeek's files."""
    monkeypatch.setitem(NARROW, DType.FP8_128, Format(element, 64, scale, rule))
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
def test_neither_threads_nor_slices_change_a_bit(dtype: DType) -> None:
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
    parts = [torch.empty(dtype.nbytes(256 * count), dtype=torch.uint8) for count in (1, 5, 1018)]
    cuts = [part.tensor_split([dtype.nbytes(0)])[1] for part in parts]
    for part, piece in zip(cuts, values.split([256, 5 * 256, 1018 * 256]), strict=True):
        narrow.encode(dtype, piece, part)
    bits = NARROW[dtype].element.bits
    codes = [part[: 256 * count * bits // 8] for part, count in zip(parts, (1, 5, 1018), strict=True)]
    scales = [part[256 * count * bits // 8 :] for part, count in zip(parts, (1, 5, 1018), strict=True)]
    assert torch.equal(torch.cat([*codes, *scales]), whole)


@pytest.mark.parametrize(
    ("numel", "nbytes", "kind"), [(100, 104, torch.uint8), (256, 263, torch.uint8), (256, 264, torch.int8)]
)
def test_a_run_that_does_not_fit_is_refused_before_an_address_is_used(
    numel: int, nbytes: int, kind: torch.dtype
) -> None:
    values, packed = torch.zeros(numel), torch.zeros(nbytes, dtype=kind)
    with pytest.raises(AssertionError, match="no run of"):
        narrow.encode(DType.FP8_128, values, packed)
    with pytest.raises(AssertionError, match="no run of"):
        narrow.decode(DType.FP8_128, packed, values)


def test_strided_values_are_taken() -> None:
    values = torch.randn(512, generator=generator(8))
    for dtype in FLAT:
        packed, decoded = reference(dtype, values[::2].contiguous())
        found = torch.zeros_like(packed)
        narrow.encode(dtype, values[::2], found)
        out = torch.zeros(512)
        narrow.decode(dtype, found, out[::2])
        assert torch.equal(found, packed) and torch.equal(out[::2], decoded)


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


@pytest.mark.parametrize(
    ("keys", "dtype", "found"),
    [(2, torch.int64, "2 keys in torch.int64 for 1 blocks"), (1, torch.int32, "1 keys in torch.int32")],
)
def test_draws_of_other_runs_are_refused(keys: int, dtype: torch.dtype, found: str) -> None:
    draws, packed = narrow.Draws(torch.zeros(keys, dtype=dtype), 0), torch.empty(260, dtype=torch.uint8)
    with pytest.raises(AssertionError, match=found):
        narrow.encode(DType.INT8_256, torch.ones(256), packed, draws)


def test_nf4_is_only_rounded_to_nearest() -> None:
    values, packed = torch.ones(64), torch.empty(36, dtype=torch.uint8)
    for library in (native.library(), None):
        with pytest.MonkeyPatch.context() as patched, pytest.raises(AssertionError, match="to nearest"):
            patched.setattr(native, "library", lambda library=library: library)
            narrow.encode(DType.NF4_64, values, packed, draws_of(values))


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
        if form.rule == "floor":
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


@pytest.mark.parametrize("dtype", [d for d in FLAT if NARROW[d].rule != "exact"], ids=str)
def test_a_power_of_two_scale_survives_bf16(dtype: DType) -> None:
    """Decoded values have few bits: rounded to bf16 and encoded again they have the same codes."""
    values = torch.randn(1 << 16, generator=generator(9))
    packed, decoded = reference(dtype, values)
    assert torch.equal(reference(dtype, decoded.bfloat16().float())[0], packed)


# --- beside other libraries -------------------------------------------------------------------------------


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    return importlib.import_module("formats")


@pytest.mark.parametrize("peer", ["ml_dtypes", "torchao", "bitsandbytes"])
def test_what_differs_from_a_peer_does_so_by_a_known_rule(peer: str, beside: ModuleType) -> None:
    pytest.importorskip(peer)
    found = list(beside.COMPARISONS[peer](beside.sample(1 << 18)))
    assert len(found) >= 2
    for each in found:
        assert each.unexplained == 0, each
        same = (each.codes[0] == each.codes[1]).float().mean()
        assert same > (0.6 if each.dtype == "fp8-128x128" else 0.9), each


def test_a_code_or_scale_that_no_rule_explains_is_counted(beside: ModuleType) -> None:
    codes, scales = torch.zeros(3, 8, dtype=torch.uint8), torch.ones(3)
    other, scaled = codes.clone(), scales.clone()
    other[0, 1], other[2, 3], scaled[1] = 1, 1, 2.0
    rule = torch.zeros(3, 8, dtype=torch.bool)
    rule[2] = True
    found = beside.Comparison("fp8-128", "planted", (codes, other), (scales, scaled), {"a rule": rule})
    assert found.why == {"a rule": 1} and found.unexplained == 2
