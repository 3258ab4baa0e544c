"""The wheel's kernels compute the same without the repository and a compiler, and train."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from zerodrift.kernels.build import VARIANTS, find_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import deepspeed
import torch

adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": adamw, "zero_optimization": {"stage": 3}}
with deepspeed.zero.Init():
    model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.backward(engine(torch.randn(2, 8)).square().mean())
engine.step()
engine.save_checkpoint("saved")
print(f"rank {deepspeed.comm.get_rank()} of {deepspeed.comm.get_world_size()} with {deepspeed.__file__}")
"""
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


class Installed:
    """The wheel in an environment with the packages of this one and no compiler on the path."""

    def __init__(self, wheel: Path, home: Path) -> None:
        venv.create(home)
        self.python = home / "bin" / "python"
        (self.place,) = (home / "lib").glob("python*/site-packages")
        command = [*PIP, "install", "--no-deps", "--target", str(self.place), str(wheel)]
        subprocess.run(command, check=True, timeout=300)
        # What is installed in this environment to be edited is not found through a .pth file.
        there = [path for path in sys.path if path.endswith("site-packages")] or site.getsitepackages()
        (self.place / "packages.pth").write_text("\n".join(there))
        self.cache = home / "cache"

    def run(self, *arguments: str, folder: Path, **variables: str) -> str:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")}
        environment = {**kept, "PATH": str(self.python.parent), "XDG_CACHE_HOME": str(self.cache)}
        done = subprocess.run(
            [str(self.python), *arguments],
            env={**environment, "OMP_NUM_THREADS": "1", **variables},
            cwd=folder, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def kernels(self, **variables: str) -> str:
        """Return the doctor's line about the kernels, from a folder without the repository."""
        told = self.run("-m", "zerodrift", "doctor", "--json", folder=self.place.parent, **variables)
        facts = json.loads(told[told.index("[") : told.rindex("]") + 1])
        return next(str(fact["found"]) for fact in facts if fact["what"] == "CPU updates")


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    named = request.config.getoption("--wheel")
    if not named:
        pytest.skip("needs a wheel: make wheel")
    return Installed(Path(named).resolve(), tmp_path_factory.mktemp("installed"))


def test_it_trains_without_the_repository(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    told = installed.run("-m", "zerodrift", "run", "--", str(installed.python), *launch, folder=tmp_path)
    for rank in range(2):
        assert f"rank {rank} of 2 with {installed.place}" in told
    assert "zerodrift plan" in told and (tmp_path / "saved" / "latest").is_file()
    assert "plain PyTorch" not in told and not list(installed.cache.rglob("*.so"))


@pytest.mark.skipif(sys.platform != "linux" or find_compiler() is None, reason="its wheel has no kernels")
def test_each_of_its_libraries_computes_what_torch_does(installed: Installed) -> None:
    """The best library for this processor is tried, then the next, then the one that never contracts."""
    folder = installed.place / "zerodrift" / "kernels" / "libraries"
    names = [variant.name for variant in VARIANTS[os.uname().machine]]
    assert sorted(path.stem for path in folder.glob("*.so")) == sorted(names)
    told, tried = installed.kernels(), []
    while (name := told.removeprefix("carried by the wheel for ")) in names:
        tried.append(name)
        check(installed)
        (folder / f"{name}.so").rename(folder / f"{name}.tried")
        told = installed.kernels()
    assert tried and told == "plain PyTorch"
    for path in folder.glob("*.tried"):
        path.rename(path.with_suffix(".so"))
    plainly = {"ATEN_CPU_CAPABILITY": "default"}
    assert installed.kernels(**plainly) == f"carried by the wheel for {names[-1]}"
    check(installed, **plainly)


def check(installed: Installed, **variables: str) -> None:
    """Compare every update of the loaded library with the definition in PyTorch, bit for bit."""
    arguments = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow")
    told = installed.run(*arguments, "tests/numerics/test_fused.py", folder=ROOT, **variables)
    assert " passed" in told and "skipped" not in told and "failed" not in told, told
