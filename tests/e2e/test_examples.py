"""Every example plans by the command line, with the output of its own page."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerodrift.cli import app

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OURS = {
    "pipeline": ("bf16", 2),
    "moe-pinned": ("bf16", 3),
    "fp16": ("fp16", 2),
    "autocast": ("autocast-bf16", 1),
    "lean": ("bf16", 3),
}
"""Name -> mode and stage."""

DEEPSPEED = sorted((EXAMPLES / "deepspeed").iterdir())
PAGE = (EXAMPLES / "README.md").read_text()


def plan_commands(text: str) -> list[str]:
    """Return the `zerodrift plan` commands of a text, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    return re.findall(r"^#?\s*(zerodrift plan .*)$", joined, flags=re.MULTILINE)


@pytest.fixture
def planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], dict[str, Any]]:
    """Return a function that plans a command as JSON in this process, to import transformers once."""
    monkeypatch.chdir(ROOT)

    def plan(command: str) -> dict[str, Any]:
        code = app([*shlex.split(command)[1:], "--json"], standalone_mode=False)
        out, err = capsys.readouterr()
        assert not code, err
        found: dict[str, Any] = json.loads(out)
        return found

    return plan


@pytest.mark.parametrize("name", OURS)
def test_ours_plans_by_the_command_in_its_head(name: str, planned: Any) -> None:
    (command,) = plan_commands((EXAMPLES / f"{name}.yaml").read_text())
    assert f"examples/{name}.yaml" in command
    policy = planned(command)["policy"]
    assert (policy["mode"], policy["sharding"]["stage"]) == OURS[name] and policy["ignored"] == []


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_a_deepspeed_config_plans_as_it_is(path: Path, planned: Any) -> None:
    place = f"examples/deepspeed/{path.name}"
    command = f"zerodrift plan {place} --model examples/qwen3-moe-tiny --world-size 2"
    if '"auto"' in path.read_text():
        (command,) = (each for each in plan_commands(PAGE) if place in each)
    assert planned(command)["rows"]


def test_the_page_has_every_example() -> None:
    linked = {(EXAMPLES / target).resolve() for target in re.findall(r"\]\(([^)]+)\)", PAGE)}
    assert {*EXAMPLES.glob("*.yaml"), *DEEPSPEED, *EXAMPLES.glob("*/config.json")} <= linked
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == OURS.keys()
