"""`zerodrift run -- COMMAND`: `deepspeed` is zerodrift in every Python process below, or an error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from tests import commands

PYTHON = sys.executable

SEEN = """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("deepspeed") is not None
import sys
assert "torch" not in sys.modules, "nothing of the drop-in is imported before it is asked for"
loader = importlib.util.find_spec("deepspeed").loader
print(importlib.metadata.version("deepspeed"), type(loader).__module__)
"""
"""A script that prints its drop-in without an import of DeepSpeed, which takes seconds."""

TRAIN = """
import argparse, deepspeed, os, torch
from deepspeed.utils import safe_get_full_fp32_param
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
given = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
engine, *_ = deepspeed.initialize(args=given, model=model, model_parameters=model.parameters())
loss = engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()
engine.backward(loss)
engine.step()
print("rank", engine.global_rank, "of", engine.world_size, "at", os.environ["LOCAL_RANK"], given.local_rank)
print("trained on", type(engine).__module__, engine.running.plan.row("1.weight").columns.pinned)
"""

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
}


def zerodrift(*arguments: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return commands.run(*arguments, folder=folder, timeout=250, **{"OMP_NUM_THREADS": "1", **environment})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_every_python_below_finds_it_and_its_version(folder: Path) -> None:
    (folder / "outer.sh").write_text(f"{PYTHON} seen.py && {PYTHON} inner.py && exit 7\n")
    (folder / "inner.py").write_text(
        "import multiprocessing, runpy, subprocess, sys\n"
        "subprocess.run([sys.executable, 'seen.py'], check=True)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=runpy.run_path, args=('seen.py',))\n"
        "    child.start(); child.join(); sys.exit(child.exitcode)\n"
    )
    done = zerodrift("run", "--", "sh", "outer.sh", folder=folder)
    assert done.returncode == 7, done.stderr
    # The spawned process imports the inner script once more.
    assert done.stdout.split("\n")[:-1] == ["0.19.6 zerodrift.alias"] * 4
    assert "`deepspeed` is zerodrift" in done.stderr and "DeepSpeed 0.19.6" in done.stderr
    assert "no process imported `deepspeed`" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "precision.redcue=fp32"], "`--set precision.redcue=fp32`: must be a key of `precision`"),
        (["--set", "wall_clock_breakdown=true"], "wall_clock_breakdown=true`: must be a key that decides"),
        (["--config", "ds.jsn"], "Did you mean `ds.json`?"),
        ([PYTHON, "-I"], "PYTHONPATH"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_added_is_said_before_anything_starts(
    arguments: list[str], said: str, folder: Path
) -> None:
    done = zerodrift(
        "run", *arguments, *([] if PYTHON in arguments else ["--"]), PYTHON, "seen.py", folder=folder
    )
    assert done.returncode == 2 and said in done.stderr and not done.stdout, done.stderr


def test_what_does_not_fit_the_commands_config_is_told_by_its_flag(folder: Path) -> None:
    """A quiet run prints nothing of a config that fits."""
    script = """
import deepspeed, torch
routed = torch.nn.Sequential()
routed.add_module("router", torch.nn.Linear(4, 4))
micro = {"train_micro_batch_size_per_gpu": 2}
for config, model in (("ds.json", routed), (micro, torch.nn.Linear(4, 4)), (micro, routed)):
    try:
        deepspeed.initialize(model=model, config=config)
    except ValueError as error:
        print(error)
"""
    (folder / "train.py").write_text(script)
    flags = ["--quiet", "--set", "zero_optimization.stage=3", "--pin", "*router.*"]
    done = zerodrift("run", *flags, "--", PYTHON, "train.py", folder=folder, LOCAL_RANK="0")
    assert done.returncode == 0, done.stderr
    contradicted, unmatched = done.stdout.splitlines()
    assert contradicted.startswith(
        "`--set zero_optimization.stage=3`: must not contradict the config that the command passes; got "
        "`zero_optimization.stage: 2` there"
    )
    assert unmatched.startswith("`--pin *router.*`: must match")


def test_python_that_ignores_the_environment_is_not_silent(folder: Path) -> None:
    (folder / "all.sh").write_text(f"env -u PYTHONPATH {PYTHON} -c 'print(1)'\n")
    done = zerodrift("run", "--", "sh", "all.sh", folder=folder)
    assert done.returncode == 2 and "must reach the Python processes of the command" in done.stderr
    assert done.stdout == "1\n"


def test_deepspeed_that_was_imported_already_ends_the_process(folder: Path) -> None:
    site = folder / "site"
    site.mkdir()
    (site / "deepspeed.py").write_text("")
    venv.create(folder / "v")
    (packages,) = (folder / "v" / "lib").glob("python*/site-packages")
    (packages / "a.pth").write_text("import sys; sys.path.append('site'); import deepspeed")
    done = zerodrift("run", "--", "v/bin/python", "-c", "print('went on')", folder=folder)
    assert done.returncode == 2 and "must be called before DeepSpeed is imported" in done.stderr
    assert "went on" not in done.stdout and "Traceback" not in done.stderr


def test_a_signal_is_the_commands(folder: Path) -> None:
    text = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(9))\n"
    text += "print(1, flush=True)\ntime.sleep(60)"
    command = [PYTHON, "-m", "zerodrift", "run", "--", PYTHON, "-c", text]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder)
    assert process.stdout is not None and process.stdout.readline() == b"1\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 9


def test_the_command_deepspeed_is_there_where_deepspeed_is_not(folder: Path) -> None:
    """Train with pins and keys of the command line, by a config that is Hjson and names a class of torch."""
    pytest.importorskip("hjson")
    text = json.dumps(CONFIG).replace("AdamW", "Adagrad").replace("{", "{ // so\n", 1)
    (folder / "ds.json").write_text(text)
    (folder / "more.yaml").write_text("gradient_clipping: 0.5\n")
    added = ["--plan", "--pin", "1.*", "--set", "precision.reduce=fp32", "--config", "more.yaml"]
    command = "deepspeed --num_gpus 2 --master_port 29713 train.py --deepspeed --deepspeed_config ds.json"
    done = zerodrift("run", *added, "--", *command.split(), folder=folder, PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):  # both may write into one line
        assert f"rank {rank} of 2 at {rank} {rank}" in done.stdout
    assert "trained on zerodrift.deepspeed.engine True" in done.stdout, "what is pinned"
    assert "--pin 1.*" in done.stderr and "--set precision.reduce=fp32" in done.stderr
    plan, found, done_by_step = done.stdout.partition("precision: backend=native")
    assert found and 40 <= len(plan.splitlines()) < 200, done.stdout
    line = done_by_step.splitlines()[0]
    for column in ("storage", "compute", "grad"):
        assert f" {column}=bfloat16,float32 " in line, "what the first step did"
