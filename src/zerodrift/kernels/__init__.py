"""Kernels: compiled CPU code, Triton programs, and sums of squares that do not depend on the slicing."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.kernels import device, narrow, native, products, squares
    from zerodrift.kernels.build import COMPILERS, find_compiler
    from zerodrift.kernels.digests import BYTES, block_digests, prints
    from zerodrift.kernels.native import contraction, exact_sqrt, vector_root
    from zerodrift.kernels.random_bits import block_keys, mix_bits, parameter_key, random_words, step_key
    from zerodrift.kernels.squares import reference_square_sums
    from zerodrift.kernels.storage import HostBuffers, PackedRun, resting_zeros

__getattr__, __dir__, __all__ = face(__name__)
