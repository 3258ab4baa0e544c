"""A laptop plans 671 billion parameters for 2,048 ranks; `bench/plan_scale.py` has its limits on time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerodrift import cost, make_plan
from zerodrift.mesh import MeshShape


def test_deepseek_v3_is_planned_for_2048_ranks(tmp_path: Path) -> None:
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
