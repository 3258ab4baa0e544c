"""A lock is held by one process, ends with it, and hinders nobody on file systems without locks."""

from __future__ import annotations

import errno
import fcntl
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from zerodrift import files
from zerodrift.files import is_locked, locked
from zerodrift.inspect.check import launch
from zerodrift.inspect.check.launch import HELD

HOLD = """
import pathlib, sys, time
from zerodrift.files import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_at_a_time(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", []

    def second() -> None:
        with locked(path):
            order.append("second")

    assert not is_locked(path)
    thread = threading.Thread(target=second)
    with locked(path):
        assert is_locked(path)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and not is_locked(path)


def test_a_lock_goes_with_its_process_and_so_does_a_check_that_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / HELD
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert is_locked(path)
        waiting = threading.Thread(target=launch._wait_for_others, args=(tmp_path,))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        holder.send_signal(signal.SIGKILL)
    waiting.join(10)
    assert not waiting.is_alive()
    assert not is_locked(path)


def _without_locks(*_: Any) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(fcntl, "flock", _without_locks), (files, "fcntl", None)],
    ids=["file system", "system"],
)
def test_where_there_are_no_locks_nobody_is_stopped(
    owner: Any, name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    with locked(tmp_path / "lock"), locked(tmp_path / "lock"):
        assert is_locked(tmp_path / "lock")
