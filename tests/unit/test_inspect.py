"""`zerodrift inspect` shows the contents of a checkpoint as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import commands
from tests.unit.test_checkpoint_folder import save
from zerodrift.checkpoint import inspection
from zerodrift.checkpoint.folder import CheckpointFolder
from zerodrift.checkpoint.inspection import inspect
from zerodrift.errors import CheckpointError


def test_one_checkpoint(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 7)
    found = inspect(path)
    assert isinstance(found, inspection.Inspection) and found.complete
    text = inspection.inspection_text(found, color=False)
    assert max(map(len, text.splitlines())) <= 100
    for line in (
        "step       7, 1 skipped",
        "optimizer  adamw, lr 0.001, schedule WarmupLR",
        "complete   yes, by sizes",
        "weights     fp32   3        6048      23.6 KiB",
        "exp_avg_sq  fp32   3        6048      23.6 KiB",
        "layers.*.up.weight  x2  64 x 32  fp32   exp_avg, exp_avg_sq",
        "embed.weight            61 x 32  fp32   exp_avg, exp_avg_sq  (tied to head.weight)",
    ):
        assert line in text, text
    assert "yes, every bit" in inspection.inspection_text(inspect(path, verify=True), color=False)


def test_a_folder_of_them(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    save(folder, 2)
    folder.begin("step-00000003").lock.release()
    found = inspect(tmp_path)
    assert isinstance(found, inspection.FolderInspection) and found.complete and len(found.unfinished) == 1
    text = inspection.inspection_text(found, color=False)
    assert "step-00000002 (latest)" in text and "no: under way" in text
    assert max(map(len, text.splitlines())) <= 100
    document = json.loads(inspection.inspection_json(found))
    one = document["inspections"][0]
    assert document["complete"] and document["latest"] == "step-00000002"
    assert one["manifest"]["step"] == 1 and one["holdings"][0]["elements"] == 6048
    assert one["kin"][1]["pattern"] == "layers.*.up.weight"


@pytest.mark.long
def test_damage_and_something_else_are_an_exit_code(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got a folder without any"):
        inspect(tmp_path)
    found = commands.run("inspect", tmp_path / "none")
    assert found.returncode == 2 and "got no such folder" in found.stderr
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    path = save(folder, 2)
    data = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(b"\7" + data[1:])
    assert commands.run("inspect", tmp_path).returncode == 0
    found = commands.run("inspect", tmp_path, "--verify")
    assert found.returncode == 2 and "no: 1 of 2 files" in found.stdout
    found = commands.run("inspect", path, "--verify", "--json")
    document = json.loads(found.stdout)
    assert found.returncode == 2 and document["complete"] is False
    assert "must be the bits that were written" in document["problems"][0]
    (path / "checkpoint.json").write_text("{")
    found = commands.run("inspect", tmp_path)
    assert found.returncode == 2 and "must be the manifest that was written" in " ".join(found.stdout.split())
