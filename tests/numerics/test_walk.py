"""The walk of docs/architecture.md names the files from config to export in their order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import zerodrift
from tests.numerics.networks import GPT, batch

ROOT = Path(__file__).parents[2]
PACKAGE = Path(zerodrift.__file__).parent
WEIGHT, ROUTER = "layers.0.mlp.experts.0.up.weight", "layers.0.mlp.router.weight"
CONFIG = {
    "precision": {"mode": "bf16", "rules": [{"match": "*.router.*", "pin": "fp32"}]},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def steps() -> list[tuple[str, str]]:
    """Return (file, function) of each line of the table."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("\n## 7. ")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \| `(?:\w+\.)?(\w+)` \|", section, re.MULTILINE)


def walk(folder: Path) -> list[tuple[str, str]]:
    """Return (file, function) of every called function of zerodrift, by its first call."""
    seen: dict[CodeType, None] = {}

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    sys.setprofile(look)
    try:
        engine = zerodrift.initialize(GPT(moe=True), config=CONFIG, device="cpu")
        assert {WEIGHT, ROUTER} <= {row.name for row in engine.plan.rows}
        engine.backward(engine(batch(0, 0, samples=4)))
        engine.step()
        zerodrift.export(engine, folder)
    finally:
        sys.setprofile(None)
    engine.destroy()
    inside = [code for code in seen if code.co_filename.startswith(str(PACKAGE))]
    return [(Path(c.co_filename).relative_to(PACKAGE).as_posix(), c.co_name) for c in inside]


def test_the_walk_names_each_file_once_and_in_order(tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(0)
    told = steps()
    files = [file for file, _ in told]
    assert len(told) > 20 and len(set(files)) == len(files)
    assert all((PACKAGE / file).is_file() for file in files)
    order = walk(tmp_path / "model")
    assert [step for step in told if step not in order] == []
    assert sorted(told, key=order.index) == told
    out = capsys.readouterr().out
    assert "layers.*.mlp.experts.*.up.weight" in out and "layers.*.mlp.router x2" in out
