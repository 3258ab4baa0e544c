"""The files of a run are read back: a checkpoint by its name or path, a whole export, the job."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.jobs import job
from zerodrift.cli import app
from zerodrift.errors import ConfigError, ZerodriftError
from zerodrift.train.loop.start import train
from zerodrift.train.tools.sample import TextGenerator, chooser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with checkpoints, and return its folder's parent."""
    folder = tmp_path_factory.mktemp("run")
    assert train(str(job(folder, steps=2, run={"checkpoint_every": 1}))) == 0
    return folder


def drop_a_tensor(folder: Path) -> None:
    (file,) = (folder / "export").glob("*.safetensors")
    tensors = load_file(file)
    del tensors[min(tensors)]
    save_file(tensors, file)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tensor missing": (drop_a_tensor, "must hold every|must have a value for every"),
    "no JSON": (lambda folder: (folder / "job.json").write_text("{") and None, "must be valid JSON"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_not_sampled_from(damage: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "run", tmp_path / "run")
    change, words = DAMAGES[damage]
    change(tmp_path / "run")
    with pytest.raises(ZerodriftError, match=words):
        TextGenerator(tmp_path / "run")


def test_whatever_a_run_leaves_is_one_model_and_found_from_any_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run / "run"
    tag = max(path.name for path in (folder / "checkpoints").glob("step-*"))
    parts = ("", "export", "checkpoints", f"checkpoints/{tag}")
    models = (TextGenerator(folder / part) for part in parts)
    said = {"".join(model.continue_prompt("It is", 20, chooser(1.0, 0, 3))) for model in models}
    assert len(said) == 1
    for number, part in enumerate(parts):
        app(["inspect", str(folder / part)], standalone_mode=False)
        assert "zerodrift inspect" in capsys.readouterr().out
        command = ["convert", str(folder / part), str(tmp_path / f"out-{number}"), "--to", "safetensors"]
        app(command, standalone_mode=False)
        assert list((tmp_path / f"out-{number}").glob("*.safetensors"))
    with pytest.raises(ConfigError, match=r"must be the folder of a run, its `export`.*looked for in"):
        TextGenerator(Path("nowhere"))
    shutil.copytree(folder / "checkpoints", tmp_path / "other" / "checkpoints")
    held = json.loads((folder / "job.json").read_text())
    held["model"]["source"] = "tests.e2e.small_models:deep"
    (tmp_path / "other" / "job.json").write_text(json.dumps(held))
    with pytest.raises(ZerodriftError):
        TextGenerator(tmp_path / "other")
