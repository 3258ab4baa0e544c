"""Two ranks of a script under a launcher, with an end to them whatever they do."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from tests.ranks.harness import run_ranks


def torchrun(script: Path, arguments: list[str], folder: Path, seconds: float = 200.0) -> None:
    """Run `script` on two ranks in `folder`. Raises what they printed where one fails or they do not end."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    _run([*launch, str(script), *arguments], folder, seconds)


def by_hand(script: Path, arguments: list[str], folder: Path, seconds: float = 200.0) -> None:
    """The same with torchrun's variables and without its process, which imports torch for itself."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    places = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    _run([sys.executable, str(script), *arguments], folder, seconds, places)


def forked(script: Path, arguments: list[str], folder: Path, seconds: float = 200.0) -> None:
    """The same in ranks that have torch imported."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    run_ranks(_in_a_rank, 2, script, arguments, folder, place, timeout=seconds)


def _in_a_rank(script: Path, arguments: list[str], folder: Path, place: Mapping[str, str]) -> None:
    rank = str(dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()  # a script makes its own
    os.environ.update(place, RANK=rank, LOCAL_RANK=rank)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def deepspeed(script: Path, arguments: list[str], folder: Path, seconds: float = 200.0) -> None:
    """The same under DeepSpeed's own launcher."""
    launcher = Path(sys.executable).with_name("deepspeed")
    launch = [str(launcher), "--num_gpus", "2", "--master_port", str(_free_port())]
    _run([*launch, str(script), *arguments], folder, seconds)


def _run(
    command: list[str], folder: Path, seconds: float, places: Sequence[Mapping[str, str]] = ({},)
) -> None:
    """A process for each of `places`, what its environment has besides."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": _extensions(),
    }
    with open(folder / "output", "a+") as output:
        processes = [
            subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**environment, **place}, cwd=folder
            )
            for place in places
        ]
        deadline = time.monotonic() + seconds
        try:
            codes = [process.poll() for process in processes]
            while None in codes and set(codes) <= {None, 0} and time.monotonic() < deadline:
                time.sleep(0.05)
                codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.terminate()  # a launcher ends its ranks when it is asked to
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=30)
                process.kill()
                process.wait()
        output.seek(0)
        assert set(codes) == {0}, f"exit codes {codes}\n{output.read()[-8000:]}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@functools.cache
def _extensions() -> str:
    """Where DeepSpeed compiles what it needs, anew in each process. Where everybody does, a build that was
    killed leaves a lock, and others wait for it without end."""
    folder = tempfile.mkdtemp(prefix="extensions-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
