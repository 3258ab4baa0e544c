"""Every example plans as its own page says, through the command line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from zerodrift.cli import app

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OURS = sorted(EXAMPLES.glob("*.yaml"))
DEEPSPEED = sorted((EXAMPLES / "deepspeed").iterdir())
PAGE = (EXAMPLES / "README.md").read_text()
STAGES = {"pipeline": 2, "moe-pinned": 3, "fp16": 2, "autocast": 1, "lean": 3}
MODES = {
    "pipeline": "bf16",
    "moe-pinned": "bf16",
    "fp16": "fp16",
    "autocast": "autocast-bf16",
    "lean": "bf16",
}


def written(text: str) -> list[str]:
    """The `zerodrift plan` commands of a text, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    return re.findall(r"^#?\s*(zerodrift plan .*)$", joined, flags=re.MULTILINE)


def planned(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, object]:
    """What a command plans, as JSON. In this process, so that transformers is imported once."""
    monkeypatch.chdir(ROOT)
    code = app([*shlex.split(command)[1:], "--json"], standalone_mode=False)
    out, err = capsys.readouterr()
    assert not code, err
    return json.loads(out)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_ours_plans_by_the_command_in_its_head(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = written(path.read_text())
    assert f"examples/{path.name}" in command
    plan = planned(command, capsys, monkeypatch)
    policy = plan["policy"]
    assert isinstance(policy, dict)
    assert (policy["mode"], policy["sharding"]["stage"]) == (MODES[path.stem], STAGES[path.stem])
    assert policy["ignored"] == []


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_a_deepspeed_config_plans_as_it_is(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"examples/deepspeed/{path.name}"
    command = f"zerodrift plan {place} --model examples/qwen3-moe-tiny --world-size 2"
    if '"auto"' in path.read_text():
        (command,) = (each for each in written(PAGE) if place in each)
    assert planned(command, capsys, monkeypatch)["rows"]


def test_the_page_has_every_example() -> None:
    linked = {(EXAMPLES / target).resolve() for target in re.findall(r"\]\(([^)]+)\)", PAGE)}
    assert {*OURS, *DEEPSPEED, *EXAMPLES.glob("*/config.json")} <= linked


def test_make_demo_trains_an_example() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (job,) = re.findall(r"^\t@\$\(BIN\)/zerodrift train (\S+)", text, re.MULTILINE)
    (run,) = re.findall(r"^\t@\$\(BIN\)/zerodrift sample (\S+)", text, re.MULTILINE)
    written = (ROOT / job).read_text()
    assert f"zerodrift train {job} --nproc 2" in written
    assert f"zerodrift sample {run}" in written and f"folder: {run}" in written


def test_a_lean_plan_is_as_lean_as_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = written((EXAMPLES / "lean.yaml").read_text())
    plan = planned(f"{command} --set precision.rules=[]", capsys, monkeypatch)
    cost = plan["cost"]
    assert isinstance(cost, dict)
    rest, parameters = cost["totals"]["rest"], cost["parameters"]
    assert 8.0 <= 2 * rest / parameters < 8.1
