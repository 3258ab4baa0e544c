"""CONTRIBUTING names the files that an addition touches: a value of a column is added with those alone.

The package is copied, the files that the recipe names are edited, and a process of its own uses the value.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

EDITS: dict[str, tuple[str, str]] = {
    "dtypes.py": (
        '    "gather": (*_TRAINING, *_FLAT),\n',
        '    "gather": (*_TRAINING, *_FLAT, DType.E5M2_128),\n',
    ),
}
"""File of the package -> a text, and its replacement."""

USE = """
import sys
from pathlib import Path

import zerodrift
from tests.unit.models import moe
from tests.unit.tools import load_tool
from zerodrift import ConfigError, cost, load, make_plan

config = {"precision": {"mode": "bf16", "gather": "e5m2-128"}, "zero_optimization": {"stage": 3}}
plan = make_plan(config, moe(), world_size=2)
cells = {row.columns.cells()["gather"] for row in plan.rows}
assert cells == {"e5m2-128", "bf16"}, cells  # norms are vectors
traffic = {line.dtype: line.bytes for line in cost(plan).traffic if line.purpose == "forward"}
assert set(traffic) == {"e5m2-128", "bf16"}, traffic
page = load_tool("config_page").render_config()
assert "| `gather` | fp32, bf16, fp16, fp8, mxfp8, int8 or e5m2-128 |" in page
try:
    load({"precision": {"grad": "e5m2-128"}})
except ConfigError as error:
    assert "`precision.grad`: must be fp32, bf16 or fp16" in str(error)
else:
    raise AssertionError("taken")
assert Path(zerodrift.__file__).parent == Path(sys.argv[1])
"""


def recipe(title: str) -> str:
    """Return a paragraph of CONTRIBUTING, up to the conditions that few changes meet."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paragraph = " ".join(text.partition(f"**{title}.**")[2].partition("\n\n")[0].split())
    return paragraph.partition(" If other columns ")[0]


@pytest.mark.long
def test_the_files_of_a_recipe_are_enough(tmp_path: Path) -> None:
    assert set(re.findall(r"`([\w/]+\.(?:py|h))`", recipe("A column value"))) == set(EDITS)
    package = tmp_path / "zerodrift"
    shutil.copytree(ROOT / "src" / "zerodrift", package)  # compiled files too: they stay valid
    for name, (there, instead) in EDITS.items():
        text = (package / name).read_text(encoding="utf-8")
        assert text.count(there) == 1, f"{name}: {there!r}"
        (package / name).write_text(text.replace(there, instead), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", USE, str(package)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
