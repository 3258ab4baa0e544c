"""Compile the CPU kernels: flags, the variants that a wheel carries, and one call of the compiler.

The source needs no header of torch and no build tool. Only the standard library is imported here, since
`setup.py` runs this file where neither torch nor zerodrift is installed.

Invariant: a library appears under its name complete, with its checksum beside it, or not at all.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("native.cpp")
"""The source that is compiled; the headers beside it are its parts."""

COMPILERS = ("c++", "g++", "clang++")

_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-exceptions"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    # The only runtime that is loaded is OpenMP's, which torch includes.
    *(("-static-libgcc", "-Wl,--as-needed") if sys.platform == "linux" else ()),
)
_OPENMP = ("-fopenmp",)
_WIDE = "-mprefer-vector-width=512"
_NATIVE = {
    "x86_64": ("-march=native", _WIDE),
    "AMD64": ("-march=native", _WIDE),
    "aarch64": ("-mcpu=native",),
    "arm64": ("-mcpu=native",),
}
"""Compiler flags for this machine's processor, by kind of machine."""


class Contraction(NamedTuple):
    """Kernels of torch that fuse `a * b + c` into one rounding; see `kernels/native.py`."""

    add: bool
    """`add(x, alpha=a)`"""
    addcmul: bool
    lerp: bool


@dataclass(frozen=True, slots=True)
class Variant:
    """A library for one processor level, as in a wheel."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    """Features of the processor, as /proc/cpuinfo names them."""
    contraction: Contraction

    @property
    def file(self) -> str:
        return f"{self.name}.so"


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_V4_BYTES = _V4 | {"avx512vbmi", "avx512_vnni"}
_ALWAYS, _NEVER = Contraction(True, True, True), Contraction(False, False, False)

VARIANTS: dict[str, tuple[Variant, ...]] = {
    "x86_64": (
        # 8-bit moments need vector lookups and comparisons of bytes, which the levels above do not have.
        Variant(
            "x86-64-v4-bytes", ("-march=x86-64-v4", "-mavx512vbmi", "-mavx512vnni", _WIDE), _V4_BYTES, _ALWAYS
        ),
        Variant("x86-64-v4", ("-march=x86-64-v4", _WIDE), _V4, _ALWAYS),
        Variant("x86-64-v3", ("-march=x86-64-v3",), _V3, _ALWAYS),
        # torch fuses multiply and add only with AVX2, so the lower level has no AVX2.
        Variant("x86-64-v2", ("-march=x86-64-v2",), _V2, _NEVER),
    ),
    "aarch64": (
        Variant("aarch64-fma", ("-march=armv8-a",), frozenset(), _ALWAYS),
        Variant("aarch64", ("-march=armv8-a",), frozenset(), _NEVER),
    ),
}
"""Machine -> the libraries of a wheel for it, best first."""


class BuildError(Exception):
    """A library could not be built; the message is the reason."""


def find_compiler() -> str | None:
    """Return `CXX` if it is set, else the first compiler on the path."""
    named = os.environ.get("CXX", "").strip()
    candidates = (named,) if named else COMPILERS
    return next((path for name in candidates if (path := shutil.which(name))), None)


def native_flags(contraction: Contraction) -> tuple[tuple[str, ...], ...]:
    """Return the sets of flags for this machine's processor, best first; the last is plain."""
    flags, tuned = (*_FLAGS, *_definitions(contraction)), _NATIVE.get(platform.machine(), ())
    return (*flags, *tuned, *_OPENMP), (*flags, *tuned), flags


def compile_library(compiler: str, attempts: Sequence[Sequence[str]], path: Path) -> None:
    """Compile with the first set of flags that the compiler takes, and move the result to `path`."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        built = Path(folder) / path.name
        message = ""
        for flags in attempts:
            command = [compiler, *flags, str(SOURCE), "-o", str(built)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(f"`{compiler}` does not run ({error})") from error
            if done.returncode == 0:
                checksum_file(built).write_text(checksum(built))
                os.replace(checksum_file(built), checksum_file(path))
                os.replace(built, path)
                return
            message = done.stderr.strip().splitlines()[0] if done.stderr.strip() else "no message"
    raise BuildError(f"`{compiler}` could not compile the CPU kernels ({message})")


def compile_variants(compiler: str, folder: Path) -> Iterator[Path]:
    """Compile every library of a wheel for this machine into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS.get(platform.machine(), ()):
        path = folder / variant.file
        flags = (*_FLAGS, *variant.flags, *_definitions(variant.contraction), *_OPENMP)
        compile_library(compiler, [flags], path)
        yield path


def checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _definitions(contraction: Contraction) -> tuple[str, ...]:
    return tuple(f"-DZERODRIFT_FMA_{name.upper()}={once:d}" for name, once in contraction._asdict().items())
