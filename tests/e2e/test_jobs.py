"""Every example job trains for a few steps by its own file."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import yaml

from tests.e2e.jobs import kinds, losses, on_a_rank
from tests.ranks.harness import run_ranks
from zerodrift.cli import app
from zerodrift.train.job_file import read_job

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "examples" / "jobs").glob("*.yaml"))
MODES = {"fp16": "float16", "autocast": "float32"}
"""Dtype of storage, where that is not bfloat16."""

RANKS = {"pipeline": 2, "two-hosts": 2, "moe": 2}
"""Number of ranks, where it is not one."""

SMALL = ["run.steps=2", "run.evaluate_every=0", "run.checkpoint_every=0", "data.block=48"]


EVERY_JOB = pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)


def few_steps(folder: Path, name: str, ranks: int, *more: str) -> None:
    """Train an example into a folder for a few steps."""
    file = f"examples/jobs/{name}.yaml"
    places = [f"run.folder={folder}/run", f"data.cache={folder}/cache"]
    held_out = "validation" in yaml.safe_load((ROOT / file).read_text())["data"]
    run = on_a_rank if ranks == 1 else functools.partial(run_ranks, on_a_rank, ranks)
    run(file, [*SMALL, *["run.evaluate_blocks=4"] * held_out, *places, *more])


def names_in(file: Path) -> list[str]:
    """Return the names of the tensors of an export."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(str(file), "pt") as opened:
        return list(opened.keys())


@EVERY_JOB
def test_a_job_trains(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = []
    if path.stem == "deepspeed":
        alone = {**yaml.safe_load(path.read_text())["auto"], "train_batch_size": 8}
        more = ["auto={" + ", ".join(f"{key}: {value}" for key, value in alone.items()) + "}"]
    if path.stem == "moe":
        more = ["config.experts.ranks=2", "config.zero_optimization.stage=3", "model.weights=random"]
    few_steps(tmp_path, path.stem, RANKS.get(path.stem, 1), *more)
    first, last = losses(tmp_path).values()
    assert last < first + 0.2
    (precision,) = kinds(tmp_path, "precision")
    assert f" storage={MODES.get(path.stem, 'bfloat16')}" in precision["line"]
    cells = precision["cells"]
    assert "DIFFERENT" not in {cell[-1] for cell in cells}
    chosen = [cell[0] for cell in cells if cell[-1] == "as autocast chose"]
    assert chosen == (["compute"] if path.stem == "autocast" else []), "a tied head is no safe module"
    (weights, *_) = (tmp_path / "run" / "export").glob("*.safetensors")
    if path.stem == "lora":
        assert weights.name == "adapter_model.safetensors"
        assert all(".lora_A." in name or ".lora_B." in name for name in names_in(weights))
    if path.stem == "moe":
        stacks = [key for key in names_in(weights) if ".experts." in key]
        assert len(stacks) == 4 * 8 * 3, "every expert of every layer, under the names of published files"
    out = capfd.readouterr().out
    assert path.stem != "lab" or "epochs, begun with random weights\n" in out
    app(["sample", str(tmp_path / "run"), "--prompt", "a", "--tokens", "3"], standalone_mode=False)
    assert capfd.readouterr().out.startswith("a")


@EVERY_JOB
def test_a_job_says_how_to_run_it(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    commands = re.findall(r"^# .*zerodrift (train|sample) (\S+)", head, flags=re.MULTILINE)
    assert ("train", f"examples/jobs/{path.name}") in commands
    job, _ = read_job(path)
    assert job.run.folder == f"runs/{path.stem}"
    assert [run for verb, run in commands if verb == "sample"] in ([], [job.run.folder])
