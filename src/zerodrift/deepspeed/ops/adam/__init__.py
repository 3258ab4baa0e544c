"""`deepspeed.ops.adam`: FusedAdam and DeepSpeedCPUAdam, which are one and the same here.

Both make torch's fused AdamW, or Adam where `adam_w_mode` is false, with DeepSpeed's arguments and defaults.
Handed to `initialize`, it becomes the one-pass update on flat pieces, wherever the masters rest.

Invariant: an argument that would mean something else here is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from zerodrift.deepspeed import unsupported
from zerodrift.errors import UnsupportedError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


__getattr__ = unsupported.lookup(__name__, "cpu_adam", "fused_adam")


class FusedAdam:
    """Makes a `torch.optim.AdamW` or `Adam`."""

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
        """`set_grad_none` is about `zero_grad`, and gradients are the engine's."""
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        _require_correction(bias_correction)
        return _adam(params, adam_w_mode, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPUAdam:
    """Makes a `torch.optim.AdamW` or `Adam`."""

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
        _require_correction(bias_correction)
        if amsgrad:
            raise UnsupportedError(
                "amsgrad", "must be false", got="true", do="Pass `torch.optim.AdamW(amsgrad=True)`."
            )
        if not fp32_optimizer_states:
            raise UnsupportedError(
                "fp32_optimizer_states",
                "must be true",
                got="false",
                do="Moments follow their column: set `precision.state` in the config.",
            )
        return _adam(model_params, adamw_mode, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _require_correction(bias_correction: bool) -> None:
    if not bias_correction:
        raise UnsupportedError(
            "bias_correction", "must be true", got="false", do="Use an optimizer of your own."
        )


def _adam(params: Any, decoupled: bool, **numbers: Any) -> torch.optim.Adam:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, fused=True, **numbers)
