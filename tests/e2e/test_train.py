"""Jobs from file to report: the files of a run, its messages, and its errors."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from tests.e2e.jobs import TEXT, exported, job, kinds, losses, on_a_rank, trained
from tests.ranks.harness import run_ranks
from tests.unit.refusals import error_of
from zerodrift.checkpoint.manifest import read_manifest
from zerodrift.errors import ConfigError, NonFiniteError, PrecisionError, ZerodriftError
from zerodrift.train.data.conversation import read_conversation
from zerodrift.train.data.documents import Document
from zerodrift.train.loop import model as models
from zerodrift.train.loop.start import dry_run, train


def test_a_run_leaves_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"evaluate_every": 4, "checkpoint_every": 3, "keep": 2}
    rows = [{"text": TEXT[start : start + 120]} for start in range(0, 3000, 100)]
    assert trained(tmp_path, steps=10, run=run, rows=rows, data={"validation": 0.2}) == 0
    folder = tmp_path / "run"
    found = losses(tmp_path)
    assert list(found) == list(range(1, 11)) and found[10] < found[1] - 0.3, found
    assert [line["step"] for line in kinds(tmp_path, "evaluation")] == [4, 8, 10]
    kept = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert kept == {"step-00000009", "step-00000010"}
    assert exported(tmp_path)
    assert "done, 10 steps" in (folder / "report.html").read_text()
    out = capsys.readouterr().out
    assert "zerodrift train" in out and "at rest" in out and "zerodrift plan" not in out
    assert len(out.split("step 1/10")[0].splitlines()) <= 16
    assert "precision: backend=native storage=bfloat16 " in out
    assert "step 10/10  loss " in out and f"report: {folder / 'report.html'}" in out


def test_checkpoints_beside_training_are_those_between_steps(tmp_path: Path) -> None:
    found = []
    for name, beside in (("a", False), ("b", True)):
        folder = tmp_path / name
        run = {"checkpoint_every": 2, "keep": 9, "asynchronous_checkpoints": beside}
        trained(folder, "not_slow", steps=5, run=run)
        saved = folder / "run" / "checkpoints"
        digests = {path.name: read_manifest(path).digests for path in saved.glob("step-*")}
        found.append((losses(folder), sorted(digests.items())))
    assert found[0] == found[1] and len(found[0][1]) == 3
    whole = exported(tmp_path / "a")
    trained(tmp_path / "b", "not_slow", steps=5, run={"resume": "step-00000002"})
    assert exported(tmp_path / "b") == whole, "going on is the same as not stopping"
    assert losses(tmp_path / "b") == found[0][0]


def test_samples_are_on_the_page_and_change_nothing(tmp_path: Path) -> None:
    found = []
    for name, samples in (("a", []), ("b", ["It is <", ""])):
        folder = tmp_path / name
        run, data = {"samples": samples, "evaluate_every": 2, "seed": 2**62}, {"validation": 0.2}
        trained(folder, "dropping", steps=4, run=run, data=data)
        found.append(losses(folder))
    assert found[0] == found[1]
    lines = [(line["step"], line["prompt"]) for line in kinds(tmp_path / "b", "sample")]
    assert lines == [(step, prompt) for step in (2, 4) for prompt in ("It is <", "")]
    assert "<b>It is &lt;</b>" in (tmp_path / "b" / "run" / "report.html").read_text()


def test_a_run_of_the_default_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The default order and the requested tree agree, with uneven micro-batches and dropout."""
    rows = [{"prompt": "what decides?", "completion": "the plan" * (1 + number % 5)} for number in range(64)]
    data = {"format": "chat", "block": 48, "validation": 0.2}
    ends, seen = set(), set()
    tree = {"reduce": {"order": "tree"}}
    for number, (ranks, stage, order) in enumerate(((1, 1, {}), (2, 3, {}), (2, 2, tree))):
        folder = tmp_path / str(number)
        config = {
            "precision": {"mode": "fp32", **order},
            "zero_optimization": {"stage": stage},
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2 // ranks,
        }
        run = {"evaluate_every": 2, "evaluate_blocks": 8}
        file = job(folder, "dropping", steps=4, rows=rows, config=config, data=data, run=run)
        run_ranks(on_a_rank, ranks, str(file), timeout=120)
        held = kinds(folder, "evaluation")
        seen.add(tuple((line["step"], line["validation_loss"], line["labels"]) for line in held))
        ends.add(exported(folder))
    assert len(ends) == 1, "the numbers of ranks differ"
    assert len(seen) == 1 and len(*seen) == 2, "so do their evaluations"


