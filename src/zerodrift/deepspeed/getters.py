"""DeepSpeed's getters on an engine, as one table.

DeepSpeed's getters return the config. These read the plan, which is what runs. Getters of features that
zerodrift does not have return False.

Invariant: nothing is stored; every call reads the current value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zerodrift.deepspeed.config import MANAGED
from zerodrift.deepspeed.parameters.values import plain_wire
from zerodrift.engine import Engine
from zerodrift.policy import Mode

THEIRS = ("adagrad", "adam", "adamw", "lion", "muon")
"""Optimizers whose names DeepSpeed returns in lower case."""

FALSE = (
    "amp_enabled autotuning_enabled curriculum_enabled_legacy curriculum_learning_enabled "
    "data_efficiency_enabled data_sampling_enabled dump_state eigenvalue_enabled elasticity_enabled "
    "flops_profiler_enabled graph_harvesting is_deepcompile_active is_deepcompile_enabled "
    "load_universal_checkpoint memory_breakdown pld_enabled random_ltd_enabled sparse_gradients_enabled "
    "super_offload use_node_local_storage wall_clock_breakdown zero_nvme_offload_optimizer "
)
"""Getters of features that zerodrift does not have."""


def _data_types(self: Any) -> tuple[torch.dtype, torch.dtype]:
    mode = self.running.plan.policy.mode
    sums = [update.accumulate.dtype.torch for update in _updates(self)]
    return torch.float32 if mode.autocast else mode.dtype.torch, sums[0] if sums else torch.float32


def wire_dtype(self: Any) -> torch.dtype:
    """Return the dtype in which gradients are sent; for a narrow wire, that of their sum."""
    wires = [plain_wire(update.reduce) for update in _updates(self)]
    return wires[0] if wires else torch.float32


def _updates(self: Any) -> list[Any]:
    rows = [row.columns for row in self.running.plan.rows if not row.columns.pinned]
    return [columns.update for columns in rows if columns.update is not None]


def _optimizer_name(self: Any) -> str | None:
    """Return the class of the caller's optimizer, or the name in the config."""
    if self.client_optimizer is not None:
        return type(self.client_optimizer).__name__
    name = _key("optimizer", "type")(self)
    return name.lower() if isinstance(name, str) and name.lower() in THEIRS else name


def _key(block: str, key: str, default: Any = None) -> Callable[[Any], Any]:
    """Return the getter of a key of the config, which returns the default for null."""
    return lambda self: default if (found := (self.config.get(block) or {}).get(key)) is None else found


def _of_groups(self: Any, key: str) -> list[Any]:
    groups = self.optimizer.param_groups if isinstance(self.optimizer, torch.optim.Optimizer) else []
    if key == "momentum" and any("betas" in group for group in groups):
        key = "betas"
    return [group.get(key, 0.0) for group in groups]


def norm_of(engine: Engine) -> torch.Tensor | None:
    """Return the gradient norm of the last complete step, averaged and unscaled, before clipping. As in
    DeepSpeed the norm is a tensor, because scripts call `item`. Shape []."""
    norm = engine.grad_norm
    return None if norm is None else torch.tensor(norm, dtype=torch.float64, device=engine.mesh.device)


def _policy(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: read(self.running.plan.policy)


def _scale(read: Callable[[Any], Any], absent: Any = None) -> Callable[[Any], Any]:
    return _policy(lambda policy: absent if policy.loss_scale is None else read(policy.loss_scale))


def _stage(least: int) -> Callable[[Any], Any]:
    return _policy(lambda policy: policy.sharding.stage >= least)


_offload = _policy(lambda policy: policy.sharding.offload)


_ZERO = "zero_optimization"
QUANTIZED = ("zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zero_quantized_weights")
GETTERS: Mapping[str, Callable[[Any], Any]] = {
    **{key: _key(_ZERO, key, False) for key in QUANTIZED},
    "zero_hpz_partition_size": _key(_ZERO, "zero_hpz_partition_size", 1),
    # precision
    "bfloat16_enabled": _policy(lambda policy: policy.mode is Mode.BF16),
    "fp16_enabled": _policy(lambda policy: policy.mode is Mode.FP16),
    "torch_autocast_enabled": _policy(lambda policy: policy.mode.autocast),
    "torch_autocast_dtype": _policy(lambda policy: policy.mode.dtype.torch if policy.mode.autocast else None),
    "torch_autocast_lower_precision_safe_modules": _policy(lambda policy: list(policy.safe)),
    "get_data_types": _data_types,
    "loss_scale": _scale(lambda scale: 0 if scale.dynamic else scale.initial, 0),  # as in the config
    "dynamic_loss_scale": _scale(lambda scale: scale.dynamic, False),
    "initial_dynamic_scale": _scale(lambda scale: scale.initial, 1.0),
    "dynamic_loss_scale_args": _scale(
        lambda scale: {
            "init_scale": scale.initial,
            "scale_window": scale.window,
            "min_scale": scale.minimum,
            "delayed_shift": scale.hysteresis,
            "consecutive_hysteresis": scale.consecutive,
        }
    ),
    # sharding
    "zero_optimization": _stage(1),
    "zero_optimization_stage": _policy(lambda policy: policy.sharding.stage),
    "zero_optimization_partition_gradients": _stage(2),
    "zero_optimization_partition_weights": _stage(3),
    "zero_gather_16bit_weights_on_model_save": lambda self: True,  # a saved model is always whole
    "zero_cpu_offload": _offload,
    "zero_use_cpu_optimizer": _offload,
    "zero_offload_optimizer": _key(_ZERO, "offload_optimizer"),
    "zero_offload_param": _key(_ZERO, "offload_param"),
    "zero_allow_untested_optimizer": lambda self: True,  # any elementwise optimizer runs on shards
    "mics_shard_size": lambda self: (
        self.running.plan.mesh.shard if self.running.plan.mesh.replicate > 1 else -1
    ),
    # the step
    "gradient_clipping": _policy(lambda policy: policy.clip),
    "postscale_gradients": _policy(lambda policy: policy.averaging.before == 1.0),
    "gradient_predivide_factor": _policy(lambda policy: policy.averaging.before),
    "steps_per_print": _policy(lambda policy: policy.print_every or None),
    "managed_gradient_accumulation": lambda self: bool(self.config.get(MANAGED, True)),
    "dataloader_drop_last": lambda self: bool(self.config.get("dataloader_drop_last", False)),
    "was_step_applied": lambda self: self._last_step_applied,
    "get_global_grad_norm": lambda self: norm_of(self.running),
    "get_batch_info": lambda self: (
        self.train_batch_size(),
        self.train_micro_batch_size_per_gpu(),
        self.gradient_accumulation_steps(),
    ),
    # optimizer and schedule
    "optimizer_name": _optimizer_name,
    "optimizer_params": _key("optimizer", "params"),
    "scheduler_name": _key("scheduler", "type"),
    "scheduler_params": _key("scheduler", "params"),
    "get_lr": lambda self: _of_groups(self, "lr"),
    "get_type": lambda self: _of_groups(self, "type"),
    "get_mom": lambda self: _of_groups(self, "momentum"),
    # ranks
    "get_data_parallel_rank": lambda self: self.running.mesh.rank("data"),
    **dict.fromkeys(("get_model_parallel_rank", "get_tensor_parallel_rank", "autotp_size"), lambda self: 0),
    **dict.fromkeys(FALSE.split(), lambda self: False),
}
"""Method of the engine -> its answer."""
