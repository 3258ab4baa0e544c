"""Narrow formats beside other libraries' numbers, and what encoding and decoding cost beside a copy.

    python bench/formats.py     # peers that are not installed are left out

The peers are ml_dtypes for single elements, torchao for blocks in fp8, MX and int8, and bitsandbytes for NF4
and rows in int8. Values are those of weights, wild ones over all magnitudes, and blocks with zeros,
subnormals, infinities and NaNs. Every code and scale that differs is put down to a rule in which the peer
differs, each a condition on the values that is checked; the run fails where one is left over. Times are those
of one thread on its processor, medians of rounds in turns with a copy of as many fp32 values.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from result import Result, flags
from update import count

from zerodrift.dtypes import NARROW, DType, Element, Format
from zerodrift.kernels import narrow

PEERS = ("ml_dtypes", "torchao", "bitsandbytes")
WIDTH = 1024
"""Columns of the matrix that the values are, where blocks are rows or tiles."""

SCALE = "no usable scale"
CAP = "a largest magnitude above 2^126"
SATURATION = "beyond the largest number"
TIE = "within two ulps of a tie"


@dataclass
class Comparison:
    """The codes and scales of one format, ours and a peer's. Shapes [blocks, elements] and [blocks]."""

    dtype: str
    peer: str
    codes: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    rules: dict[str, Tensor]
    """Reason why a code may differ -> mask of the codes, in their shape."""
    note: str = ""
    """A remark that holds for every value."""
    why: dict[str, int] = field(default_factory=dict)
    """Rule -> the differing codes and scales that it accounts for; each counts for its first rule."""

    def __post_init__(self) -> None:
        differing = self.differing_codes
        scales = self.differing_scales
        for rule, where in self.rules.items():
            here = differing & where
            blocks = scales & where.any(1)
            if found := int(here.sum() + blocks.sum()):
                self.why[rule] = found
            differing, scales = differing & ~here, scales & ~blocks
        self.unexplained = int(differing.sum() + scales.sum())

    @property
    def differing_codes(self) -> Tensor:
        return self.codes[0] != self.codes[1]

    @property
    def differing_scales(self) -> Tensor:
        ours, theirs = self.scales
        return (ours != theirs) & ~(ours.isnan() & theirs.isnan())


