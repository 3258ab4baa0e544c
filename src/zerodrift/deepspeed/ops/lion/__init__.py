"""`deepspeed.ops.lion`: Lion with DeepSpeed's arguments, as a torch optimizer, which torch does not have.

The arithmetic is that of DeepSpeed's FusedLion: decoupled decay, the sign of the interpolated momentum, then
the momentum. FusedLion and DeepSpeedCPULion are one class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerodrift.deepspeed import unsupported

__all__ = ["DeepSpeedCPULion", "FusedLion"]

__getattr__ = unsupported.lookup(__name__, "cpu_lion", "fused_lion")


class FusedLion(torch.optim.Optimizer):
    """A torch optimizer, because it is one: groups, state and `step`."""

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
    """The same: masters and moments rest where the plan says, in the dtype of `precision.state`."""
    return FusedLion(model_params, lr, betas, weight_decay)
