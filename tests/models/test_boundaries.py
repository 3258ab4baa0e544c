"""Modules that compute in a dtype of their own: shared by two blocks, and as a whole piece of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.runs import config, make
from tests.numerics.test_pipelines import pipeline
from tests.ranks.harness import on_ranks


class Twice(nn.Module):
    """A norm that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(8)
        self.a = nn.Sequential(nn.Linear(8, 8), norm)
        self.b = nn.Sequential(nn.Linear(8, 8), norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.a(x)
        assert between.dtype is torch.bfloat16
        return self.b(between).float().square().mean()


def test_a_norm_that_two_blocks_share_returns_its_inputs_dtype_in_both() -> None:
    engine = make(config(0, "bf16", precision={"rules": [{"match": "*.1.*", "pin": "fp32"}]}), Twice())
    assert [each.path for each in engine.plan.boundaries] == ["a.1", "b.1"]
    engine.backward(engine(torch.randn(4, 8)))
    engine.step()
    engine.destroy()
    assert not any(part._forward_pre_hooks for part in engine.module.modules()), "nothing is left"


ONE_PIECE: list[dict[str, Any]] = [
    {"match": "model.layers.1.*", "pin": "fp32"},
    {"match": "model.norm.*", "pin": "fp32"},
]
"""Rules that pin everything that the second piece has of the base model."""


@on_ranks(2)
def test_a_piece_that_is_pinned_as_a_whole_computes_what_the_whole_model_computes() -> None:
    pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")
    from tests.models.architectures import ARCHITECTURES, labelled

    written, batches = config(0, "bf16", 2, precision={"rules": ONE_PIECE}), [labelled(n) for n in range(2)]
    engine = pipeline(written, "1f1b", None, ARCHITECTURES["llama"].model(), None, micro_batches=2)
    assert [each.path for each in engine.plan.boundaries] == ["model.layers.1", "model.norm"]
    losses = list(map(float, engine.train_batch(batches).losses))
    engine.destroy()
    engine = make(written, ARCHITECTURES["llama"].model())
    assert losses == [engine(**batch).loss.item() for batch in batches]
