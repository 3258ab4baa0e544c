"""What a command names, as something to audit: a config, a model, and tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from zerodrift.config.load import ConfigSource, load
from zerodrift.model.runnable import runnable
from zerodrift.model.safetensors import holds
from zerodrift.model.sources import describe
from zerodrift.numerics.runs import Batch, Subject, place
from zerodrift.numerics.token_batches import drawn, read
from zerodrift.plan.build import build
from zerodrift.plan.table import Plan
from zerodrift.policy.resolve import mesh_for, resolve

SEED = 0
"""Of values that no file has."""


def of_config(
    config: ConfigSource,
    model: str,
    weights: Path | None,
    tokens: Path | None,
    count: int,
    overrides: list[str],
) -> tuple[Plan, Subject, list[Batch]]:
    """`count` micro-batches of this rank; tokens are drawn where no file has them, and so are values."""
    rank, ranks = place()
    if weights is None and Path(model).is_dir() and holds(Path(model)):
        weights = Path(model)

    def made() -> nn.Module:
        torch.manual_seed(SEED)
        return runnable(model)

    built = made()
    loaded = load(config, overrides)
    mesh = mesh_for(loaded, ranks)
    plan = build(resolve(loaded, mesh), describe(built), mesh)
    batches = drawn(built, count, rank) if tokens is None else read(tokens, count, rank, ranks)
    return plan, Subject(made, weights), batches
