"""The optimizer that `initialize` returns: the engine's parameter groups, with DeepSpeed's additions.

Schedules write learning rates into the groups, and every step reads them there. `engine.step()` runs the
update. As in DeepSpeed, a state dict holds this rank's shard, for the same plan on the same ranks;
`engine.save_checkpoint` saves a run for any number of ranks.

Invariant: nothing is stored here; every value is read from the engine.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zerodrift.checkpoint import groups, put_groups, put_scale
from zerodrift.deepspeed.getters import norm_of
from zerodrift.deepspeed.modules import absent
from zerodrift.deepspeed.parameters.values import engine_gone
from zerodrift.deepspeed.tools.functions import LEAF_MODULE, z3_leaf_parameter
from zerodrift.dtypes import DType
from zerodrift.engine import Engine
from zerodrift.errors import CheckpointError, UnsupportedError
from zerodrift.versions import DEEPSPEED


class ParameterOffload:
    """`optimizer.parameter_offload` of stage 3. TRL and others remove its hooks for a generation.

    The lists of hooks are empty, and changing them has no effect. No hook has to be removed: a unit that
    `zero.GatheredParameters` has gathered stays gathered until the context ends.
    """

    def _nothing(*args: Any, **kwargs: Any) -> None:
        """Do nothing, for methods of DeepSpeed that need no work here."""

    empty_partition_cache = setup_zero_stage3_hooks = _nothing
    _register_deepspeed_module = _register_hooks_recursively = _nothing

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        # The plan decides the order of gathers, so nothing is traced.
        self.param_coordinator = SimpleNamespace(
            is_complete_trace=lambda: False,
            is_invalid_trace=lambda: True,
            is_record_trace=lambda: False,
            _invalidate_trace=self._nothing,
            reset_step=self._nothing,
        )

    def get_param_coordinator(self) -> SimpleNamespace:
        return self.param_coordinator


class LossScaler:
    """The current loss scale, by the names of DeepSpeed's `loss_scaler` and `loss_scale_config`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        scale = engine.plan.policy.loss_scale
        self.use_grad_scaling = scale is not None
        self.scale_factor = 2.0
        self.dynamic = self.dynamic_loss_scale = bool(scale and scale.dynamic)
        self.scale_window = scale and scale.window
        self.min_scale = self.min_loss_scale = scale and scale.minimum
        self.delayed_shift = scale and scale.hysteresis
        self.consecutive_hysteresis = bool(scale and scale.consecutive)

    @property
    def cur_scale(self) -> float:
        return self._engine.scaler.scale

    loss_scale = cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self._engine.scale(loss)


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """A torch optimizer with the engine's groups, so that torch's schedulers accept it.

    At stage 0 without 16-bit parameters DeepSpeed returns the caller's own optimizer. In that case this
    object reports the class of the caller's optimizer and compares equal to it.
    """

    def __init__(self, engine: Engine) -> None:
        # `Optimizer.__init__` is not called: it would make groups and state.
        self._engine = weakref.ref(engine)
        self.stage = engine.plan.policy.sharding.stage
        mode = engine.plan.policy.mode
        self._passes = self.stage == 0 and (mode.autocast or mode.dtype is DType.FP32)
        """True if DeepSpeed would return the caller's own optimizer. The model's weights are the masters
        then, and a state dict of the optimizer does not repeat them."""
        if self.stage == 3:
            self.parameter_offload = ParameterOffload(engine.module)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        passes = self.__dict__.get("_passes", False)
        return type(self.optimizer) if passes and self._engine() is not None else DeepSpeedOptimizer

    def __eq__(self, other: object) -> bool:
        return other is self or (self._passes and other is self.optimizer)

    def __hash__(self) -> int:
        return hash(self.optimizer) if self._passes else id(self)

    def _running(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise engine_gone("optimizer")
        return engine

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was passed, or that the config named."""
        optimizer = self._running().optimizer
        if optimizer is None:
            raise AssertionError("an engine without an optimizer has no DeepSpeedOptimizer")
        return optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state, or {} after the engine is gone. Lightning reads it in its teardown."""
        return {} if self._engine() is None else self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name in ("cur_scale", "loss_scale", "dynamic_loss_scale"):
            return getattr(self.loss_scaler, name)
        if not name.startswith("_") and hasattr(self.optimizer, name):
            return getattr(self.optimizer, name)
        do = "Use the engine, or `deepspeed.utils.safe_get_full_optimizer_state`."
        raise absent(f"optimizer.{name}", do)

    def __repr__(self) -> str:
        return f"DeepSpeedOptimizer({self.optimizer})"

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The parameters of each module that is marked as a leaf. Stage 3 only."""
        if self.stage != 3:
            raise AttributeError("leaf_parameters")
        found: dict[nn.Module, list[nn.Parameter]] = {}
        for parameter in self._running().module.parameters():
            if z3_leaf_parameter(parameter):
                found.setdefault(getattr(parameter, LEAF_MODULE), []).append(parameter)
        return found

    # --- the loss scale ---------------------------------------------------------------------------------

    @property
    def loss_scaler(self) -> LossScaler:
        return LossScaler(self._running())

    loss_scale_config = loss_scaler

    def needs_scaler(self) -> bool:
        return self._running().scaler.active

    @property
    def overflow(self) -> bool:
        """True if the last complete step was skipped for a gradient that is not finite."""
        norm = self._running().grad_norm
        return norm is not None and norm - norm != 0.0

    @property
    def _global_grad_norm(self) -> torch.Tensor | float:
        """The engine's norm, 0.0 before the first step. Scripts log it."""
        norm = norm_of(self._running())
        return 0.0 if norm is None else norm

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    # --- the engine's methods ---------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update as `engine.step()` does at the end of a step, but leave the schedule to the caller.
        Lightning's Fabric calls this method."""
        engine = self._running()
        if closure is not None or not engine.micro_batches or not engine.progress.is_boundary:
            must = "must be called without a closure after the last backward of a step"
            got = "a closure" if closure is not None else f"{engine.micro_batches} backwards"
            do = "Call `engine.step()` after every backward instead: it counts them."
            raise UnsupportedError("optimizer.step", must, got=got, do=do)
        schedule, engine.progress.schedule = engine.progress.schedule, None
        try:
            engine.step()
        finally:
            engine.progress.schedule = schedule

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        raise UnsupportedError("optimizer.backward", "must not be called", do="Call `engine.backward(loss)`.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._running().zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's master weights and moments in fp32, with groups, counters and loss scale."""
        engine = self._running()
        return {
            "of": _identity(engine),
            "zero_stage": self.stage,
            "ds_version": DEEPSPEED,
            "param_groups": groups(engine),
            "loss_scaler": engine.scaler.state_dict() if engine.scaler.active else None,
            "counters": {} if engine.updater is None else engine.updater.counters(),
            "pieces": [
                {"master": None if self._passes else piece.weights(), "moments": piece.moments()}
                for piece in engine.pieces()
                if piece.updated
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        engine, state, found = self._running(), state_dict, state_dict.get("of")
        if found != _identity(engine) or engine.updater is None:
            must = "must get the result of `optimizer.state_dict` from this rank and plan"
            got = "another state" if found is None else f"that of rank {found['rank']} of {found['ranks']}"
            do = "`engine.load_checkpoint` loads a checkpoint on any number of ranks."
            raise CheckpointError("optimizer.load_state_dict", must, got=got, do=do)
        engine.updater.set_counters(state["counters"])
        pieces = [piece for piece in engine.pieces() if piece.updated]
        for piece, held in zip(pieces, state["pieces"], strict=True):
            if held["master"] is not None:
                piece.set_weights(held["master"])
            for key, values in held["moments"].items():
                piece.set_moment(key, values)
        put_groups(engine, state["param_groups"])
        put_scale(engine, state["loss_scaler"])
        engine.sync_storage()


def _identity(engine: Engine) -> dict[str, Any]:
    return {"plan": engine.plan.digest, "rank": engine.mesh.rank(), "ranks": engine.mesh.size("world")}


class OptimizerOfStages(type):
    """Makes a class that a DeepSpeedOptimizer of some ZeRO stages is an instance of."""

    stages: tuple[int, ...]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, DeepSpeedOptimizer) and value.stage in cls.stages


DeepSpeedZeroOptimizer = OptimizerOfStages("DeepSpeedZeroOptimizer", (), {"stages": (1, 2)})
DeepSpeedZeroOptimizer_Stage3 = OptimizerOfStages("DeepSpeedZeroOptimizer_Stage3", (), {"stages": (3,)})
