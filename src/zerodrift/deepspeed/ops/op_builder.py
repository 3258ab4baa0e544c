"""`deepspeed.ops.op_builder`: DeepSpeed's compiled operations, by name.

Nothing of them is built or loaded. Those whose work is done here without them are compatible: scripts that
build an optimizer's operation first, or ask for it, find that there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerodrift.deepspeed import unsupported
from zerodrift.errors import UnsupportedError

__all__ = [
    "ALL_OPS",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "FusedLionBuilder",
    "OpBuilder",
    "UtilsBuilder",
]

__getattr__ = unsupported.lookup(__name__)


class OpBuilder:
    """One of them."""

    NAME = ""
    needless = False
    """Whether its work is done without it."""

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.needless

    def load(self, verbose: bool = True) -> None:
        if not self.needless:
            raise UnsupportedError(
                self.NAME,
                "must be an operation whose work is done here",
                got="one of DeepSpeed's alone",
                do="Ask `is_compatible` first.",
            )


class CPUAdamBuilder(OpBuilder):
    NAME = "cpu_adam"
    needless = True


class FusedAdamBuilder(OpBuilder):
    NAME = "fused_adam"
    needless = True


class CPULionBuilder(OpBuilder):
    NAME = "cpu_lion"
    needless = True


class FusedLionBuilder(OpBuilder):
    NAME = "fused_lion"
    needless = True


class UtilsBuilder(OpBuilder):
    NAME = "utils"
    needless = True


class CPUAdagradBuilder(OpBuilder):
    NAME = "cpu_adagrad"


class FusedLambBuilder(OpBuilder):
    NAME = "fused_lamb"


class AsyncIOBuilder(OpBuilder):
    NAME = "async_io"


class GDSBuilder(OpBuilder):
    NAME = "gds"


class QuantizerBuilder(OpBuilder):
    NAME = "quantizer"


class FPQuantizerBuilder(OpBuilder):
    NAME = "fp_quantizer"


class RandomLTDBuilder(OpBuilder):
    NAME = "random_ltd"


class SparseAttnBuilder(OpBuilder):
    NAME = "sparse_attn"


class SpatialInferenceBuilder(OpBuilder):
    NAME = "spatial_inference"


class TransformerBuilder(OpBuilder):
    NAME = "transformer"


class StochasticTransformerBuilder(OpBuilder):
    NAME = "stochastic_transformer"


class InferenceBuilder(OpBuilder):
    NAME = "transformer_inference"


class InferenceCoreBuilder(OpBuilder):
    NAME = "inference_core_ops"


class RaggedOpsBuilder(OpBuilder):
    NAME = "ragged_device_ops"


class EvoformerAttnBuilder(OpBuilder):
    NAME = "evoformer_attn"


ALL_OPS: Mapping[str, type[OpBuilder]] = {kind.NAME: kind for kind in OpBuilder.__subclasses__()}
"""By name."""
