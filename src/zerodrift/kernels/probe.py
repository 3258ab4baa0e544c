"""Probe how this machine's torch rounds: which kernels contract products and sums, and how roots are taken.

torch's element-wise kernels contract `a * b + c` into one rounding if the processor can, and take square
roots from a vector library that is not correctly rounded. Compiled code must do the same to equal torch bit
for bit, so each kernel is probed with values that distinguish the possibilities. `native` compiles by the
contractions, and `optim` uses the root.

Invariant: a probe only reads; it never changes a setting of torch.

Seen with torch 2.13.0 on x86: with AVX2 or AVX512 all three contract, with neither none does; `torch.sqrt`
is MKL's, off by one ulp in about a fifth of all values, and the same for one element as for many.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_SIZE = 64
"""Elements of a probe: enough for every vector width, so the vector path of a kernel answers."""

_ULP = 2.0**-12


@dataclass(frozen=True, slots=True)
class Contraction:
    """Which of torch's kernels round once where plain arithmetic rounds twice."""

    add: bool
    """`add(x, alpha=a)`"""
    addcmul: bool
    lerp: bool


@functools.cache
def contraction() -> Contraction:
    """Probe the contractions: (1 + u)^2 - 1 is 2u + u^2 rounded once, and 2u rounded twice."""
    one = torch.ones(_SIZE)
    above = one + _ULP
    add = torch.add(-one, above, alpha=1 + _ULP)
    addcmul = torch.addcmul(-one, above, above, value=1.0)
    # lerp(-1/4, 3/4 + u, weight (1 + u) / 4) is a quarter of the same sum.
    lerp = torch.lerp(-one / 4, one * 0.75 + _ULP, (1 + _ULP) / 4) * 4
    once = 2 * _ULP + _ULP * _ULP
    return Contraction(*((result == once).all().item() is True for result in (add, addcmul, lerp)))


def exact_sqrt(values: Tensor) -> Tensor:
    """Return the correctly rounded square root of fp32 values, on every machine.

    Through fp64: a root of a 24-bit number is never closer than 2^-51 to the middle between two neighbours,
    so an fp64 root that is off by one in its last place still rounds to the right one.
    """
    return values.double().sqrt_().float()


ROOT_MODE = 0x140102
"""High accuracy, subnormals kept, no error callbacks: the mode in which torch calls the library."""


@functools.cache
def vector_root() -> int | None:
    """Return the address of a root with the bits of `torch.sqrt` for compiled code; None if none is known.

    It has the interface of MKL's vmsSqrt; 0 if torch itself is correctly rounded.
    """
    # Every exponent of a second moment, with many mantissas, and the special values.
    mantissas = torch.arange(0, 1 << 23, 33_333, dtype=torch.int32)
    exponents = torch.arange(0, 255, dtype=torch.int32) << 23
    values = (exponents[:, None] + mantissas[None, :]).flatten().view(torch.float32)
    values = torch.cat([values, torch.tensor([0.0, torch.inf])])
    wanted = values.sqrt()
    if torch.equal(wanted, exact_sqrt(values)):
        return 0
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).vmsSqrt
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    roots = torch.empty_like(values)
    function(values.numel(), values.data_ptr(), roots.data_ptr(), ROOT_MODE)
    address = ctypes.cast(function, ctypes.c_void_p).value
    return address if address and torch.equal(roots, wanted) else None
