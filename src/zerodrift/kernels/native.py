"""Builds the compiled kernels on first use, keeps them in a cache, and loads them.

The source ships in the package; there is one plain call of the compiler and no torch header, so neither
ninja nor a matching compiler is needed and a build takes seconds. Where nothing compiles, `library()` is
None after one notice, and every caller has a plain PyTorch path with the same bits.

Invariant: a library is used only with the source, flags, processor and torch that its name was formed from,
and appears under that name complete or not at all, however many ranks build at once. One that is not as it
was built, by its checksum, is not loaded but built again: it would compute other numbers, or end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from zerodrift.files import locked
from zerodrift.kernels.probe import contraction

SOURCE = Path(__file__).with_name("native.cpp")
"""What is compiled; the headers beside it are its parts."""

COMPILERS = ("c++", "g++", "clang++")

_PLAIN = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
_TUNED = {
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "AMD64": ("-march=native", "-mprefer-vector-width=512"),
    "aarch64": ("-mcpu=native",),
    "arm64": ("-mcpu=native",),
}
_THREADED = ("-fopenmp",)

_log = logging.getLogger("zerodrift")


class Library:
    """The compiled functions, with their signatures."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        self.path = path
        self.update = loaded.zerodrift_update
        """(address of an Update struct); see `optim/fused.py`."""
        self.squares = loaded.zerodrift_squares
        """(numel, data, type, out, threads)"""
        self.digits = loaded.zerodrift_digits
        """(count, sums, out)"""
        self.prints = loaded.zerodrift_prints
        """(blocks, words, out, threads)"""
        self.digests = loaded.zerodrift_digests
        """(numel, data, bytes of an element, first place, weights, out, threads)"""
        self.sums = loaded.zerodrift_sums
        """(numel, count of parts, their addresses, type, out, type, whether by the tree, threads)"""
        self.update.argtypes = [ctypes.c_void_p]
        self.squares.argtypes = [
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int32,
        ]
        self.digits.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        self.prints.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
        self.digests.argtypes = [
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int32,
        ]
        self.sums.argtypes = [
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            *[ctypes.c_int32] * 3,
        ]
        functions = (self.update, self.squares, self.digits, self.prints, self.digests, self.sums)
        for function in functions:
            function.restype = None


TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes as the compiled code numbers them."""


@functools.cache
def library() -> Library | None:
    """The compiled kernels, built now if need be; None, after one notice, where they cannot be."""
    return obtain(cache_folder(), find_compiler())


def obtain(folder: Path | None, compiler: str | None) -> Library | None:
    """This machine's library from `folder`, or built into it; without a folder, for this process alone."""
    try:
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="zerodrift-") as passing:
                return _obtain(Path(passing), compiler)
        return _obtain(folder, compiler)
    except (_BuildError, OSError) as error:
        _log.warning(
            "zerodrift: %s; updates run in plain PyTorch, with the same bits, several times slower", error
        )
        return None


class _BuildError(Exception):
    """Why there is no library."""


def _obtain(folder: Path, compiler: str | None) -> Library:
    path = folder / f"kernels-{key()}.so"
    if _loads(path):
        return Library(path)
    if compiler is None:
        raise _BuildError(f"no C++ compiler found ({', '.join(COMPILERS)}, or CXX)")
    with locked(folder / "lock"):
        if not _loads(path):
            _log.warning("zerodrift: compiling its CPU kernels, once for this machine, into %s", folder)
            _build(compiler, path)
    try:
        return Library(path)
    except OSError as error:
        raise _BuildError(f"the compiled kernels do not load ({error})") from error


def _loads(path: Path) -> bool:
    try:
        if not path.is_file() or _checksum_of(path).read_text() != _digest(path):
            return False
        Library(path)
    except (OSError, ValueError):
        return False
    return True


def _checksum_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build(compiler: str, path: Path) -> None:
    """Compile with the best flags that the compiler takes, and move the result into place whole."""
    tuned = _TUNED.get(platform.machine(), ())
    attempts = [(*_PLAIN, *tuned, *_THREADED), (*_PLAIN, *tuned), _PLAIN]
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        result = Path(folder) / path.name
        said = ""
        for flags in attempts:
            command = [compiler, *flags, *_definitions(), str(SOURCE), "-o", str(result)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise _BuildError(f"`{compiler}` does not run ({error})") from error
            if done.returncode == 0:
                beside = _checksum_of(result)
                beside.write_text(_digest(result))
                os.replace(beside, _checksum_of(path))
                os.replace(result, path)
                return
            said = done.stderr.strip().splitlines()[0] if done.stderr.strip() else "no message"
    raise _BuildError(f"`{compiler}` could not compile the CPU kernels ({said})")


def _definitions() -> tuple[str, ...]:
    contracted = contraction()
    return (
        f"-DZERODRIFT_FMA_ADD={contracted.add:d}",
        f"-DZERODRIFT_FMA_ADDCMUL={contracted.addcmul:d}",
        f"-DZERODRIFT_FMA_LERP={contracted.lerp:d}",
    )


def key() -> str:
    """Names everything that a library depends on: source, flags, processor, torch and how it contracts."""
    flags = (*_PLAIN, *_TUNED.get(platform.machine(), ()), *_THREADED, *_definitions())
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    parts = (*(source.read_text() for source in sources), " ".join(flags), torch.__version__, processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@functools.cache
def processor() -> str:
    """The processor's model and instruction sets."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kept = ("model name", "flags", "Features", "CPU part")
        return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kept)))
    return f"{platform.machine()} {platform.processor()}"


def find_compiler() -> str | None:
    """`CXX` where it is set, as for every build; else the first compiler on the path."""
    named = os.environ.get("CXX", "").strip()
    candidates = (named,) if named else COMPILERS
    return next((path for name in candidates if (path := shutil.which(name))), None)


def cache_folder() -> Path | None:
    """The user's cache folder for zerodrift, made if need be; None where it cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    with contextlib.suppress(OSError, RuntimeError):
        folder = (Path(base) if base else Path.home() / ".cache") / "zerodrift"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return None
