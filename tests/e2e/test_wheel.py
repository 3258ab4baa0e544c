"""The wheel, installed where the repository is not: `zerodrift run` on a script for DeepSpeed elsewhere."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import deepspeed
import torch

config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}
torch.manual_seed(0)
with deepspeed.zero.Init():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine, *_ = deepspeed.initialize(model=model, config=config)
for _ in range(3):
    loss = engine(torch.randn(2, 8)).square().mean()
    engine.backward(loss)
    engine.step()
engine.save_checkpoint("saved")
print(f"rank {deepspeed.comm.get_rank()} of {deepspeed.comm.get_world_size()} with {deepspeed.__file__}")
"""


def test_the_wheel_runs_without_the_repository(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(copy)]
    said = subprocess.run(built, check=True, capture_output=True, text=True, timeout=300)
    assert "Warning" not in said.stdout + said.stderr
    (wheel,) = tmp_path.glob("*.whl")
    home, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    venv.create(home)
    (place,) = (home / "lib").glob("python*/site-packages")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(place), str(wheel)], check=True, timeout=300
    )
    shutil.rmtree(copy)
    # torch and the rest are those of this environment; what is installed here to be edited is not.
    there = [path for path in sys.path if path.endswith("site-packages")] or site.getsitepackages()
    (place / "packages.pth").write_text("\n".join(there))
    elsewhere.mkdir()
    (elsewhere / "script.py").write_text(SCRIPT)
    python = str(home / "bin" / "python")
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-m", "zerodrift", "run", "--", *launch],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=elsewhere, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 with {place}" in done.stdout
    assert "zerodrift plan" in done.stdout and (elsewhere / "saved" / "latest").is_file()
