"""A laptop plans 671 billion parameters for 2,048 ranks: `bench/plan_scale.py` and its limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerodrift import cost, make_plan
from zerodrift.mesh import MeshShape

ROOT = Path(__file__).parents[2]


def test_deepseek_v3_is_planned_for_2048_ranks(tmp_path: Path) -> None:
    """The contents of the plan are checked here; its time and memory by the bench, below."""
    pytest.importorskip("transformers")
    pinned = {"mode": "bf16", "rules": [{"match": "*.mlp.gate.weight", "pin": "fp32"}]}
    published = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = {"precision": pinned, "zero_optimization": {"stage": 3}}
    plan = make_plan(config, str(tmp_path), world_size=2048)
    assert plan.mesh == MeshShape(shard=2048)
    # transformers merges the experts of a layer and keeps the correction bias as a buffer.
    assert len(plan.rows) == 909 and sum(row.columns.pinned for row in plan.rows) == 58
    parameters = sum(segment.numel for segment in plan.segments)
    assert parameters == 671_026_404_352
    padded = sum(segment.padded for segment in plan.segments)
    assert parameters <= padded < parameters * 1.001
    assert cost(plan).rest.total < 12.1 * parameters / 2048, "as little as one of 2,048 has to hold"


@pytest.mark.slow
def test_deepseek_v3_plans_within_its_limits() -> None:
    """Slow because of its limits on seconds, which a busy machine misses."""
    pytest.importorskip("transformers")
    command = [sys.executable, "bench/plan_scale.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoint, config = (
        line.split() for line in done.stdout.splitlines() if line.startswith(("safetensors", "HF config"))
    )
    # 45,395 tensors; transformers merges the experts of a layer and keeps the correction bias as a buffer.
    assert checkpoint[4:7] == ["671,026,419,200", "45,395", "58"]
    assert config[5:8] == ["671,026,404,352", "909", "58"]
