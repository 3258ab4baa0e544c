"""Run a script that starts its ranks, with a time limit; a free port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def by_itself(script: Path, *arguments: str, folder: Path, seconds: float = 200.0) -> None:
    """Run the script in `folder`. Raise its output if it fails or does not end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(script), *arguments]
    with open(folder / "output", "a+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=folder, start_new_session=True
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=seconds)
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