def sample(numel: int) -> Tensor:
    """Return fp32 values, a matrix of WIDTH columns: half of them like weights, then wild, then special."""
    rows = max(-(-numel // WIDTH // 128), 3) * 128
    made = torch.Generator().manual_seed(0)
    values = torch.randn(rows, WIDTH, generator=made) * 0.02
    wild = values[rows // 2 :]
    wild *= 10.0 ** (10 * torch.randn(len(wild), WIDTH // 32, generator=made)).repeat_interleave(32, 1)
    special = values[-64:].view(-1, 32)
    special.copy_(torch.randn(special.shape, generator=made))
    odd = [torch.nan, torch.inf, -torch.inf, 1e-45, -1e-40, 2.0**-97, 2.0**-96, 2.0**126, 3.4e38, -0.0, 1e-30]
    places = torch.randint(special.numel(), (200,), generator=made)
    special.view(-1)[places] = torch.tensor(odd).repeat(20)[:200]
    special[:256:2], special[1:256:4], special[3:256:8] = 0.0, 1e-39, -0.0
    return values


def numbers_of(form: Format, blocks: Tensor) -> dict[str, Any]:
    """Return our codes and scales, and the values that the rules depend on."""
    codes, scales = narrow.reference_encode(form, blocks)
    wide = scales if form.scale == "fp32" else narrow.powers_of(scales)
    amax = blocks.abs().amax(1)
    quotients = blocks / torch.where(wide > 0, wide, 1.0)[:, None]
    around = [quotients * (1 + error) for error in (2.0**-22, -(2.0**-22))]
    below, above = (narrow.codes_of(form.element, near.nan_to_num(0.0)) for near in around)
    everywhere = torch.ones_like(blocks, dtype=torch.bool)
    rules = {
        SCALE: ((amax < narrow.LEAST) | ~amax.isfinite())[:, None] & everywhere,
        CAP: (amax > narrow.MOST)[:, None] & everywhere,
        SATURATION: quotients.abs() > form.element.largest,
        TIE: below != above,
    }
    return {"codes": codes, "scales": scales, "wide": wide, "quotients": quotients, "rules": rules}


def comparison(
    dtype: DType | str,
    form: Format,
    peer: str,
    blocks: Tensor,
    theirs: tuple[Tensor, Tensor],
    *rules: str,
    note: str = "",
) -> Comparison:
    """Compare with a peer's codes, uint8, and scales, fp32 or the exponents of e8m0. Rules may differ."""
    ours = numbers_of(form, blocks)
    codes, scales = theirs
    allowed = {name: ours["rules"][name] for name in rules}
    codes, scales = codes.view(torch.uint8).view(blocks.shape), scales.view(-1)
    return Comparison(str(dtype), peer, (ours["codes"], codes), (ours["scales"], scales), allowed, note)


def elements(values: Tensor) -> Iterator[Comparison]:
    """Compare single elements, as ml_dtypes converts our quotients."""
    import ml_dtypes
    import numpy as np

    for dtype, name in {
        DType.FP8_128: "float8_e4m3fn",
        DType.E5M2_128: "float8_e5m2",
        DType.MXFP8: "float8_e4m3fn",
        DType.MXFP4: "float4_e2m1fn",
        DType.INT8_256: "int8",
        DType.INT4_128: "int4",
    }.items():
        form = NARROW[dtype]
        assert isinstance(form.block, int)
        blocks = values.view(-1, form.block)
        ours = numbers_of(form, blocks)
        usable = ~ours["rules"][SCALE].any(1)
        quotients = ours["quotients"][usable].numpy()
        whole = form.element in (Element.INT8, Element.INT4)
        kind = np.int8 if name == "int8" else getattr(ml_dtypes, name)
        given = np.rint(quotients) if whole else quotients
        codes = torch.from_numpy(given.astype(kind).view(np.uint8).copy())
        if name == "int4":
            codes &= 0xF
        rules = {} if dtype is DType.MXFP4 else {SATURATION: ours["rules"][SATURATION][usable]}
        scales = ours["scales"][usable]
        note = "NumPy's rint before" if whole else ""
        coded = (ours["codes"][usable], codes)
        yield Comparison(str(dtype), f"ml_dtypes {name}", coded, (scales, scales), rules, note)


def blocks_of_torchao(values: Tensor) -> Iterator[Comparison]:
    """Compare fp8 in blocks, rows and tiles; MX; int8 and int4, which torchao multiplies by a reciprocal."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.quantization import quant_primitives as affine

    for dtype in (DType.FP8_128, DType.E5M2_128, DType.FP8_ROW, DType.FP8_128X128, DType.FP8_TENSOR):
        form = NARROW[dtype]
        tall, wide = {"row": (1, WIDTH), "tensor": tuple(values.shape)}.get(form.block, (1, form.block))
        if isinstance(wide, tuple):
            tall, wide = wide
        element = torch.float8_e4m3fn if form.element is Element.E4M3 else torch.float8_e5m2
        # A tensor with one NaN is a NaN: its finite part shows more.
        given = values[:-64].clamp(-1e30, 1e30) if dtype is DType.FP8_TENSOR else values
        tall = len(given) if dtype is DType.FP8_TENSOR else tall
        scales = affine._choose_scale_float8(given, [tall, wide], element)
        codes = affine._quantize_affine_float8(given, scales, element)
        blocks = narrow.as_blocks(form, given, given.shape)
        coded = narrow.as_blocks(form, codes.view(torch.uint8), given.shape)
        yield comparison(dtype, form, "torchao float8", blocks, (coded, scales), SCALE, CAP)

    for dtype, element in ((DType.MXFP8, torch.float8_e4m3fn), (DType.MXFP4, torch.float4_e2m1fn_x2)):
        form = NARROW[dtype]
        scales, codes = to_mx(values.view(-1, 32), element, 32, ScaleCalculationMode.FLOOR)
        raw = codes.view(torch.uint8)
        raw = narrow.unpack(form.element, raw.flatten()) if form.element.bits == 4 else raw
        theirs = (raw, scales.view(torch.uint8))
        yield comparison(dtype, form, "torchao MX floor", values.view(-1, 32), theirs, SCALE, CAP)

    for dtype in (DType.INT8_256, DType.INT4_128, DType.INT8_ROW):
        form = NARROW[dtype]
        block = form.block if isinstance(form.block, int) else WIDTH
        largest = int(form.element.largest)
        size, blocks, limits = [1, block], values.view(-1, block), (torch.int8, -largest, largest)
        scales, zeros = affine.choose_qparams_affine(
            blocks, affine.MappingType.SYMMETRIC, tuple(size), *limits, scale_dtype=torch.float32
        )
        codes = affine.quantize_affine(blocks, size, scales, zeros, *limits)
        coded = codes.view(torch.uint8) & (0xFF >> (8 - form.element.bits))
        note = f"quant_min={-largest}; torchao's own is {-largest - 1}, and its scale amax / {largest + 0.5}"
        yield comparison(dtype, form, "torchao affine", blocks, (coded, scales), SCALE, CAP, TIE, note=note)


def blocks_of_bitsandbytes(values: Tensor) -> Iterator[Comparison]:
    """Compare NF4 and rows in int8. Both sides multiply by a reciprocal."""
    import bitsandbytes.functional as theirs

    form = NARROW[DType.NF4_64]
    packed, state = theirs.quantize_4bit(values.flatten(), blocksize=64, quant_type="nf4")
    codes = narrow.unpack(form.element, packed.flatten())
    yield comparison(
        DType.NF4_64, form, "bitsandbytes NF4", values.view(-1, 64), (codes, state.absmax), SCALE, CAP, TIE
    )
    form = NARROW[DType.INT8_ROW]
    codes, largest, _ = theirs.int8_vectorwise_quant(values.clone())
    stated = (codes.view(torch.uint8), largest / 127)
    yield comparison(
        DType.INT8_ROW, form, "bitsandbytes int8", values, stated, SCALE, CAP, TIE, note="its scale is amax"
    )


COMPARISONS: Mapping[str, Callable[[Tensor], Iterator[Comparison]]] = dict(
    zip(PEERS, (elements, blocks_of_torchao, blocks_of_bitsandbytes), strict=True)
)


def compare(values: Tensor) -> Iterator[Comparison]:
    """Compare with every peer that is installed."""
    for peer, found in COMPARISONS.items():
        if importlib.util.find_spec(peer) is not None:
            yield from found(values)


def timed(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def times(dtype: DType, values: Tensor, rounds: int) -> list[float]:
    """Return ns per element of encoding and decoding by kernel; then as copies; then the definition's."""
    form, block = NARROW[dtype], NARROW[dtype].block
    assert isinstance(block, int)
    packed = torch.empty(dtype.nbytes(values.numel()), dtype=torch.uint8)
    out = torch.empty_like(values)
    codes, scales = narrow.reference_encode(form, values.view(-1, block))
    calls: list[tuple[Callable[[], object], int]] = [
        (lambda: narrow.encode(dtype, values, packed), rounds),
        (lambda: narrow.decode(dtype, packed, out), rounds),
        (lambda: narrow.reference_encode(form, values.view(-1, block)), 3),
        (lambda: narrow.reference_decode(form, codes, scales), 3),
    ]
    taken, copies = [], []
    for call, turns in calls:
        pairs = [(timed(call), timed(lambda: out.copy_(values))) for _ in range(turns)]
        taken.append(statistics.median(seconds for seconds, _ in pairs) / values.numel() * 1e9)
        copies.append(statistics.median(seconds / copy for seconds, copy in pairs))
    return [*taken[:2], *copies]


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--numel", type=count, default=1_000_000, help="values that are compared: 1M")
    parser.add_argument("--timed", type=count, default=count("16M"), help="values of the times")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = sample(options.numel)
    result = Result.begin(f"narrow formats, {values.numel():,} values", options, *PEERS)
    columns = {"format": "<13", "beside": "<25", "codes": "", "scales": "", "left over": "", "why": "<60"}
    table = result.table(columns, "Differing")
    left = 0
    for found in compare(values):
        why = [f"{rule}: {number}" for rule, number in found.why.items()]
        why += [found.note] if found.note else []
        counts = (int(found.differing_codes.sum()), int(found.differing_scales.sum()), found.unexplained)
        table.row(found.dtype, found.peer, *counts, "; ".join(why) or None)
        left += found.unexplained
    columns = {"format": "<13", "encode ns": ".3f", "decode ns": ".3f", "encode": ".2f", "decode": ".2f"}
    columns |= {"plain encode": ".0f", "plain decode": ".0f"}
    table = result.table(columns, "Per element, fp32 to codes and back; then in copies, the definition too")
    flat = torch.randn(options.timed)
    for dtype, form in NARROW.items():
        if form.is_flat:
            table.row(str(dtype), *times(dtype, flat, options.rounds))
    result.save(options.save)
    if left:
        sys.exit(f"{left} codes or scales differ for no rule that is known")


if __name__ == "__main__":
    main()
