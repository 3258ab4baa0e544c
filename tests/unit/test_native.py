"""The compiled kernels are carried or built once, complete or absent, and never required."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zerodrift.kernels import build, native


@pytest.fixture(autouse=True)
def _notices(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, logger="zerodrift"):
        yield


@pytest.fixture
def built() -> Path:
    """Return the existing library."""
    found = native.library()
    if found is None:
        pytest.skip("no compiled kernels on this machine")
    return found.path


def script(path: Path, lines: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def compiler(tmp_path: Path, built: Path) -> str:
    """Write a compiler that copies the existing library; `numerics/test_fused.py` runs a real one."""
    lines = f'sleep 0.05\nfor last; do :; done\ncp "{built}" "$last"'
    return script(tmp_path / "compiler" / "c++", lines)


def test_several_builders_make_one_library(
    tmp_path: Path, compiler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """File locks belong to open files, so threads stand in for ranks."""
    folder = tmp_path / "cache"
    folder.mkdir()
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: native.obtain(folder, compiler), range(3)))
    assert None not in found and len(found) == 3
    assert [record.getMessage().count("compiling") for record in caplog.records] == [1]
    kernels = [f"kernels-{native.key()}.{suffix}" for suffix in ("sha256", "so")]
    assert sorted(path.name for path in folder.iterdir()) == [*kernels, "lock"]
    caplog.clear()
    assert native.obtain(folder, None) is not None and not caplog.records, "no compiler is needed again"


def test_a_damaged_library_is_built_again(tmp_path: Path, compiler: str) -> None:
    """It is not loaded first: a truncated one ends the process, a flipped bit computes something else."""
    made = native.obtain(tmp_path, compiler)
    assert made is not None
    path, checksum = made.path, made.path.with_suffix(".sha256")
    whole, sums, middle = path.read_bytes(), checksum.read_bytes(), made.path.stat().st_size // 2
    contents = {
        "half": whole[:middle],
        "a bit": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "no checksum": whole,
    }
    for damage, content in contents.items():
        path.unlink()  # it is loaded, and stays so
        path.write_bytes(content)
        if damage == "no checksum":
            checksum.unlink()
        assert native.obtain(tmp_path, None) is None, damage
        assert native.obtain(tmp_path, compiler) is not None, damage
        assert native.obtain(tmp_path, None) is not None, damage
        assert (path.read_bytes(), checksum.read_bytes()) == (whole, sums)


def test_without_a_compiler_that_works_or_a_folder_there_is_one_notice_and_no_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = script(tmp_path / "broken-c++", "echo it is broken >&2\nexit 1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    for folder, compiler, said in (
        (tmp_path, None, "no C++ compiler found (c++, g++, clang++, or CXX)"),
        (tmp_path, broken, "could not compile the CPU kernels (it is broken)"),
        (None, "c++", ""),
        (tmp_path / "not there", "c++", ""),
    ):
        caplog.clear()
        assert native.obtain(folder, compiler) is None
        (told,) = (record.getMessage() for record in caplog.records if "compiling" not in record.getMessage())
        assert said in told and "updates run in plain PyTorch" in told
    assert not list(tmp_path.glob("*.so")) and not list(tmp_path.glob("build-*"))


def test_a_name_covers_what_a_library_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.key()
    assert native.key() == first
    with monkeypatch.context() as patched:
        patched.setattr(native, "processor", lambda: "another processor")
        assert native.key() != first
    with monkeypatch.context() as patched:
        patched.setattr(native.torch, "__version__", "0.0")
        assert native.key() != first
    folder = shutil.copytree(build.SOURCE.parent, tmp_path / "kernels")
    monkeypatch.setattr(build, "SOURCE", folder / build.SOURCE.name)
    before = first
    included = re.findall(r'#include "(.+)"', build.SOURCE.read_text())
    assert included
    for name in (build.SOURCE.name, *included):
        with (folder / name).open("a") as file:
            file.write("// a change\n")
        changed = native.key()
        assert changed != before, name
        before = changed


EVERY = frozenset({"a", "b", "c"})
ONCE, TWICE = (True, True, True), (False, False, False)


@pytest.mark.parametrize(
    ("features", "contracts", "damaged", "loaded"),
    [
        (EVERY, True, "", "high"),
        (EVERY - {"c"}, True, "", "low"),
        (EVERY, False, "", "plain"),
        (EVERY, True, "high", "low"),
        (EVERY - {"b"}, True, "", None),
    ],
)
def test_a_carried_library_is_the_best_that_suits(
    features: frozenset[str],
    contracts: bool,
    damaged: str,
    loaded: str | None,
    tmp_path: Path,
    built: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = {"high": (EVERY, ONCE), "low": (frozenset("ab"), ONCE), "plain": (frozenset("a"), TWICE)}
    variants = [build.Variant(name, (), *of) for name, of in needs.items()]
    for variant in variants:
        path = tmp_path / variant.file
        shutil.copy(built, path)
        build.checksum_file(path).write_text("" if variant.name == damaged else build.checksum(path))
    monkeypatch.setattr(native, "_features", lambda: features)
    monkeypatch.setattr(native, "contraction", lambda: build.Contraction(*[contracts] * 3))
    found = native.carried(tmp_path, variants)
    assert (found and found.origin) == (loaded and f"carried by the wheel for {loaded}")
