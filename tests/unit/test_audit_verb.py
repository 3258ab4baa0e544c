"""`zerodrift audit`, from the command line to its output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from tests.audit.networks import Decoder
from zerodrift.cli import app

HERE = "tests.unit.test_audit_verb"
CONFIG = "{precision: {mode: bf16}, optimizer: {type: AdamW, params: {lr: 0.001}}}"


def small() -> nn.Module:
    model = Decoder(1)
    model.main_input_name = "input_ids"  # type: ignore[assignment]
    return model


def with_a_row() -> nn.Module:
    """Return a model without a loss."""
    model: Any = small()
    model.forward = lambda input_ids, labels: model.head(model.words(input_ids))
    return model


def audited(folder: Path, *more: str, model: str = "small") -> Result:
    (folder / "config.yaml").write_text(CONFIG)
    ids = torch.randint(0, 31, (8, 12), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "ids.json").write_text(json.dumps(ids))
    words = ["audit", str(folder / "config.yaml"), "--model", f"{HERE}:{model}", "--batches", "2"]
    words += ["--confirm", "2", "--data", str(folder / "ids.json"), *more]
    return CliRunner().invoke(app, words, env={"COLUMNS": "80"})


@pytest.mark.second
def test_what_is_printed_is_what_the_json_says(tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    done = audited(tmp_path, "--html", str(page))
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "mode bf16, 1 rank, 2 micro-batches" in done.stdout and "pins   each line was run" in done.stdout
    assert "<svg" in page.read_text() and "head.weight" in page.read_text()
    told = json.loads(audited(tmp_path, "--json").stdout)
    assert told["drift"]["count"] == 8 * 11 and told["drift"]["rms"] > 0
    assert f"rms {told['drift']['rms']:.2g} of a log-probability" in done.stdout
    advice = told["recommendation"]
    assert advice["config"] in done.stdout
    assert advice["points"][0]["drift"]["rms"] == told["drift"]["rms"]
    assert advice["removed"] >= 0.9
    assert len(told["replayed"]) == 2


@pytest.mark.parametrize(
    ("more", "model", "told"),
    [
        (["--budget", "much"], "small", "--budget.*must be a share such as 1% or 0.01; got 'much'"),
        (["--budget", "-1%"], "small", "--budget"),
        (["--narrow", "size"], "small", "--narrow.*must be bytes or speed.*bytes:0.01; got 'size'"),
        (["--narrow", "bytes:0x"], "small", "--narrow.*must be bytes or speed"),
        (["--batches", "9"], "small", "must have a sequence for each of 9 micro-batches; got 8"),
        ([], "with_a_row", "must return a loss"),
        ([], "missing", "missing"),
        (["--set", "precision.mode=bf17"], "small", "bf17"),
    ],
)
def test_what_cannot_be_audited_is_one_error(
    tmp_path: Path, more: list[str], model: str, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = audited(tmp_path, *more, model=model)
    assert done.exit_code == 2
    said = done.output + capfd.readouterr().err
    assert re.search(told, said, re.DOTALL), said
    assert "Traceback" not in said


def test_a_job_has_its_own_model(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: {source: x}\ndata: {train: y}\nconfig: {}\n")
    done = CliRunner().invoke(app, ["audit", str(tmp_path / "job.yaml"), "--model", "z"])
    assert done.exit_code == 2
