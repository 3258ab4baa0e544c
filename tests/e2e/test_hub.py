"""Names of the hub in a job are read from the cache, or refused with the command to download."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, job, trained
from tests.e2e.small_models import llama
from zerodrift.errors import ZerodriftError
from zerodrift.train.data.files import hub_cache
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.loop.start import train

pytest.importorskip("transformers")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def cached(name: str, kind: str, files: dict[str, bytes], branch: str = "main") -> Path:
    """Make a snapshot in the layout of `huggingface_hub`: links to blobs."""
    folder = hub_cache() / f"{kind}s--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for place in (snapshot, folder / "blobs", folder / "refs"):
        place.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(COMMIT)
    for file, data in files.items():
        (folder / "blobs" / file).write_bytes(data)
        (snapshot / file).symlink_to(Path("../../blobs") / file)
    return snapshot


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a model with weights."""
    folder = tmp_path_factory.mktemp("tiny")
    llama().save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def of_the_hub(folder: Path, data: str = "some/data") -> str:
    model = {"source": "some/model", "activation_checkpointing": False}
    return str(job(folder, steps=1, data={"train": data, "tokenizer": "bytes"}, model=model))


def test_models_and_data_are_read_from_the_cache(
    tmp_path: Path, tiny: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    model = cached("some/model", "model", tiny)
    rows = "".join(json.dumps({"text": f"It is line {number}, and a text."}) + "\n" for number in range(40))
    data = cached("some/data", "dataset", {"train.jsonl": rows.encode(), "README.md": b"# about it"}, "v2")
    train(of_the_hub(tmp_path))
    out = capsys.readouterr().out
    assert f"model some/model is read from the local cache: {model}" in out
    assert f"dataset some/data is read from the local cache: {data}" in out and "40 documents" in out
    held = RunFolder(tmp_path / "run").load_job()
    assert (held.model.source, held.data.train) == (str(model), str(data))


def test_a_cache_without_weights_is_no_random_model(tmp_path: Path, tiny: dict[str, bytes]) -> None:
    folder = cached("some/model", "model", {"config.json": tiny["config.json"], "pytorch_model.bin": b"."})
    path = of_the_hub(tmp_path, data=str(ROOT / "README.md"))
    with pytest.raises(ZerodriftError, match=r"got pytorch_model\.bin in .*Save it by `save_pretrained`"):
        train(path, [f"model.source={shutil.copytree(folder, tmp_path / 'copied')}"])
    with pytest.raises(ZerodriftError, match=r"must have its weights in safetensors.*hf download some/model"):
        train(path)
    train(path, ["model.weights=random"])


MISSING = {
    "model.source=org/nothing": "Run `hf download org/nothing` if it is one of the hub.",
    "data.train=[{path: org/rows, weight: 1}]": "Run `hf download --repo-type dataset org/rows`",
}


@pytest.mark.parametrize("override", MISSING)
def test_what_is_not_there_comes_with_its_command(tmp_path: Path, override: str) -> None:
    with pytest.raises(ZerodriftError, match=re.escape(MISSING[override])) as refused:
        trained(tmp_path, overrides=[override])
    assert len(refused.value.problems) == 1
