"""A run on two hosts has the numbers of one host, also after one of them lost its rank.

The hosts are network namespaces joined by a cable, each with an address of its own. A namespace reaches
neither the outside nor the other's loopback, so two ranks can only talk over the cable. Needs Linux, `ip` and
the right to make namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.jobs import QUICKLY, ROOT, job, losses
from tests.e2e.test_train_launch import children, on_two_ranks, rank_of, until


@dataclass(frozen=True)
class Host:
    number: int
    name: str
    """Name of the namespace."""
    device: str
    """This host's end of the cable."""
    address: str

    def start(self, first: Host, file: Path) -> subprocess.Popen[str]:
        """Start `torchrun` of one rank, which meets the others at `first`, as in docs/train.md."""
        place = f"--rdzv-endpoint={first.address}:29500"
        # A namespace does not know itself by name, so who keeps the store is said.
        host = f"--rdzv-conf=is_host={int(self == first)},join_timeout=60"
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", place, host]
        command += [f"--local-addr={self.address}", "--max-restarts=2", "-m", "zerodrift", "train", str(file)]
        own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": self.device}
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([*command, *QUICKLY], cwd=ROOT, env={**os.environ, **own}, text=True, **out)


def possible() -> str:
    """Return the reason why there can be no two hosts here; empty if there is none."""
    if shutil.which("ip") is None:
        return "there is no `ip` here"
    name = f"zerodrift-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    mark = f"zd{os.getpid()}"
    hosts = tuple(Host(n, f"{mark}-{n}", f"{mark}v{n}", f"10.213.7.{n + 1}") for n in range(2))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        # Made inside: the names of a cable's ends would otherwise be the machine's for a moment.
        one, other = hosts
        _ip("-n", one.name, "link", "add", one.device, "type", "veth", "peer", "name", other.device)
        _ip("-n", one.name, "link", "set", other.device, "netns", other.name)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", host.device, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield one, other
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


WHY_NOT = possible()
# Two launchers and two ranks each; `tests/ranks/test_collectives.py` pretends that ranks are on other hosts.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

STEPS = 10


def test_a_host_that_loses_its_rank_comes_back_and_two_are_as_one(tmp_path: Path) -> None:
    file = job(tmp_path, "slow", STEPS, run={"checkpoint_every": 2})
    with two_hosts() as (one, other):
        processes = [host.start(one, file) for host in (one, other)]
        try:
            until(tmp_path, 5, processes[0])
            (victim,) = (pid for pid in children(processes[1].pid) if rank_of(pid) is not None)
            os.kill(victim, signal.SIGKILL)
            said = [process.communicate(timeout=150)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    assert "going on after step" in said[0] + said[1] and sum("step 10/10" in each for each in said) == 1
    assert losses(tmp_path) == on_two_ranks(tmp_path / "one", STEPS)