def test_an_evaluation_is_of_all_that_is_held_out_however_it_is_cut(tmp_path: Path) -> None:
    rows = [{"prompt": f"why {number}?", "completion": "because " * (1 + number % 5)} for number in range(60)]
    data, found = {"format": "chat", "block": 96, "validation": 0.3}, []
    for micro in (1, 4, 12):
        folder = tmp_path / f"{micro}"
        batch = {"train_batch_size": 12, "gradient_accumulation_steps": 12 // micro}
        config = {"precision": {"mode": "fp32"}, **batch}
        trained(folder, steps=1, rows=rows, data=data, config=config)
        (line,) = kinds(folder, "evaluation")
        found.append((line["labels"], line["validation_loss"]))
    labels, loss = found[0]
    held = [
        row for row in rows if Document(talk=read_conversation(row, "messages", "")).number(0) < 0.3 * 2**64
    ]
    assert len(held) % 12 and labels == sum(len(row["completion"]) + 1 for row in held)
    assert [each[0] for each in found] == [labels] * 3
    assert [each[1] for each in found] == pytest.approx([loss] * 3, rel=1e-5)


# --- what is refused before the first step --------------------------------------------------------------


def test_what_is_asked_for_on_the_way_lies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "positions", lambda model: 40)
    run = {"samples": ["a prompt", "a prompt that is too long for the model's 40"]}
    told = error_of(ConfigError, trained, tmp_path, steps=1, run=run, audit={"at": [1, 7]})
    assert "`audit.at`: must be steps of the run, which has 1; got 7" in told
    assert "`run.samples`: must leave room in the model's 40 positions; got 4" in told


REFUSED: dict[tuple[str, ...], tuple[str, ...]] = {
    tuple(f"config.{key}=null" for key in ("optimizer", "train_batch_size", "scheduler")): (
        *("`config.optimizer`: must be given", "`config.train_micro_batch_size_per_gpu`: must be given"),
    ),
    ("run.tensorboard=true", "run.wandb=project"): ("pip install tensorboard", "pip install wandb"),
    ("model.freeze=['token.*']",): ("must match parameters of the model; got 'token.*'",),
    ("model.source=torch.nn:Identity",): ("`model`: must leave parameters to train",),
    ("run.patience=2", "run.evaluate_every=1"): ("must come with `data.validation`",),
    ("run.evaluate_every=5",): ("run.evaluate_every`: must come with `data.validation`; got 5",),
    ("run.profile={from: 5, steps: 3}",): ("`run.profile`: must lie within the 6 steps", "got steps 5 to 7"),
    ("data.label_smoothing=0.1",): ("`data.label_smoothing`: must be 0 for a model whose loss",),
}


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_cannot_be_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    if "run.wandb=project" in overrides:  # as where it is not installed
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    told = error_of(ZerodriftError, trained, tmp_path, overrides=overrides)
    assert all(word in told for word in REFUSED[overrides])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_config_that_does_not_fit_the_ranks_starts_none(tmp_path: Path) -> None:
    """It is refused as a dry run refuses it, with its kind."""
    said, path = [], str(job(tmp_path))
    for run in (train, lambda *given: dry_run(*given, False)):
        with pytest.raises(ConfigError, match="train_batch_size") as caught:
            run(path, ("config.train_batch_size=6",), 2)
        said.append(str(caught.value))
    assert said[0] == said[1] and not (tmp_path / "run").exists()


# --- what goes wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "nan"), [("poisoned", True), ("bad_gradient", False)])
def test_a_bad_batch_is_named_saved_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, nan: bool
) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:200] + chr(7) + TEXT[201:640])
    assert trained(tmp_path, model, steps=10) == 0, "two epochs: the batch comes twice"
    skips = kinds(tmp_path, "skip")
    assert len(skips) == 2
    found = losses(tmp_path)
    bad = [line["step"] for line in skips]
    assert [found[step] is None for step in bad] == [nan, nan]
    assert all(math.isfinite(loss) for step, loss in found.items() if step not in bad)
    assert {line["parameters"][0] for line in skips} == {"embed.weight" if nan else "layers.1.up.weight"}
    for step in bad:
        (saved,) = (tmp_path / "run" / "bad").glob(f"step-{step:06d}-*")
        content = torch.load(saved, weights_only=True)
        assert (content["tokens"] == 7).any(), "the micro-batch that has it, and not the other"
    assert f"step {bad[0]} skipped: the gradient of " in capsys.readouterr().out


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(chr(7) * 640)
    with pytest.raises(NonFiniteError, match=r"`run.max_skips`: at most 2 steps in a row.*got 3"):
        trained(tmp_path, "poisoned", steps=10, run={"max_skips": 2})
    assert len(kinds(tmp_path, "skip")) == 3
    assert "failed after step" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("backend", ["native", "fsdp2"])
def test_a_dtype_that_is_not_the_plans_ends_the_run(backend: str, tmp_path: Path) -> None:
    precision = {"mode": "bf16", "rules": [{"match": "head.*", "pin": "fp32"}]}
    config = {"backend": backend, "precision": precision}
    with pytest.raises(PrecisionError, match=r"`head.weight`: `compute` must be float32 .*got bfloat16"):
        trained(tmp_path, "narrowed", config=config)
    assert "DIFFERENT" in (tmp_path / "run" / "report.html").read_text()
    assert trained(tmp_path, "narrowed", config=config, run={"check_precision": False}, steps=2) == 0


def test_a_dtype_wider_than_the_plans_is_said_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, "widened", config={"backend": "fsdp2"}, steps=2) == 0
    out = capsys.readouterr().out
    assert "precision: backend=fsdp2 storage=" in out and kinds(tmp_path, "precision")[0]["cells"]
    assert list(losses(tmp_path)) == [1, 2] and exported(tmp_path)
    assert "wider than planned: the model's own code computes in float32 with head.weight" in out
    report = (tmp_path / "run" / "report.html").read_text()
    assert "wider" in report and "DIFFERENT" not in report
