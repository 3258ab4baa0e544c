"""Render the tables of narrow formats in docs/precision.md: definitions, and examples of a few blocks.

Invariant: every cell comes from `NARROW` or from the definition in `kernels/narrow.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from zerodrift.dtypes import NARROW, SHORT, DType, Element, Format
from zerodrift.kernels import narrow

BLOCK = re.compile(r"(<!-- formats: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)

NUMBERS = {
    Element.E4M3: "sign, 4 bits of exponent, 3 of mantissa",
    Element.E5M2: "sign, 5 bits of exponent, 2 of mantissa",
    Element.INT8: "whole numbers",
    Element.INT4: "whole numbers",
    Element.E2M1: "0, 0.5, 1, 1.5, 2, 3, 4, 6, with a sign",
    Element.NF4: "16 quantiles of a normal distribution",
}
USUAL = [-0.9, 0.31, 0.1, 0.004]
"""The first values of a block of the examples; the others are zeros."""


def fresh(text: str) -> str:
    """Return a page with its tables of narrow formats."""
    tables = {"definitions": definitions, "examples": examples, "edges": edges}
    return BLOCK.sub(lambda found: f"{found[1]}\n{tables[found[2]]()}\n\n{found[3]}", text)


def definitions() -> str:
    """Return a row per format."""
    heads = ["format", "numbers", "largest", "block", "scale", "bytes per value", "in slices"]
    return _markdown(heads, (_definition(dtype, form) for dtype, form in NARROW.items()))


def _definition(dtype: DType, form: Format) -> list[str]:
    short = "".join(f", short `{word}`" for word, formats in SHORT.items() if dtype in formats)
    block = {"row": "a row", "tensor": "the parameter"}.get(str(form.block), f"{form.block} values")
    if isinstance(form.block, tuple):
        block = f"{form.block[0]} x {form.block[1]} of a matrix"
    size = form.element.bits / 8
    bytes_ = f"{size:g}, and the scales"
    if isinstance(form.block, int):
        bytes_ = f"{size + form.scale_bytes / form.block:.7g}"
    rule = f"{form.scale}, floor" if form.scale == "e8m0" else form.scale
    largest = f"{form.element.largest:g}"
    return [
        *(f"`{dtype}`{short}", NUMBERS[form.element], largest, block, rule, bytes_),
        "yes" if form.is_flat else "no",
    ]


def examples() -> str:
    """Return the first values of one block in every flat format: scale, codes and decoded values."""
    heads = ["format", "scale", *(f"{value:g}" for value in USUAL)]
    rows = []
    for dtype, form in NARROW.items():
        if form.is_flat:
            scale, codes, decoded = _block(form, USUAL)
            pairs = list(zip(codes, decoded, strict=True))[: len(USUAL)]
            cells = [f"`{code:0{form.element.bits // 4}x}` {value:.6g}" for code, value in pairs]
            rows.append([f"`{dtype}`", f"{scale:.6g}", *cells])
    return _markdown(heads, rows)


def edges() -> str:
    """Return the decoded largest magnitude of a block where it is tiny, huge or not finite."""
    blocks = {
        "0, of either sign": [-0.0],
        "2^-97": [2.0**-97],
        "2^-96": [2.0**-96],
        "1.9": [1.9],
        "3.4e38": [torch.finfo(torch.float32).max],
        "an infinity": [torch.inf],
        "a NaN": [torch.nan],
    }
    shown = [DType.FP8_128, DType.INT8_256, DType.NF4_64, DType.MXFP8, DType.MXFP4]
    rows = []
    for name, values in blocks.items():
        decoded = [_block(NARROW[dtype], values)[2][0] for dtype in shown]
        rows.append([name, *(f"{value:.4g}" for value in decoded)])
    return _markdown(["largest magnitude", *(f"`{dtype}`" for dtype in shown)], rows)


def _block(form: Format, values: list[float]) -> tuple[float, list[int], list[float]]:
    assert isinstance(form.block, int)
    block = torch.zeros(1, form.block)
    block[0, : len(values)] = torch.tensor(values)
    codes, scales = narrow.reference_encode(form, block)
    wide = narrow.powers_of(scales) if form.scale == "e8m0" else scales.float()
    return wide.item(), codes[0].tolist(), narrow.reference_decode(form, codes, scales)[0].tolist()


def _markdown(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
