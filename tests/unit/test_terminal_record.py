"""The recorder of docs: what a terminal shows becomes rows, pictures, and one file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("pyte", reason="only needed to record")

RECORDER = Path(__file__).parents[2] / "tools" / "record.py"
SVG = "{http://www.w3.org/2000/svg}"

SCRIPT = """
import time
for number in range(30):
    print(f"\\rstep {number} <&>", end="", flush=True)
    time.sleep(0.01)
print("\\n\\x1b[1;31mdone\\x1b[0m")
"""


def record(file: Path, script: str) -> subprocess.CompletedProcess[str]:
    size = ["--width", "40", "--height", "5", "--frames", "6"]
    command = [sys.executable, RECORDER, file, *size, "--", sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_command_becomes_a_moving_picture(tmp_path: Path) -> None:
    file = tmp_path / "out" / "a.svg"
    done = record(file, SCRIPT)
    assert done.returncode == 0, done.stderr
    root = ElementTree.parse(file).getroot()
    pictures = root.findall(f"{SVG}g/{SVG}g")
    assert 2 <= len(pictures) <= 7
    rows = {row.get("id"): row for row in root.iter(f"{SVG}text")}
    assert len(rows) == len({"".join(row.itertext()) for row in rows.values()}), "a row is in the file once"
    last = [rows[use.get("href", "")[1:]] for use in pictures[-1]]
    assert ["".join(row.itertext()) for row in last] == ["step 29 <&>", "done"]
    assert last[1][0].get("font-weight") == "bold"


def test_a_command_that_fails_leaves_no_picture(tmp_path: Path) -> None:
    done = record(tmp_path / "a.svg", "raise SystemExit(3)")
    assert done.returncode == 1 and "ended with 3" in done.stderr
    assert not (tmp_path / "a.svg").exists()
