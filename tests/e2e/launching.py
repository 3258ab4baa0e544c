"""Two ranks of a script under a launcher, with an end to them whatever they do."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


def torchrun(script: Path, arguments: list[str], folder: Path, seconds: float = 200.0) -> None:
    """Run `script` on two ranks in `folder`. Raises what they printed where one fails or they do not end."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    _run([*launch, str(script), *arguments], folder, seconds)


def deepspeed(script: Path, arguments: list[str], folder: Path, seconds: float = 200.0) -> None:
    """The same under DeepSpeed's own launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = Path(sys.executable).with_name("deepspeed")
    launch = [str(launcher), "--num_gpus", "2", "--master_port", str(port)]
    _run([*launch, str(script), *arguments], folder, seconds)


def _run(command: list[str], folder: Path, seconds: float) -> None:
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "TORCH_EXTENSIONS_DIR": _extensions(),
            },
            cwd=folder,
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks when it is asked to
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            code = -1
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        assert code == 0, f"exit code {code}\n{output.read()[-8000:]}"


@functools.cache
def _extensions() -> str:
    """Where DeepSpeed compiles what it needs, anew in each process. Where everybody does, a build that was
    killed leaves a lock, and others wait for it without end."""
    folder = tempfile.mkdtemp(prefix="extensions-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
