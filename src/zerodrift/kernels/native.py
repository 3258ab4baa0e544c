"""Load the compiled CPU kernels, which round as this machine's torch does.

A wheel has a library for each processor level. The loaded library fits this processor and rounds as this
torch does. If no library fits, the source in the package is compiled on first use, and kept in a cache. If
nothing compiles, `library()` is None after one notice, and every caller has a plain PyTorch path with the
same bits.

torch's elementwise kernels fuse `a * b + c` into one rounding if the processor can, and take square roots
from a vector library that is not correctly rounded. Compiled code must do the same to equal torch bit for
bit, so each kernel of torch is probed with values that distinguish the possibilities. With torch 2.13.0 on
x86, all three kernels fuse with AVX2 or AVX512, and none does without. `torch.sqrt` is MKL's, off by one ulp
in about a fifth of all values, and the same for one element as for many.

Invariant: a library is used only with the processor and the torch that it was built for, and only if its
checksum is right: a damaged library would compute wrong numbers, or crash the process. A probe changes no
setting of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerodrift.files import cache_folder, locked
from zerodrift.kernels import build

CARRIED = Path(__file__).with_name("libraries")
"""The libraries of a wheel; `setup.py` writes them. A checkout and a source distribution have none."""

_log = logging.getLogger("zerodrift")


class Library:
    """The compiled functions, with their signatures."""

    def __init__(self, path: Path, origin: str) -> None:
        loaded = ctypes.CDLL(str(path))
        int32, int64, address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p

        def bind(name: str, *types: type) -> Any:
            function = getattr(loaded, f"zerodrift_{name}")
            function.argtypes, function.restype = types, None
            return function

        self.path = path
        self.origin = origin
        """Origin of the library, for `zerodrift doctor`."""
        self.update = bind("update", address)
        """(address of an Update struct); see `optim/fused.py`."""
        self.squares = bind("squares", int64, address, int32, address, int32)
        """(numel, data, type, out, threads)"""
        self.digits = bind("digits", int64, address, address)
        """(count, sums, out)"""
        self.prints = bind("prints", int64, address, address, int32)
        """(blocks, words, out, threads)"""
        self.digests = bind("digests", int64, address, int32, int32, address, address, int32)
        """(numel, data, bytes of an element, first place, weights, out, threads)"""
        self.sums = bind("sums", int64, int64, address, int32, address, int32, int32, int32)
        """(numel, count of parts, their addresses, type, out, type, whether by the tree, threads)"""
        self.narrow = bind(
            "narrow", int64, address, int32, address, int32, address, address, address, int64, int32
        )
        """(numel, Format, way, values, type, codes, scales, keys, number, threads); see `narrow.h`"""


TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes as the compiled code numbers them."""


@functools.cache
def library() -> Library | None:
    """Return the compiled kernels, built now if need be; None, after one notice, if they cannot be built."""
    return carried(CARRIED) or obtain(cache_folder(), build.find_compiler())


def carried(
    folder: Path, variants: Sequence[build.Variant] = build.VARIANTS.get(platform.machine(), ())
) -> Library | None:
    """Return the best library of a wheel that suits this processor and rounds as torch does, or None."""
    if not folder.is_dir():
        return None
    has = _features()
    for variant in variants:
        path = folder / variant.file
        if not path.exists() or not variant.needs <= has or variant.contraction != contraction():
            continue
        if _loads(path):
            return Library(path, f"carried by the wheel for {variant.name}")
        _log.warning("zerodrift: %s is damaged or does not load; reinstall zerodrift", path)
    return None


def obtain(folder: Path | None, compiler: str | None) -> Library | None:
    """Return this machine's library from a folder, or build it there; None means a temporary folder."""
    try:
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="zerodrift-") as passing:
                return _obtain(Path(passing), compiler)
        return _obtain(folder, compiler)
    except (build.BuildError, OSError) as error:
        _log.warning(
            "zerodrift: %s; updates run in plain PyTorch, with the same bits, several times slower", error
        )
        return None


def _obtain(folder: Path, compiler: str | None) -> Library:
    path = folder / f"kernels-{key()}.so"
    origin = "compiled on this machine"
    if _loads(path):
        return Library(path, origin)
    if compiler is None:
        raise build.BuildError(f"no C++ compiler found ({', '.join(build.COMPILERS)}, or CXX)")
    with locked(folder / "lock"):
        if not _loads(path):
            _log.warning("zerodrift: compiling its CPU kernels, once for this machine, into %s", folder)
            build.compile_library(compiler, build.native_flags(contraction()), path)
    try:
        return Library(path, origin)
    except OSError as error:
        raise build.BuildError(f"the compiled kernels do not load ({error})") from error


def _loads(path: Path) -> bool:
    try:
        if not path.is_file() or build.checksum_file(path).read_text() != build.checksum(path):
            return False
        Library(path, "")
    except (OSError, ValueError):
        return False
    return True


def key() -> str:
    """Name everything that a library depends on: source, flags, processor, torch and its fused operations."""
    flags = build.native_flags(contraction())[0]
    sources = [build.SOURCE, *sorted(build.SOURCE.parent.glob("*.h"))]
    parts = (*(source.read_text() for source in sources), " ".join(flags), torch.__version__, processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@functools.cache
def processor() -> str:
    """Return the processor's model and instruction sets."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kept = ("model name", "flags", "Features", "CPU part")
        return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kept)))
    return f"{platform.machine()} {platform.processor()}"


def _features() -> frozenset[str]:
    """Return the processor's features; none if the system does not list them."""
    lines = (line.partition(":") for line in processor().splitlines())
    return frozenset(word for name, _, rest in lines if name.strip() == "flags" for word in rest.split())


# --- how torch rounds here ------------------------------------------------------------------------------

_SIZE = 64
"""Elements of a probe: enough for every vector width, so the vector path of a kernel answers."""

_ULP = 2.0**-12


@functools.cache
def contraction() -> build.Contraction:
    """Probe which kernels fuse: (1 + u)^2 - 1 is 2u + u^2 rounded once, and 2u rounded twice."""
    one = torch.ones(_SIZE)
    above = one + _ULP
    add = torch.add(-one, above, alpha=1 + _ULP)
    addcmul = torch.addcmul(-one, above, above, value=1.0)
    # lerp(-1/4, 3/4 + u, weight (1 + u) / 4) is a quarter of the same sum.
    lerp = torch.lerp(-one / 4, one * 0.75 + _ULP, (1 + _ULP) / 4) * 4
    once = 2 * _ULP + _ULP * _ULP
    return build.Contraction(*((result == once).all().item() is True for result in (add, addcmul, lerp)))


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
    """Return the address of a root with the bits of `torch.sqrt`, with the interface of MKL's vmsSqrt.

    Returns 0 if torch's root is correctly rounded, and None if no such root is known.
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
