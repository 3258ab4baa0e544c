"""zerodrift: sharded mixed-precision training in which every dtype is decided in one readable table.

Names are loaded on first use, so that `import zerodrift` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zerodrift.api import initialize, make_plan
    from zerodrift.config.load import load
    from zerodrift.config.schema import Config
    from zerodrift.engine.engine import Engine, StepResult
    from zerodrift.errors import (
        ConfigError,
        MeshError,
        ModelError,
        NonFiniteError,
        RankError,
        UnsupportedError,
        ZerodriftError,
    )
    from zerodrift.mesh import MeshShape
    from zerodrift.model.sources import describe
    from zerodrift.model.spec import ModelSpec
    from zerodrift.plan.build import build
    from zerodrift.plan.cost import Cost, cost
    from zerodrift.plan.table import Plan
    from zerodrift.policy.nouns import Policy
    from zerodrift.policy.resolve import mesh_for, resolve

_HOMES = {
    "Config": "config.schema",
    "ConfigError": "errors",
    "Cost": "plan.cost",
    "Engine": "engine.engine",
    "MeshError": "errors",
    "MeshShape": "mesh",
    "ModelError": "errors",
    "ModelSpec": "model.spec",
    "NonFiniteError": "errors",
    "Plan": "plan.table",
    "Policy": "policy.nouns",
    "RankError": "errors",
    "StepResult": "engine.engine",
    "UnsupportedError": "errors",
    "ZerodriftError": "errors",
    "build": "plan.build",
    "cost": "plan.cost",
    "describe": "model.sources",
    "initialize": "api",
    "load": "config.load",
    "make_plan": "api",
    "mesh_for": "policy.resolve",
    "resolve": "policy.resolve",
}

__all__ = [
    "Config",
    "ConfigError",
    "Cost",
    "Engine",
    "MeshError",
    "MeshShape",
    "ModelError",
    "ModelSpec",
    "NonFiniteError",
    "Plan",
    "Policy",
    "RankError",
    "StepResult",
    "UnsupportedError",
    "ZerodriftError",
    "build",
    "cost",
    "describe",
    "initialize",
    "load",
    "make_plan",
    "mesh_for",
    "resolve",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'zerodrift' has no attribute {name!r}")
    return getattr(importlib.import_module(f"zerodrift.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
