"""Reports of a run: the page, lines of metrics, and the live line."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.models import moe
from tests.unit.test_report_page import read as read_page
from zerodrift.api import make_plan
from zerodrift.inspect.trace.operations import forward_flops
from zerodrift.train.job import Job
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.loop.training import flops_per_token
from zerodrift.train.report.display import Display, LiveDisplay, clock
from zerodrift.train.report.metrics import Metrics, RunLines, StepMetrics, read
from zerodrift.train.report.page import peak, readable, run_page

JOB = Job(model={"source": "m"}, data={"train": "text"})


def step(number: int, loss: float = 2.0, skipped: bool = False) -> StepMetrics:
    return StepMetrics(
        number, loss, 1.5, 1e-3, 1.0, number * 64, number / 10, number * 0.5, 128.0, 1 << 28, skipped
    )


# --- the page ------------------------------------------------------------------------------------------


def page(lines: list[dict[str, Any]], **run: Any) -> str:
    job = Job(model={"source": "m"}, data={"train": "<text>"}, run={"folder": "runs/<a>", **run})
    plan = make_plan({"precision": {"mode": "bf16"}}, moe(), world_size=2)
    return run_page(job, plan, RunLines(lines), steps=3)


CELLS = [
    ["storage", "bfloat16", "bfloat16", 3, 100, "as declared"],
    ["reduce", "float32", "bfloat16", 3, 100, "DIFFERENT"],
]
LINES: list[dict[str, Any]] = [
    {"kind": "start", "step": 0},
    {"kind": "precision", "step": 1, "line": "", "logits": ["bfloat16"], "cells": CELLS},
    *(
        {"kind": "step", **{f: getattr(step(n), f) for f in StepMetrics.__dataclass_fields__}}
        for n in (1, 2, 3)
    ),
    {"kind": "evaluation", "step": 3, "validation_loss": 1.875},
]


def test_the_page_is_whole_refers_to_nothing_and_has_the_figures() -> None:
    here = {"command": "zerodrift train job.yaml", "commit": "abc-dirty", "host": "here", "torch": "2.13"}
    start = {"kind": "start", "step": 0, "environment": here, "data": [["held out", "4 blocks"]]}
    digest = {"kind": "checkpoint", "step": 2, "took": 1.0, "digest": "f00d"}
    text = page([start, *LINES[1:], digest, {"kind": "sample", "step": 3, "prompt": "def ", "text": "<f>"}])
    found = read_page(text).attributes
    assert not [value for key, value in found if key in ("src", "href") or "http" in (value or "")]
    assert "runs/&lt;a&gt;" in text and "<text>" not in text
    for figure in ("1.8750", "running, step 3 of 3", "256 MiB", "DIFFERENT", "as declared"):
        assert figure in text, figure
    for word in ("zerodrift train job.yaml", "abc-dirty", "4 blocks", "f00d", "<b>def </b>&lt;f&gt;"):
        assert word in text, word
    assert "nothing yet" in page([{"kind": "start", "step": 0}])


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"stopped": ""}, "done, 3 steps"),
        ({"stopped": "SIGTERM"}, "stopped after step 3 of 3"),
        ({"error": "no <memory>\nLower it."}, "failed after step 3 of 3"),
    ],
)
def test_the_page_says_how_a_run_ended_and_why_before_anything_else(end: dict[str, str], words: str) -> None:
    text = page([*LINES, {"kind": "end", "step": 3, **end}])
    assert words in text and ('role="alert"' in text) is ("error" in end)
    if "error" in end:
        assert text.index('role="alert"') < text.index('class="tiles"')
        assert "<pre>no &lt;memory&gt;\nLower it.</pre>" in text


def test_a_loss_that_is_no_number_has_no_perplexity() -> None:
    broken = [{**line, "loss": math.nan} if line["kind"] == "step" else line for line in LINES[:-1]]
    text = page([*broken, {"kind": "evaluation", "step": 3, "validation_loss": math.nan}])
    assert "never a number" in text and "above 1" not in text
    text = page([*LINES, {"kind": "evaluation", "step": 4, "validation_loss": math.nan}])
    assert "best 1.8750 at step 3" in text


@pytest.mark.parametrize(
    ("device", "tera", "words"),
    [
        ("NVIDIA H200", 989, "of 989 TFLOP/s, dense bf16 on NVIDIA H200"),
        ("NVIDIA H100 PCIe", 756, "of 756 TFLOP/s"),
        ("NVIDIA A10G", None, "the peak of NVIDIA A10G is not known here"),
        ("", None, "no share: a CPU states no peak"),
    ],
)
def test_utilisation_states_its_peak_or_why_there_is_none(device: str, tera: int | None, words: str) -> None:
    """A device has the peak of its maker, and not of a namesake."""
    assert peak(device, "bf16") == (None if tera is None else tera * 1e12)
    lines = [{"kind": "start", "step": 0, "device": device}, *LINES[1:]]
    assert words in page([*lines, {"kind": "flops", "step": 1, "per_token": 6e9}])
    assert "not counted" in page(lines)
    assert flops_per_token([("mm", 4), ("view", 0)], 2) == {"per_token": 6} and not flops_per_token([], 2)
    refused = {"kind": "flops", "step": 1, **flops_per_token([("mm", 4), ("attention", None)], 2)}
    assert "not counted: torch&#x27;s formula fails for attention" in page([*lines, refused])


def test_the_flops_of_a_forward_are_those_of_its_products() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False))
    with forward_flops(model) as flops:
        for _ in range(2):
            model(torch.ones(5, 8)).sum().backward()
    assert sum(count or 0 for _, count in flops) == 2 * 5 * (8 * 16 + 16 * 4)
    assert [readable(flops) for flops in (0, 1.5e9, 4.2e13)] == ["0 FLOP/s", "1.5 GFLOP/s", "42 TFLOP/s"]


# --- metrics and lines ---------------------------------------------------------------------------------


def test_going_on_takes_out_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = Metrics(folder, JOB, after=0)
    for number in range(1, 6):
        first.write("step", asdict(step(number, loss=math.nan if number == 2 else 1.0)))
    first.write("end", {"step": 5})
    first.close()
    with folder.metrics.open("a") as file:
        file.write('{"kind": "step", "ste')
    again = Metrics(folder, JOB, after=3)
    assert again.lines.last("seconds") == 1.5
    again.write("step", asdict(step(4)))
    again.close()
    found = read(folder.metrics)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert found[1]["loss"] is None
    ended = Metrics(folder, JOB, after=4)
    ended.write("end", {"step": 4})
    again = Metrics(folder, JOB, after=4)
    again.write("end", {"step": 4})
    assert ended.has_news and not again.has_news, "the same end says nothing new"
    again.write("sample", {"step": 4, "prompt": "a", "text": "b"})
    assert again.has_news


@pytest.mark.parametrize(
    "damage",
    [
        *(b"3", b"", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"kind": 4}'),
        *(b'{"kind": "step", "step": 2}', b'{"kind": "step", "step": "2"}', b'{"kind": "precision"}'),
    ],
)
def test_a_damaged_line_is_left_out_and_counted(damage: bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = Metrics(folder, JOB, after=0)
    for number in (1, 2):
        first.write("step", asdict(step(number)))
    first.close()
    whole = folder.metrics.read_bytes().split(b"\n")
    folder.metrics.write_bytes(b"\n".join([whole[0], damage, *whole[1:]]))
    again = Metrics(folder, JOB, after=2)
    again.close()
    assert again.lost == 1 and again.lines.last("seconds") == 1.0
    assert [line["step"] for line in read(folder.metrics)] == [1, 2]
    assert page(read(folder.metrics))


def test_lines_come_at_the_interval_and_at_the_end_with_the_rest_from_the_pace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Display(every=2)
    lines.start(0, 5, lambda: (0, 1))
    for number in range(1, 6):
        lines.step(step(number))
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out] == ["2/5", "4/5", "5/5"]
    assert out[0].startswith("step 2/5  loss 2.0000  norm 1.50  lr 1.00e-03  128 tokens/s  256 MiB  eta 0:02")
    assert [clock(5), clock(65), clock(3725)] == ["0:05", "1:05", "1:02:05"]
    monkeypatch.setattr(LiveDisplay, "_show", lambda _: None)
    live = LiveDisplay()
    live.start(1198, 24000, lambda: (2, 8))
    live.evaluation(1198, 2.4001)
    for number in (1199, 1200):
        live.step(step(number, loss=2.34567))
    live._since -= 4.0
    texts = {}
    for width in (20, 60, 200):
        live._console.width = width
        texts[width] = live.line().plain
        assert len(texts[width]) <= width
    assert texts[60].startswith("step 1200/24000  ") and texts[60].endswith("eta 3:10:00")
    assert "micro-batch 3/8  loss 2.3457  val 2.4001" in texts[200] and "━  " in texts[200].replace("5%", "")
