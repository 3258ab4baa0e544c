"""What a user of the library calls: thin compositions of the rooms, exported by `zerodrift`.

Invariant: nothing is decided here.
"""

from __future__ import annotations

import os
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
    from torch import nn


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
