"""What an engine says of its settings, by the names of DeepSpeed's getters.

They mirror the config in DeepSpeed; here they read the plan, so that a script is told what really happens.
Switches of machinery that is not here say no. A getter that is not in this file tunes what is not here:
`engine.py` says so when somebody asks for it.

Invariant: no answer is kept: each is read from the plan or the config when it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerodrift.deepspeed.spellings import MANAGED
from zerodrift.engine.engine import Engine
from zerodrift.policy.nouns import Mode

THEIRS = ("adagrad", "adam", "adamw", "lion", "muon")
"""Optimizers that DeepSpeed has itself, and names in lower case."""


def _never(self: ConfigGetters) -> bool:
    """A switch of something that is not here."""
    return False


class ConfigGetters:
    """The getters of one engine."""

    def __init__(self, engine: Engine, written: dict[str, Any], client_optimizer: Any) -> None:
        self._client = client_optimizer
        self._engine = engine
        self._policy = engine.plan.policy
        self._written = written

    # --- precision --------------------------------------------------------------------------------------

    def bfloat16_enabled(self) -> bool:
        return self._policy.mode is Mode.BF16

    def fp16_enabled(self) -> bool:
        return self._policy.mode is Mode.FP16

    def torch_autocast_enabled(self) -> bool:
        return self._policy.mode.autocast

    def torch_autocast_dtype(self) -> torch.dtype | None:
        return self._policy.mode.dtype.torch if self._policy.mode.autocast else None

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        return list(self._policy.safe)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The model's dtype, and the one that gradients are accumulated in."""
        model = torch.float32 if self._policy.mode.autocast else self._policy.mode.dtype.torch
        updates = [row.columns.update for row in self._engine.plan.rows if not row.columns.pinned]
        sums = [update.accumulate.dtype.torch for update in updates if update is not None]
        return model, sums[0] if sums else torch.float32

    def loss_scale(self) -> float:
        """The static loss scale; 0 where it is dynamic or there is none, as in the config."""
        scale = self._policy.loss_scale
        return 0 if scale is None or scale.dynamic else scale.initial

    def dynamic_loss_scale(self) -> bool:
        scale = self._policy.loss_scale
        return scale is not None and scale.dynamic

    def initial_dynamic_scale(self) -> float:
        scale = self._policy.loss_scale
        return scale.initial if scale is not None else 1.0

    def dynamic_loss_scale_args(self) -> dict[str, float] | None:
        scale = self._policy.loss_scale
        if scale is None:
            return None
        return {
            "init_scale": scale.initial,
            "scale_window": scale.window,
            "min_scale": scale.minimum,
            "delayed_shift": scale.hysteresis,
            "consecutive_hysteresis": scale.consecutive,
        }

    # --- sharding ---------------------------------------------------------------------------------------

    def zero_optimization(self) -> bool:
        return self._policy.sharding.stage > 0

    def zero_optimization_stage(self) -> int:
        return self._policy.sharding.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self._policy.sharding.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self._policy.sharding.stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """A saved model is always whole."""
        return True

    def zero_cpu_offload(self) -> bool:
        return self._policy.sharding.offload

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_offload_optimizer(self) -> dict[str, Any] | None:
        return self._written.get("zero_optimization", {}).get("offload_optimizer")

    def zero_offload_param(self) -> dict[str, Any] | None:
        """As it is written; parameters rest on their device."""
        return self._written.get("zero_optimization", {}).get("offload_param")

    def mics_shard_size(self) -> int:
        shape = self._engine.plan.mesh
        return shape.shard if shape.replicate > 1 else -1

    # --- the step ---------------------------------------------------------------------------------------

    def gradient_clipping(self) -> float:
        return self._policy.clip

    def postscale_gradients(self) -> bool:
        return self._policy.averaging.before == 1.0

    def gradient_predivide_factor(self) -> float:
        return self._policy.averaging.before

    def steps_per_print(self) -> int | None:
        return self._policy.print_every or None

    def managed_gradient_accumulation(self) -> bool:
        """Whether micro-batches are counted; else every call of `step` updates."""
        return bool(self._written.get(MANAGED, True))

    def dataloader_drop_last(self) -> bool:
        return bool(self._written.get("dataloader_drop_last", False))

    # --- optimizer and schedule -------------------------------------------------------------------------

    def optimizer_name(self) -> str | None:
        """The class of the caller's, or what the config names."""
        if self._client is not None:
            return type(self._client).__name__
        named = self._block("optimizer").get("type")
        return named.lower() if isinstance(named, str) and named.lower() in THEIRS else named

    def optimizer_params(self) -> dict[str, Any] | None:
        """As they are written."""
        return self._block("optimizer").get("params")

    def scheduler_name(self) -> str | None:
        return self._block("scheduler").get("type")

    def scheduler_params(self) -> dict[str, Any] | None:
        return self._block("scheduler").get("params")

    def _block(self, key: str) -> Mapping[str, Any]:
        return self._written.get(key) or {}

    def zero_allow_untested_optimizer(self) -> bool:
        """Any elementwise optimizer runs on shards."""
        return True

    # --- ranks ------------------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        return self._engine.mesh.rank("data")

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank

    def autotp_size(self) -> int:
        return 0

    # --- what is not here -------------------------------------------------------------------------------

    amp_enabled = _never
    autotuning_enabled = _never
    curriculum_enabled_legacy = _never
    curriculum_learning_enabled = _never
    data_efficiency_enabled = _never
    data_sampling_enabled = _never
    dump_state = _never
    eigenvalue_enabled = _never
    elasticity_enabled = _never
    flops_profiler_enabled = _never
    graph_harvesting = _never
    is_deepcompile_active = _never
    is_deepcompile_enabled = _never
    load_universal_checkpoint = _never
    memory_breakdown = _never
    pld_enabled = _never
    random_ltd_enabled = _never
    sparse_gradients_enabled = _never
    super_offload = _never
    use_node_local_storage = _never
    wall_clock_breakdown = _never
    zero_nvme_offload_optimizer = _never
    zero_quantized_gradients = _never
    zero_quantized_nontrainable_weights = _never
    zero_quantized_weights = _never
