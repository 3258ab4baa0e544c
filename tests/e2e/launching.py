"""Run two ranks of a script under a launcher, with a time limit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


def torchrun(script: Path, arguments: list[str], folder: Path, seconds: float = 200.0) -> None:
    """Run `script` on two ranks in `folder`. Raise their output if one fails or they do not end."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    _run([*launch, str(script), *arguments], folder, seconds)


def by_itself(script: Path, *arguments: str, folder: Path, seconds: float = 200.0) -> None:
    """Run a script that starts its ranks."""
    _run([sys.executable, str(script), *arguments], folder, seconds)


def _run(command: list[str], folder: Path, seconds: float) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": _extensions(),
    }
    with open(folder / "output", "a+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its ranks when it is asked to
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        assert process.returncode == 0, f"exit code {process.returncode}\n{output.read()[-8000:]}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@functools.cache
def _extensions() -> str:
    """Make a folder for DeepSpeed's builds, anew in each process. In a shared one, a build that was killed
    leaves a lock on which others wait without end."""
    folder = tempfile.mkdtemp(prefix="extensions-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
