"""Every example job trains, by its own file and a few steps of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.e2e.jobs import on_a_rank
from tests.ranks.harness import run_ranks
from zerodrift.cli import app
from zerodrift.train.job_file import read_job
from zerodrift.train.loop.start import train
from zerodrift.train.report.metrics import read

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "examples" / "jobs").glob("*.yaml"))
MODES = {"fp16": "float16", "autocast": "float32"}
"""What storage is seen to be, where it is not bfloat16."""

RANKS = {"pipeline": 2, "two-hosts": 2}
"""Where one will not do."""

SMALL = ["run.steps=2", "run.evaluate_every=0", "run.checkpoint_every=0", "data.block=48"]


pytestmark = pytest.mark.usefixtures("at_the_root")


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_trains(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = [f"run.folder={tmp_path}/run", f"data.cache={tmp_path}/cache"]
    if path.stem == "deepspeed":
        alone = {**yaml.safe_load(path.read_text())["auto"], "train_batch_size": 8}
        more += ["auto={" + ", ".join(f"{key}: {value}" for key, value in alone.items()) + "}"]
    ranks, file = RANKS.get(path.stem, 1), f"examples/jobs/{path.name}"
    if ranks == 1:
        assert train(file, [*SMALL, *more]) == 0
    else:
        run_ranks(on_a_rank, ranks, file, [*SMALL, *more])
    lines = read(tmp_path / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert len(losses) == 2 and losses[-1] < losses[0] + 0.2, losses
    (precision,) = (line for line in lines if line["kind"] == "precision")
    assert f" storage={MODES.get(path.stem, 'bfloat16')}" in precision["line"]
    cells = precision["cells"]
    assert "DIFFERENT" not in {cell[-1] for cell in cells}
    chosen = [cell[0] for cell in cells if cell[-1] == "as autocast chose"]
    assert chosen == (["compute"] if path.stem == "autocast" else []), "a tied head is no safe module"
    assert list((tmp_path / "run" / "export").glob("*.safetensors"))
    if path.stem == "lora":
        check_that_adapters_train_and_nothing_else(tmp_path / "run" / "export" / "adapter_model.safetensors")
    capfd.readouterr()
    app(["sample", str(tmp_path / "run"), "--prompt", "a", "--tokens", "3"], standalone_mode=False)
    assert capfd.readouterr().out.startswith("a")


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_says_how_to_run_it(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    commands = re.findall(r"^# .*zerodrift (train|sample) (\S+)", head, flags=re.MULTILINE)
    assert ("train", f"examples/jobs/{path.name}") in commands
    job, _ = read_job(path)
    assert job.run.folder == f"runs/{path.stem}"
    assert [run for verb, run in commands if verb == "sample"] in ([], [job.run.folder])


def check_that_adapters_train_and_nothing_else(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        names = list(file.keys())
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)


@pytest.mark.slow
def test_blocks_compile(tmp_path: Path) -> None:
    more = [f"run.folder={tmp_path}/run", f"data.cache={tmp_path}/cache", "model.compile=true"]
    assert train("examples/jobs/function.yaml", [*SMALL, *more]) == 0


@pytest.mark.parametrize(
    ("name", "ranks"), [("moe", 2), pytest.param("pipeline", 4, marks=pytest.mark.slow)], ids=str
)
def test_experts_on_ranks_of_their_own(tmp_path: Path, name: str, ranks: int) -> None:
    """Two expert ranks, alone and inside of a pipeline: the file that is exported is whole."""
    from safetensors import safe_open

    more = [f"run.folder={tmp_path}/run", f"data.cache={tmp_path}/cache", "config.experts.ranks=2"]
    more += ["config.zero_optimization.stage=3", "model.weights=random"]
    run_ranks(on_a_rank, ranks, f"examples/jobs/{name}.yaml", [*SMALL, *more])
    with safe_open(str(tmp_path / "run" / "export" / "model.safetensors"), "pt") as file:
        stacks = [key for key in file.keys() if ".experts." in key]  # noqa: SIM118 (not a dict)
    assert len(stacks) == 4 * 8 * 3, "every expert of every layer, under the names of published files"
