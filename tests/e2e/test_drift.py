"""`zerodrift drift` as a person runs it: exit codes, text, JSON, a saved table as the trainer's side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import commands
from tests.models.planted_sides import PlantedSide, lively, token_ids

MODEL = "from tests.models.planted_sides import lively\n\ndef make():\n    return lively('plain')\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_decoder.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text("precision: {mode: bf16}\n")
    (tmp_path / "ids.json").write_text(json.dumps(token_ids()[:2, :12].tolist()))
    side = PlantedSide(lively("plain"))
    (tmp_path / "trained").mkdir()
    save_file(side.tensors, tmp_path / "trained" / "model.safetensors")
    side.in_bf16()
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        save_file(side.tensors, tmp_path / name / "model.safetensors")
        side.tensors["layers.1.attn.v.weight"] = torch.zeros(32, 32, dtype=torch.bfloat16)
    return tmp_path


COMMAND = ["drift", "config.yaml", "--model", "tiny_decoder:make"]
COMMAND += ["--weights", "trained", "--tokens", "ids.json"]


@pytest.mark.long
def test_exit_codes_are_for_ci(here: Path) -> None:
    good = commands.run(*COMMAND, "--sent", "good")
    assert good.returncode == 0, good.stderr
    assert "within the bar: mean |difference| 0, bar 0.015" in good.stdout
    bad = commands.run(*COMMAND, "--sent", "good", "--loaded", "bad")
    assert bad.returncode == 3, bad.stderr
    assert "1 tensor not what was trained" in bad.stdout and "layers.1.attn.v.weight" in bad.stdout
    (here / "sampler.yaml").write_text("kv: fp8_e4m3\n")
    above = commands.run(*COMMAND, "--sampler", "sampler.yaml", "--bar", "1e-9", "--json")
    assert above.returncode == 3, above.stderr
    data = json.loads(above.stdout)
    assert data["cells"][0]["key"] == "kv" and data["drift"]["mean_abs"] > 1e-9 and not data["within"]
    missing = commands.run(*COMMAND, "--sent", "nowhere")
    assert missing.returncode == 2 and "nowhere" in missing.stderr and "Traceback" not in missing.stderr
