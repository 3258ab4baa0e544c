"""CONTRIBUTING names the files that an addition touches: a value of a column is added with those alone.

The package is copied, the files that the recipe names are edited, and a process of its own uses the value.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.ranks.harness import forks, redirect

ROOT = Path(__file__).parents[2]

EDITS: dict[str, tuple[str, str]] = {
    "dtypes.py": (
        '    "gather": (*_TRAINING, *_FLAT),\n',
        '    "gather": (*_TRAINING, *_FLAT, DType.E5M2_128),\n',
    ),
}
"""File of the package -> a text, and its replacement."""
"""First lines of the uses below."""

USE = """
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
"""


def recipe(title: str) -> str:
    """Return a paragraph of CONTRIBUTING, up to the conditions that few changes meet."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paragraph = " ".join(text.partition(f"**{title}.**")[2].partition("\n\n")[0].split())
    return paragraph.partition(" Only where ")[0]


@pytest.mark.long
def test_the_files_of_a_recipe_are_enough(tmp_path: Path) -> None:
    assert set(re.findall(r"`([\w/]+\.(?:py|h))`", recipe("A column value"))) == set(EDITS)
    package = tmp_path / "zerodrift"
    shutil.copytree(ROOT / "src" / "zerodrift", package)  # compiled files too: they stay valid
    for name, (there, instead) in EDITS.items():
        text = (package / name).read_text(encoding="utf-8")
        assert text.count(there) == 1, f"{name}: {there!r}"
        (package / name).write_text(text.replace(there, instead), encoding="utf-8")
    said = tmp_path / "said"
    process = forks().Process(target=_use, args=(USE, tmp_path, said))
    process.start()
    process.join(timeout=300)
    process.kill()
    assert process.exitcode == 0, said.read_text()[-3000:]


def _use(code: str, folder: Path, said: Path) -> None:
    """Run code with the package in a folder, in a process that has everything else imported."""
    redirect(said, said)
    for name in list(sys.modules):
        if name.split(".")[0] in ("zerodrift", "tests"):
            del sys.modules[name]
    sys.path[:0] = [str(folder), str(ROOT)]
    exec(compile(code, "use", "exec"), {"__name__": "use"})
    import zerodrift

    assert Path(zerodrift.__file__).parent == folder / "zerodrift"
