"""`docs/checkpoints.md` does what it says: its Python from top to bottom, then its commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests import commands

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    code = blocks("python")
    assert len(code) == 3
    for number, text in enumerate(code):
        exec(compile(text, f"block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "loaded runs/first/step-00000004, step 4" in printed
    assert "`optimizer`: must be adamw, as when it was saved; got lion." in printed
    kept = sorted(path.name for path in (tmp_path / "runs" / "first").iterdir())
    assert kept == ["latest", "step-00000004", "step-00000005", "step-00000006"]
    listed = set(
        re.findall(r"^ +(?:runs/first/step-00000006)?/([\w.-]+)  ", PAGE.read_text(), flags=re.MULTILINE)
    )
    found = {path.name for path in (tmp_path / "runs" / "first" / "step-00000006").iterdir()}
    assert listed == found, "the page lists the files that there are"
    lines = blocks("sh")[0].splitlines()
    assert len(lines) == 3
    for command in lines:
        program, *words = shlex.split(command)
        done = commands.run(*words)
        assert program == "zerodrift"
        assert done.returncode == 0 and "step-00000006" in done.stdout, done.stderr
