"""`deepspeed.ops`: DeepSpeed's optimizers, and the builders of its compiled operations.

FusedAdam and DeepSpeedCPUAdam make torch's fused AdamW or Adam, which the engine replaces by its one-pass
update on flat shards. FusedLion and DeepSpeedCPULion are the same optimizer; torch has no Lion. No operation
is compiled: a builder reports `is_compatible` if zerodrift does the operation's work without it.

Invariant: an argument that would have another effect here is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zerodrift.dtypes import DType
from zerodrift.errors import UnsupportedError
from zerodrift.optimizers import ADAM, ADAMW, LION, SGD, Algorithm


class FusedAdam:
    def __new__(  # type: ignore[misc]
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> torch.optim.Adam:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return _adam(params, adam_w_mode, bias_correction, numbers)


class DeepSpeedCPUAdam:
    """Moments have the dtype of the config, which `fp32_optimizer_states=False` must agree with."""

    optimizer_id = 0

    def __new__(  # type: ignore[misc]
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Adam:
        if amsgrad:
            do = "Pass `torch.optim.AdamW(amsgrad=True)`."
            raise UnsupportedError("amsgrad", "must be false", got="true", do=do)
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        made = _adam(model_params, adamw_mode, bias_correction, numbers)
        if not fp32_optimizer_states:
            _ASK_FOR_NARROW_STATES.add(made)
        return made


_ASK_FOR_NARROW_STATES: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def require_states(optimizer: Any, dtypes: Iterable[DType]) -> None:
    """Raise if a DeepSpeedCPUAdam was made with `fp32_optimizer_states=False` and the moments are fp32."""
    if optimizer in _ASK_FOR_NARROW_STATES and all(dtype is DType.FP32 for dtype in dtypes):
        must = "must be true where the config has fp32 moments"
        do = "Set `bf16.bf16_optimizer_states`, or `precision.state`."
        raise UnsupportedError("fp32_optimizer_states", must, got="false", do=do)


def _adam(params: Any, decoupled: bool, bias_correction: bool, numbers: dict[str, Any]) -> torch.optim.Adam:
    if not bias_correction:
        do = "Use an optimizer of your own."
        raise UnsupportedError("bias_correction", "must be true", got="false", do=do)
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, fused=True, **numbers)


class FusedLion(torch.optim.Optimizer):
    """DeepSpeed's FusedLion: decoupled decay, the sign of the interpolated momentum, then the momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                parameter.mul_(1 - rate * group["weight_decay"])
                direction = momentum.mul(beta1).add_(parameter.grad, alpha=1 - beta1).sign_()
                parameter.add_(direction, alpha=-rate)
                momentum.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)
        return loss


def DeepSpeedCPULion(  # noqa: N802 (DeepSpeed's name)
    model_params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0,
    fp32_optimizer_states: bool = True,
) -> FusedLion:
    """Make a FusedLion. The plan decides where masters and moments rest, and their dtypes."""
    return FusedLion(model_params, lr, betas, weight_decay)


OVER_PARAMETERS: Mapping[Algorithm, Callable[..., torch.optim.Optimizer]] = {
    ADAMW: FusedAdam,
    ADAM: functools.partial(FusedAdam, adam_w_mode=False),
    SGD: torch.optim.SGD,
    LION: FusedLion,
}
"""Algorithm of a config -> its optimizer, for parameter groups or a part of the model."""


# --- builders ---------------------------------------------------------------------------------------------


class OpBuilder:
    NAME = ""
    needless = False
    """True if zerodrift does the operation's work without it."""

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.needless

    def load(self, verbose: bool = True) -> None:
        if not self.needless:
            must, do = "must be an operation that zerodrift has", "Ask `is_compatible` first."
            raise UnsupportedError(self.NAME, must, got="one that only DeepSpeed has", do=do)


NEEDLESS = "cpu_adam=CPUAdam fused_adam=FusedAdam cpu_lion=CPULion fused_lion=FusedLion utils=Utils"
OTHERS = """
cpu_adagrad=CPUAdagrad fused_lamb=FusedLamb async_io=AsyncIO gds=GDS quantizer=Quantizer
fp_quantizer=FPQuantizer random_ltd=RandomLTD sparse_attn=SparseAttn spatial_inference=SpatialInference
transformer=Transformer stochastic_transformer=StochasticTransformer transformer_inference=Inference
inference_core_ops=InferenceCore ragged_device_ops=RaggedOps evoformer_attn=EvoformerAttn
"""
"""Operations, each with the name of its builder."""

ALL_OPS: dict[str, type[OpBuilder]] = {}
for _pair in f"{NEEDLESS} {OTHERS}".split():
    _op, _, _kind = _pair.partition("=")
    _members = {"NAME": _op, "needless": _pair in NEEDLESS.split(), "__module__": __name__}
    ALL_OPS[_op] = globals()[f"{_kind}Builder"] = type(f"{_kind}Builder", (OpBuilder,), _members)
COMPATIBLE = {name: kind.needless for name, kind in ALL_OPS.items()}
INSTALLED = dict.fromkeys(ALL_OPS, False)
_NUMBERS = ("version", "cuda_version", "hip_version", "nccl_version")
TORCH_INFO = {**dict.fromkeys(_NUMBERS, "0.0"), "bf16_support": False}
"""The torch that operations were compiled with. None is compiled."""
