"""zerodrift: sharded mixed-precision training in which every dtype is decided in one readable table.

Names are loaded on first use, so that `import zerodrift` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zerodrift.versions import __version__ as __version__

if TYPE_CHECKING:
    from zerodrift.api import (
        empty,
        export,
        initialize,
        initialize_pipeline,
        load_weights,
        make_plan,
        save_16bit,
    )
    from zerodrift.config.load import load
    from zerodrift.config.schema import Config
    from zerodrift.engine.batches import BatchResult
    from zerodrift.engine.engine import Engine
    from zerodrift.engine.progress import StepResult
    from zerodrift.errors import (
        CheckpointError,
        ConfigError,
        MeshError,
        ModelError,
        NonFiniteError,
        PrecisionError,
        RankError,
        UnsupportedError,
        ZerodriftError,
    )
    from zerodrift.io.checkpoint.checkpoints import Checkpoints, Loaded
    from zerodrift.io.safetensors.export import Exported
    from zerodrift.io.safetensors.weights import LoadedWeights
    from zerodrift.mesh import MeshShape
    from zerodrift.model.sources import describe
    from zerodrift.model.spec import ModelSpec
    from zerodrift.pipeline.cut import Parts
    from zerodrift.pipeline.deprecated import PipelineEngine
    from zerodrift.plan.build import build
    from zerodrift.plan.cost import Cost, cost
    from zerodrift.plan.table import Plan
    from zerodrift.policy.nouns import Policy
    from zerodrift.policy.resolve import mesh_for, resolve

_HOMES = {
    "BatchResult": "engine.batches",
    "CheckpointError": "errors",
    "Checkpoints": "io.checkpoint.checkpoints",
    "Config": "config.schema",
    "ConfigError": "errors",
    "Cost": "plan.cost",
    "Engine": "engine.engine",
    "Exported": "io.safetensors.export",
    "Loaded": "io.checkpoint.checkpoints",
    "LoadedWeights": "io.safetensors.weights",
    "MeshError": "errors",
    "MeshShape": "mesh",
    "ModelError": "errors",
    "ModelSpec": "model.spec",
    "NonFiniteError": "errors",
    "Parts": "pipeline.cut",
    "PipelineEngine": "pipeline.deprecated",
    "Plan": "plan.table",
    "Policy": "policy.nouns",
    "PrecisionError": "errors",
    "RankError": "errors",
    "StepResult": "engine.progress",
    "UnsupportedError": "errors",
    "ZerodriftError": "errors",
    "build": "plan.build",
    "cost": "plan.cost",
    "describe": "model.sources",
    "empty": "api",
    "export": "api",
    "initialize": "api",
    "initialize_pipeline": "api",
    "load": "config.load",
    "load_weights": "api",
    "make_plan": "api",
    "mesh_for": "policy.resolve",
    "resolve": "policy.resolve",
    "save_16bit": "api",
}

__all__ = [
    "BatchResult",
    "CheckpointError",
    "Checkpoints",
    "Config",
    "ConfigError",
    "Cost",
    "Engine",
    "Exported",
    "Loaded",
    "LoadedWeights",
    "MeshError",
    "MeshShape",
    "ModelError",
    "ModelSpec",
    "NonFiniteError",
    "Parts",
    "PipelineEngine",
    "Plan",
    "Policy",
    "PrecisionError",
    "RankError",
    "StepResult",
    "UnsupportedError",
    "ZerodriftError",
    "build",
    "cost",
    "describe",
    "empty",
    "export",
    "initialize",
    "initialize_pipeline",
    "load",
    "load_weights",
    "make_plan",
    "mesh_for",
    "resolve",
    "save_16bit",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'zerodrift' has no attribute {name!r}")
    return getattr(importlib.import_module(f"zerodrift.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
