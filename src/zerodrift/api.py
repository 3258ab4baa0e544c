"""What a user of the library calls: thin compositions of the rooms, exported by `zerodrift`.

Invariant: nothing is decided here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zerodrift.config.load import load
from zerodrift.model.sources import describe
from zerodrift.model.spec import ModelSpec
from zerodrift.plan.build import build
from zerodrift.plan.table import Plan
from zerodrift.policy.numbers import AutoValues
from zerodrift.policy.resolve import mesh_for, resolve

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zerodrift.engine.engine import Engine


def make_plan(
    config: str | os.PathLike[str] | Mapping[str, Any],
    model: str | os.PathLike[str] | ModelSpec | nn.Module,
    world_size: int = 1,
    auto: AutoValues | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """The plan of `model` under `config` on `world_size` ranks; nothing is allocated, nothing is started.

    `config` is a YAML or JSON file or a dict, `model` a module (the meta device will do), a
    `transformers` config or folder, safetensors files, or `package.module:function`. `auto` gives the
    numbers that stand in for numeric "auto" values, `overrides` are `key=value` texts.
    """
    loaded = load(config, overrides)
    mesh = mesh_for(loaded, world_size)
    return build(resolve(loaded, mesh, auto), describe(model), mesh)


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] = "zerodrift.yaml",
    *,
    schedule: Any = None,
    device: str | torch.device | None = None,
    auto: AutoValues | None = None,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> Engine:
    """An engine that trains `model` as `config` says; prints the plan on rank 0 unless `quiet`.

    Joins the ranks that torchrun started, or those of a running torch.distributed, or is alone. `optimizer`
    is built over `model.parameters()` as usual, or comes from the config's `optimizer` block. `schedule` is
    a torch scheduler, or a function that makes one from an optimizer.
    """
    from zerodrift.comm.mesh import start
    from zerodrift.engine.engine import Engine
    from zerodrift.plan.cost import cost
    from zerodrift.report.rows import grouped
    from zerodrift.report.terminal import plan_text

    loaded = load(config, overrides)
    mesh = start(lambda world: mesh_for(loaded, world), device)
    try:
        plan = build(resolve(loaded, mesh.shape, auto), describe(model), mesh.shape)
        if mesh.rank() == 0 and not quiet:
            print(plan_text(plan, cost(plan), grouped(plan), color=sys.stdout.isatty()))
        return Engine(plan, model, mesh, optimizer, schedule)
    except BaseException:
        mesh.stop()
        raise
