"""Launch the Triton programs on a device's tensors, if Triton is installed and works.

Triton is optional: torch's CUDA builds include it, its CPU builds do not. If Triton is missing or cannot run
a first small program, `obstacle` returns the reason, and every caller has a plain PyTorch path.
`engine/step/update.py` calls `obstacle` on all ranks, and warns if a rank cannot run the programs.

Invariant: a program is launched without implicit fusing of multiply and add, on the device of its tensors.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.errors import said
from zerodrift.kernels import native

TILE = 4
"""Blocks per program, a warp each: eight elements for each thread."""

TILE_8BIT = 1
"""`TILE` for moments in 8 bits: a thread needs more registers, so fewer threads fit."""

_REGISTERS = 80
"""Registers of a thread that encodes in 8 bits. More threads outweigh the cost of spilled registers."""

_DIGITS_TILE, _DIGITS_COPIES = 256, 1024
"""Sums per program that adds digits, and copies of the digits that programs add to."""

_SPAN = 256
"""Elements per program of a sum. Sums of many parts have short slices."""

TREE_PARTS = 64
"""Most parts that a program adds by the tree, whose additions are unrolled."""

NARROW_SPAN = 2048
"""Elements per program of a narrow format."""

STRICT = ("enable_fp_fusion", "enable_reflect_ftz")
"""Compiler options that are turned off if this Triton has them: fusing of multiply and add, and flushing of
subnormals in roots and quotients. A Triton without the second option flushes subnormals."""


def works(device: torch.device) -> bool:
    """Return True if programs run on this device; on a CPU they never do."""
    return device.type != "cpu" and obstacle(device) is None


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Return the reason why programs cannot run on this device, or None. Tested once, by a first program."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        total = squares(torch.ones(BLOCK, device=device), torch.zeros(1, dtype=torch.float64, device=device))
    except Exception as error:  # of Triton, its compiler, the C compiler it calls, or the driver
        return f"a first Triton program failed ({said(error)})"
    if total.item() != BLOCK:
        return f"a first Triton program computed {total.item()} for {BLOCK}"
    return None


def update(storage: Tensor, others: Sequence[Tensor | None], stochastic: int, **choices: int) -> None:
    """Run one optimizer step of a slice in one pass. The arguments are those of `programs.update`."""
    bits = [None if tensor is None else as_bits(tensor) for tensor in (storage, *others)]
    is_coded = any(tensor is not None and tensor.dtype is torch.uint8 for tensor in others)
    choices |= shape_of_update(
        is_coded, is_nvidia=storage.device.type == "cuda" and torch.version.hip is None
    )
    _launch("update", storage, choices["tile"] * BLOCK, *bits, storage.numel(), stochastic, **choices)


def shape_of_update(is_coded: bool, *, is_nvidia: bool) -> dict[str, int]:
    """Return the shape of an update's launch. `is_coded` is True for moments in 8 bits."""
    tile = TILE_8BIT if is_coded else TILE
    return {"tile": tile, "num_warps": tile} | ({"maxnreg": _REGISTERS} if is_coded and is_nvidia else {})


def squares(flat: Tensor, out: Tensor) -> Tensor:
    """Write the sum of squares of each block of a flat contiguous tensor to fp64 `out`."""
    _launch("squares", flat, TILE * BLOCK, as_bits(flat), out, flat.numel(), tile=TILE)
    return out


def digits(sums: Tensor, out: Tensor, lowest: int) -> None:
    """Add fp64 sums of squares to the places of int64 `out`, whose last counts those that are not finite."""
    copies = out.new_zeros(out.numel(), _DIGITS_COPIES)
    choices = {"places": out.numel() - 1, "lowest": lowest, "copies": _DIGITS_COPIES, "tile": _DIGITS_TILE}
    _launch("digits", sums, _DIGITS_TILE, sums.view(torch.int64), copies, sums.numel(), **choices)
    out += copies.sum(1)


def sums(parts: Tensor, out: Tensor, *, tree: bool = False) -> None:
    """Add the rows of contiguous `parts` in their order or by the tree, and write the sum to flat `out`."""
    tensors, count, narrow = (as_bits(parts), as_bits(out)), len(parts), native.TYPES[out.dtype]
    if tree:  # compiled for each number of parts, at most `TREE_PARTS`
        shape = {"count": count, "height": (count - 1).bit_length()}
        _launch("tree_sums", out, _SPAN, *tensors, out.numel(), narrow=narrow, tile=_SPAN, **shape)
    else:
        _launch("sums", out, _SPAN, *tensors, out.numel(), count, narrow=narrow, tile=_SPAN)


def prints(words: Tensor, out: Tensor) -> Tensor:
    """Write the print of each 128 int32 words of a flat contiguous tensor to int64 `out`."""
    _launch("prints", out, TILE, words, out, out.numel(), tile=TILE)
    return out


def narrow(
    codes: Tensor,
    scales: Tensor,
    values: Tensor,
    numbers: Tensor,
    keys: Tensor | None,
    number: int,
    **choices: Any,
) -> None:
    """Encode or decode a run. The arguments are those of `narrow_programs.narrow`."""
    tile, numel = NARROW_SPAN // choices["block"], values.numel()
    tensors = (codes, as_bits(scales), as_bits(values), numbers, keys)
    _launch("narrow", values, NARROW_SPAN, *tensors, number, numel, tile=tile, **choices)


def _launch(name: str, flat: Tensor, elements: int, *arguments: Any, **choices: int) -> None:
    """Launch a program for every so many elements of a flat tensor, on its device."""
    from zerodrift.kernels import narrow_programs, programs

    grid = (-(-flat.numel() // elements),)
    program = getattr(narrow_programs if name == "narrow" else programs, name)
    with torch.accelerator.device_index(flat.device.index):
        program[grid](*arguments, **choices, **_options(flat.device))


def as_bits(tensor: Tensor) -> Tensor:
    """View bf16 as int16, as the programs take it; return any other tensor unchanged."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


@functools.cache
def _options(device: torch.device) -> dict[str, Any]:
    """Return the options of a launch; none for Triton's interpreter, which compiles nothing."""
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        return {}

    return strict_options(driver.active.get_current_target())


def strict_options(target: Any) -> dict[str, Any]:
    """Return the options of `STRICT` that the compiler of a Triton target has."""
    from triton.compiler import make_backend

    strict = dict.fromkeys(STRICT, False)
    known = make_backend(target).parse_options(strict)
    return {name: off for name, off in strict.items() if hasattr(known, name)}
