"""zerodrift: sharded mixed-precision training in which every dtype is decided in one readable table.

Names are loaded on first use, so that `import zerodrift` is fast and needs no torch.
"""

from typing import TYPE_CHECKING

from zerodrift.faces import face
from zerodrift.versions import __version__ as __version__

if TYPE_CHECKING:
    from zerodrift.api import empty as empty
    from zerodrift.api import initialize as initialize
    from zerodrift.api import make_plan as make_plan
    from zerodrift.checkpoint.checkpoints import Checkpoints as Checkpoints
    from zerodrift.checkpoint.checkpoints import Loaded as Loaded
    from zerodrift.config.loader import load as load
    from zerodrift.config.schema import Bf16 as Bf16
    from zerodrift.config.schema import Config as Config
    from zerodrift.config.schema import DataTypes as DataTypes
    from zerodrift.config.schema import Experts as Experts
    from zerodrift.config.schema import Fp16 as Fp16
    from zerodrift.config.schema import MatrixProducts as MatrixProducts
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
    from zerodrift.inspect.audit.entry import audit as audit
    from zerodrift.inspect.audit.report import Audit as Audit
    from zerodrift.inspect.check.launch import Observation as Observation
    from zerodrift.inspect.check.launch import observe as observe
    from zerodrift.mesh import MeshShape as MeshShape
    from zerodrift.model.sources import describe as describe
    from zerodrift.model.spec import ModelSpec as ModelSpec
    from zerodrift.pipeline.cut import Parts as Parts
    from zerodrift.plan.builder import build as build
    from zerodrift.plan.bill import Cost as Cost
    from zerodrift.plan.bill import cost as cost
    from zerodrift.plan.table import Plan as Plan
    from zerodrift.policy.decisions import Policy as Policy
    from zerodrift.policy.resolver import mesh_for as mesh_for
    from zerodrift.policy.resolver import resolve as resolve
    from zerodrift.weights.exporter import Exported as Exported
    from zerodrift.weights.exporter import export as export
    from zerodrift.weights.load import LoadedWeights as LoadedWeights
    from zerodrift.weights.load import load_weights as load_weights

__getattr__, __dir__, __all__ = face(__name__)
