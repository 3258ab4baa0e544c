"""The optimizer that `initialize` returns: the parameter groups of the real one, and what DeepSpeed adds.

Groups, their learning rates and other numbers are live: schedulers of torch and of DeepSpeed write them, and
every step reads them. The update itself is `engine.step()`'s.

Invariant: nothing is kept here; every answer is the engine's.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from zerodrift.deepspeed import optimizer_state
from zerodrift.deepspeed.parameter_offload import ParameterOffload
from zerodrift.deepspeed.parameters import engine_gone
from zerodrift.deepspeed.unsupported import absent
from zerodrift.engine.engine import Engine
from zerodrift.errors import UnsupportedError


class LossScaler:
    """The loss scale as it is now, by the names of DeepSpeed's `loss_scaler` and `loss_scale_config`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._spec = engine.plan.policy.loss_scale

    @property
    def cur_scale(self) -> float:
        return self._engine.scaler.scale

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        return self._spec is not None and self._spec.dynamic

    dynamic_loss_scale = dynamic

    @property
    def use_grad_scaling(self) -> bool:
        return self._spec is not None

    @property
    def scale_factor(self) -> float:
        return 2.0

    @property
    def scale_window(self) -> int | None:
        return None if self._spec is None else self._spec.window

    @property
    def min_scale(self) -> float | None:
        return None if self._spec is None else self._spec.minimum

    min_loss_scale = min_scale

    @property
    def delayed_shift(self) -> int | None:
        return None if self._spec is None else self._spec.hysteresis

    @property
    def consecutive_hysteresis(self) -> bool:
        return self._spec is not None and self._spec.consecutive

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on by hand."""
        return self._engine.scale(loss)


class StageOfOptimizer(type):
    """A class of DeepSpeed's for some stages: what it says of an optimizer is its stage."""

    stages: tuple[int, ...]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, DeepSpeedOptimizer) and value.stage in cls.stages


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """An optimizer to torch's schedulers, which accept nothing else; its groups are another's.

    At stage 0 without 16-bit parameters DeepSpeed returns the caller's own. There this is an instance of that
    one's class, and equal to it; it is not that one, whose `step` would do nothing.
    """

    def __init__(self, engine: Engine) -> None:
        # Not torch's own __init__, which would make groups and state.
        self._engine = weakref.ref(engine)
        self.stage = engine.plan.policy.sharding.stage
        """Of ZeRO."""
        self._passes = optimizer_state.is_plain(engine.plan)
        if self.stage == 3:
            self.parameter_offload = ParameterOffload(engine.module)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        passes = self.__dict__.get("_passes", False)
        return type(self.optimizer) if passes and self._engine() is not None else DeepSpeedOptimizer

    def __eq__(self, other: object) -> bool:
        return other is self or (self._passes and other is self.optimizer)

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> Hashable:
        return self.optimizer if self._passes else id(self)

    def _running(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise engine_gone("optimizer")
        return engine

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that was passed, or that the config named."""
        optimizer = self._running().optimizer
        if optimizer is None:
            raise AssertionError("an engine without an optimizer has no DeepSpeedOptimizer")
        return optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self.optimizer, name):
            return getattr(self.optimizer, name)
        raise absent(
            f"optimizer.{name}", "Use the engine, or `deepspeed.utils.safe_get_full_optimizer_state`."
        )

    def __repr__(self) -> str:
        return f"DeepSpeedOptimizer({self.optimizer})"

    # --- the loss scale ---------------------------------------------------------------------------------

    @property
    def cur_scale(self) -> float:
        """The multiplier of the loss; 1 without one."""
        return self._running().scaler.scale

    @property
    def loss_scale(self) -> float:
        return self._running().scaler.scale

    @property
    def dynamic_loss_scale(self) -> bool:
        spec = self._running().plan.policy.loss_scale
        return spec is not None and spec.dynamic

    @property
    def loss_scaler(self) -> LossScaler:
        return LossScaler(self._running())

    loss_scale_config = loss_scaler

    def needs_scaler(self) -> bool:
        """Whether a loss must go through `engine.scale` before a backward by hand."""
        return self._running().scaler.active

    @property
    def overflow(self) -> bool:
        """Whether the last complete step was skipped for a gradient that is not finite."""
        norm = self._running().grad_norm
        return norm is not None and norm - norm != 0.0

    # --- what is the engine's ---------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update, as `engine.step()` does at the end of a step, but for the schedule, which the caller steps.
        Lightning's Fabric calls this one."""
        engine = self._running()
        if closure is not None or not engine.micro_batches or not engine.progress.is_boundary:
            raise UnsupportedError(
                "optimizer.step",
                "must be called without a closure after the last backward of a step",
                got="a closure" if closure is not None else f"{engine.micro_batches} backwards",
                do="Call `engine.step()` after every backward instead: it counts them.",
            )
        schedule, engine.progress.schedule = engine.progress.schedule, None
        try:
            engine.step()
        finally:
            engine.progress.schedule = schedule

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        raise UnsupportedError("optimizer.backward", "must not be called", do="Call `engine.backward(loss)`.")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._running().zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """What this rank holds: see `optimizer_state.py`."""
        return optimizer_state.state_dict(self._running())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back. Every rank calls it."""
        optimizer_state.load_state_dict(self._running(), state_dict)
