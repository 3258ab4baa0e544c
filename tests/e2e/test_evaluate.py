"""`zerodrift evaluate` reports the same metrics of a checkpoint as training, without training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import commands
from tests.e2e.jobs import job, kinds
from zerodrift.train.loop.start import evaluate, train


def test_it_says_what_training_says_on_any_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"evaluate_every": 2, "checkpoint_every": 2, "keep": 3, "samples": ["It is"]}
    path = str(job(tmp_path, steps=4, data={"validation": 0.3}, run=run))
    train(path)
    before = {file: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()}
    found = {line["step"]: line["validation_loss"] for line in kinds(tmp_path, "evaluation")}
    (_, text) = (line["text"] for line in kinds(tmp_path, "sample"))
    capsys.readouterr()
    assert evaluate(path) == 0
    last = capsys.readouterr().out
    assert "was" not in last.partition("after step")[2].partition("validation loss")[0]
    assert f"validation loss {found[4]:.6f}  perplexity" in last and f"It is{text}".splitlines()[0] in last
    assert evaluate(path, ["run.resume=step-00000002"]) == 0
    out = capsys.readouterr().out
    assert f"validation loss {found[2]:.6f}" in out and "after step 2, from" in out
    assert evaluate(path, ["run.resume=never"]) == 0
    assert "no checkpoint: tests.e2e.small_models:plain before its first step" in capsys.readouterr().out
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        assert evaluate("run") == 0, "the folder of a run is its job"
    assert f"validation loss {found[4]:.6f}" in capsys.readouterr().out
    two = commands.run("evaluate", path, "--nproc", "2")
    assert two.returncode == 0 and f"validation loss {found[4]:.6f}" in two.stdout, two.stdout + two.stderr
    assert before == {file: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()}
