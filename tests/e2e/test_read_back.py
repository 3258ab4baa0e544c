"""The files of a run are read back: a checkpoint by its name or path, a whole export, the job."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.jobs import job, losses
from zerodrift.errors import ConfigError, ZerodriftError
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.loop.start import train
from zerodrift.train.tools.sample import SamplingOptions, TextGenerator, choose


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train six steps with a checkpoint every two, and return the run's folder."""
    folder = tmp_path_factory.mktemp("run")
    assert train(str(job(folder, run={"checkpoint_every": 2, "keep": 3}))) == 0
    return folder


@pytest.mark.parametrize("by", ["tag", "path"])
def test_a_run_goes_on_from_the_checkpoint_that_is_named(by: str, run: Path, tmp_path: Path) -> None:
    saved = run / "run" / "checkpoints"
    shutil.copy(run / "text.txt", tmp_path)
    if by == "tag":
        shutil.copytree(saved, tmp_path / "run" / "checkpoints")
    wanted = "step-00000004" if by == "tag" else str(saved / "step-00000004")
    assert train(str(job(tmp_path, run={"resume": wanted}))) == 0
    found = losses(tmp_path)
    assert found == {step: losses(run)[step] for step in (5, 6)}


def test_a_checkpoint_that_is_not_there_is_named(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "text.txt", tmp_path)
    for wanted in (str(tmp_path / "none" / "step-00000004"), "step-00000005"):
        with pytest.raises(ZerodriftError, match="step-0000000"):
            train(str(job(tmp_path, run={"resume": wanted})))


# --- sampling -------------------------------------------------------------------------------------------


def rewrite(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (file,) = (folder / "export").glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return damage


def lose(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[min(tensors)]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["other"] = torch.ones(2)


def bend(tensors: dict[str, torch.Tensor]) -> None:
    tensors[min(tensors)] = torch.ones(2)


def cut(folder: Path) -> None:
    (file,) = (folder / "export").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-40])


def empty(folder: Path) -> None:
    for file in (folder / "export").iterdir():
        file.unlink()


def not_a_job(text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "job.json").write_text(text)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tensor missing": (rewrite(lose), "must hold every tensor"),
    "a tensor too many": (rewrite(add), "that the model lacks.*`other`"),
    "a shape": (rewrite(bend), "must hold the tensors of the model"),
    "cut": (cut, "must be readable"),
    "nothing": (empty, "must hold every tensor"),
    "no JSON": (not_a_job("{"), r"job\.json.*must be valid JSON"),
    "no job": (not_a_job("{}"), r"`model`: must be given"),
    "another key": (not_a_job(json.dumps({"model": {"source": 3}})), r"model\.source"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_not_sampled_from(damage: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "run", tmp_path / "run")
    change, words = DAMAGES[damage]
    change(tmp_path / "run")
    with pytest.raises(ZerodriftError, match=words):
        TextGenerator(tmp_path / "run")


def test_export_and_checkpoint_are_one_model(run: Path, tmp_path: Path) -> None:
    taste = SamplingOptions(tokens=20, temperature=1.0, top=0, seed=3)
    said = "".join(TextGenerator(run / "run").continue_prompt("It is", taste))
    shutil.copytree(run / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "export")
    assert "".join(TextGenerator(tmp_path / "run").continue_prompt("It is", taste)) == said
    other = json.loads(RunFolder(tmp_path / "run").job.read_text())
    other["model"]["source"] = "tests.e2e.small_models:deep"
    RunFolder(tmp_path / "run").job.write_text(json.dumps(other))
    with pytest.raises(ZerodriftError):
        TextGenerator(tmp_path / "run")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_that_diverged_is_not_sampled_from(bad: float) -> None:
    logits = torch.zeros(8)
    logits[3] = bad
    with pytest.raises(ZerodriftError, match="`logits`: must be finite"):
        choose(logits, SamplingOptions(1, 1.0, 0, 0), torch.Generator())


def test_whatever_a_run_leaves_is_found_from_any_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zerodrift.cli import app

    monkeypatch.chdir(tmp_path)
    folder = run / "run"
    taste = SamplingOptions(tokens=5, temperature=0.0, top=0, seed=3)
    tag = max(path.name for path in (folder / "checkpoints").glob("step-*"))
    parts = ("", "export", "checkpoints", f"checkpoints/{tag}")
    said = {"".join(TextGenerator(folder / part).continue_prompt("It is", taste)) for part in parts}
    assert len(said) == 1
    for number, part in enumerate(parts):
        app(["inspect", str(folder / part)], standalone_mode=False)
        assert "zerodrift inspect" in capsys.readouterr().out
        command = ["convert", str(folder / part), str(tmp_path / f"out-{number}"), "--to", "safetensors"]
        app(command, standalone_mode=False)
        assert list((tmp_path / f"out-{number}").glob("*.safetensors"))
    with pytest.raises(ConfigError, match=r"must be the folder of a run, its `export`.*looked for in"):
        TextGenerator(Path("nowhere"))
