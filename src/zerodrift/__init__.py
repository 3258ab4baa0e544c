"""zerodrift: sharded mixed-precision training in which every dtype is decided in one readable table.

Names are loaded on first use, so that `import zerodrift` is fast and needs no torch. Type checkers read the
imports below, and Python reads `_NAMES`. A test compares the two.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zerodrift.versions import __version__ as __version__

if TYPE_CHECKING:
    from zerodrift.api import empty as empty
    from zerodrift.api import export as export
    from zerodrift.api import initialize as initialize
    from zerodrift.api import load_weights as load_weights
    from zerodrift.api import make_plan as make_plan
    from zerodrift.checkpoint.checkpoints import Checkpoints as Checkpoints
    from zerodrift.checkpoint.checkpoints import Loaded as Loaded
    from zerodrift.config.load import load as load
    from zerodrift.config.schema import Bf16 as Bf16
    from zerodrift.config.schema import Config as Config
    from zerodrift.config.schema import DataTypes as DataTypes
    from zerodrift.config.schema import Experts as Experts
    from zerodrift.config.schema import Fp16 as Fp16
    from zerodrift.config.schema import OffloadOptimizer as OffloadOptimizer
    from zerodrift.config.schema import Optimizer as Optimizer
    from zerodrift.config.schema import Pipeline as Pipeline
    from zerodrift.config.schema import Precision as Precision
    from zerodrift.config.schema import Reduce as Reduce
    from zerodrift.config.schema import Rule as Rule
    from zerodrift.config.schema import Scheduler as Scheduler
    from zerodrift.config.schema import Sharding as Sharding
    from zerodrift.config.schema import TorchAutocast as TorchAutocast
    from zerodrift.config.schema import ZeroOptimization as ZeroOptimization
    from zerodrift.engine.engine import Engine as Engine
    from zerodrift.engine.executor import BatchResult as BatchResult
    from zerodrift.engine.progress import StepResult as StepResult
    from zerodrift.engine.values import ParameterHandle as ParameterHandle
    from zerodrift.errors import CheckpointError as CheckpointError
    from zerodrift.errors import ConfigError as ConfigError
    from zerodrift.errors import MeshError as MeshError
    from zerodrift.errors import ModelError as ModelError
    from zerodrift.errors import NonFiniteError as NonFiniteError
    from zerodrift.errors import PrecisionError as PrecisionError
    from zerodrift.errors import RankError as RankError
    from zerodrift.errors import UnsupportedError as UnsupportedError
    from zerodrift.errors import ZerodriftError as ZerodriftError
    from zerodrift.inspect.audit.audit import audit as audit
    from zerodrift.inspect.audit.text import Audit as Audit
    from zerodrift.inspect.check.observation import Observation as Observation
    from zerodrift.inspect.check.observation import observe as observe
    from zerodrift.mesh import MeshShape as MeshShape
    from zerodrift.model.sources import describe as describe
    from zerodrift.model.spec import ModelSpec as ModelSpec
    from zerodrift.pipeline.cut import Parts as Parts
    from zerodrift.plan.build import build as build
    from zerodrift.plan.cost import Cost as Cost
    from zerodrift.plan.cost import cost as cost
    from zerodrift.plan.table import Plan as Plan
    from zerodrift.policy.nouns import Policy as Policy
    from zerodrift.policy.resolve import mesh_for as mesh_for
    from zerodrift.policy.resolve import resolve as resolve
    from zerodrift.weights.export import Exported as Exported
    from zerodrift.weights.load import LoadedWeights as LoadedWeights

_NAMES = {
    "api": "empty export initialize load_weights make_plan",
    "inspect.check.observation": "Observation observe",
    "config.load": "load",
    "config.schema": (
        "Bf16 Config DataTypes Experts Fp16 OffloadOptimizer Optimizer Pipeline Precision Reduce Rule "
        "Scheduler Sharding TorchAutocast ZeroOptimization"
    ),
    "engine.executor": "BatchResult",
    "engine.engine": "Engine",
    "engine.values": "ParameterHandle",
    "engine.progress": "StepResult",
    "errors": (
        "CheckpointError ConfigError MeshError ModelError NonFiniteError PrecisionError RankError "
        "UnsupportedError ZerodriftError"
    ),
    "checkpoint.checkpoints": "Checkpoints Loaded",
    "weights.export": "Exported",
    "weights.load": "LoadedWeights",
    "mesh": "MeshShape",
    "model.sources": "describe",
    "model.spec": "ModelSpec",
    "inspect.audit.audit": "audit",
    "inspect.audit.text": "Audit",
    "pipeline.cut": "Parts",
    "plan.build": "build",
    "plan.cost": "Cost cost",
    "plan.table": "Plan",
    "policy.nouns": "Policy",
    "policy.resolve": "mesh_for resolve",
}
"""Module -> its public names."""

_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'zerodrift' has no attribute {name!r}")
    return getattr(importlib.import_module(f"zerodrift.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
