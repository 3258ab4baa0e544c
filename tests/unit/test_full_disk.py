"""A disk that is full at any write gives one error with the folder, and leaves no partial file."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zerodrift as zd
from tests.e2e.jobs import job
from tests.unit.deepspeed_layout import lay_out
from tests.unit.test_foreign_files import CONFIG, network, snapshot
from zerodrift.api import initialize
from zerodrift.checkpoint.folder import CheckpointFolder
from zerodrift.checkpoint.manifest import verified
from zerodrift.errors import ZerodriftError
from zerodrift.train.job_file import read_job
from zerodrift.train.loop.session import prepared_data
from zerodrift.train.loop.start import train
from zerodrift.weights.converter import convert


class Disk:
    """A disk that takes so many writes below a folder, and no more."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        real = io.open

        def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if not set("wax") & set(mode) or not str(file).startswith(str(top)):
                return real(file, mode, *rest, **options)
            stream = io.BufferedWriter(_Raw(self, file, mode.replace("t", "").replace("b", "")))
            return stream if "b" in mode else io.TextIOWrapper(stream, encoding=options.get("encoding"))

        monkeypatch.setattr(io, "open", opened)
        for name in ("pwrite", "posix_fallocate", "mkdir"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        if sys.version_info < (3, 11):  # paths have a table of their own
            monkeypatch.setattr(pathlib._NormalAccessor, "open", staticmethod(opened))
            monkeypatch.setattr(pathlib._NormalAccessor, "mkdir", staticmethod(os.mkdir))

    def take(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.take()
            return real(*arguments, **options)

        return call


class _Raw(io.FileIO):
    """A file whose every write takes space."""

    def __init__(self, disk: Disk, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._disk = disk

    def write(self, data: Any) -> int:
        self._disk.take()
        return super().write(data)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    made = initialize(network(), None, CONFIG, device="cpu", quiet=True)
    yield made
    made.destroy()


def every_write(
    disk: Disk, work: Callable[[], object], unchanged: Callable[[], object], left: Callable[[], object]
) -> int:
    """Repeat some work with space for no write, one, two and so on until it succeeds; return their number."""
    before, rest = unchanged(), left()
    for writes in range(2000):
        disk.left = writes
        try:
            work()
            return writes
        except ZerodriftError as error:
            assert "No space left on device" in str(error) and "GB are free in" in str(error), error
        finally:
            disk.left = None
        assert unchanged() == before and left() == rest, writes
    raise AssertionError("never done")


def names(folder: Path) -> Callable[[], list[str]]:
    return lambda: sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("again", [False, True], ids=["a new tag", "the same tag"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "beside training"])
def test_a_save(again: bool, asynchronous: bool, engine: Any, disk: Disk, tmp_path: Path) -> None:
    checkpoints = zd.Checkpoints(engine, tmp_path / "run", quiet=True, asynchronous=asynchronous)
    checkpoints.save("first")
    checkpoints.wait()

    def save() -> None:
        checkpoints.save("first" if again else "second")
        checkpoints.wait()

    took = every_write(disk, save, lambda: snapshot(tmp_path), names(tmp_path / "run"))
    assert took > 8
    assert CheckpointFolder(tmp_path / "run").latest() == ("first" if again else "second")
    for tag in CheckpointFolder(tmp_path / "run").tags():
        verified(tmp_path / "run" / tag)


@pytest.mark.parametrize("what", ["export", "safetensors", "checkpoint"])
def test_an_export_and_conversions(what: str, engine: Any, disk: Disk, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    zd.Checkpoints(engine, source / "ours", quiet=True).save()
    lay_out(source / "theirs", 2)
    work: dict[str, Callable[[], object]] = {
        "export": lambda: zd.export(engine, out),
        "safetensors": lambda: convert(source / "ours", out),
        "checkpoint": lambda: convert(source / "theirs", out),
    }
    took = every_write(
        disk, work[what], lambda: snapshot(source), lambda: snapshot(out) if out.is_dir() else {}
    )
    assert took > 2 and snapshot(out)
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MB, which only root can do."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a file system, which only root can")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_trainer(small: Path, tmp_path: Path) -> None:
    """The disk is full at any of its files: data, metrics, plan, checkpoint, export, report."""
    file = job(tmp_path, steps=2)
    for leave in (0, 8_000, 150_000):
        (small / "big").write_bytes(b"\0" * (shutil.disk_usage(small).free - leave))
        with pytest.raises(ZerodriftError, match=r"No space left on device.* GB are free in"):
            train(str(file), (f"run.folder={small}/run", "run.device=cpu"), 1)
        if not leave:
            with pytest.raises(ZerodriftError, match=r"GB are free in .*cache"):  # by `data` and `plan`
                prepared_data(read_job(file, [f"run.folder={small}/run"])[0])
        for tag in CheckpointFolder(small / "run" / "checkpoints").tags():
            verified(small / "run" / "checkpoints" / tag)
        assert [path for path in (small / "cache").glob("*.*") if path.is_dir()] == []
        (small / "big").unlink()
        for folder in ("run", "cache"):
            shutil.rmtree(small / folder, ignore_errors=True)
