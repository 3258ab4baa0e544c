"""Load the compiled CPU kernels: those that the wheel carries, or those compiled here and kept in a cache.

A wheel has a library for each level of processors. The one that is loaded is for this processor and rounds as
this torch does. Where none fits, the source in the package is compiled on first use. Where nothing compiles,
`library()` is None after one notice, and every caller has a plain PyTorch path with the same bits.

Invariant: a library is used only with the processor and the torch that it was built for, and only if it is as
it was built, by its checksum: a damaged one would compute other numbers, or end the process.
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
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from zerodrift.files import cache_folder, locked
from zerodrift.kernels import build
from zerodrift.kernels.probe import contraction

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
        """The sentence of `zerodrift doctor` on where the library comes from."""
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
    """Return the compiled kernels, built now if need be; None, after one notice, where they cannot be."""
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
        if not path.exists() or not variant.needs <= has or variant.contraction != astuple(contraction()):
            continue
        if _loads(path):
            return Library(path, f"carried by the wheel for {variant.name}")
        _log.warning("zerodrift: %s is damaged, or does not load here; reinstall zerodrift", path)
    return None


def obtain(folder: Path | None, compiler: str | None) -> Library | None:
    """Return this machine's library from a folder, or build it there; None as folder is a passing one."""
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
            build.compile_library(compiler, build.native_flags(astuple(contraction())), path)
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
    """Name everything that a library depends on: source, flags, processor, torch and how it contracts."""
    flags = build.native_flags(astuple(contraction()))[0]
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
    """Return the processor's features; none where the system does not list them."""
    lines = (line.partition(":") for line in processor().splitlines())
    return frozenset(word for name, _, rest in lines if name.strip() == "flags" for word in rest.split())
