"""What DeepSpeed has and this package has not: names that can be imported, and say no when they are used.

Scripts import more than they use, and ask `isinstance(model, PipelineModule)` of models that are none. So an
absent name is an object: it can be imported and derived from, nothing is an instance of it, and a call raises
an error that names it and what to use instead. A method of the engine that is absent raises when it is looked
up. A module of which nothing is here is made from `absent.py`.

Invariant: nobody gets an AttributeError from deep inside for a name that DeepSpeed documents.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn, Union

from zerodrift.deepspeed.absent import ABSENT
from zerodrift.errors import CheckpointError, ConfigError, UnsupportedError, did_you_mean


class NotHereError(UnsupportedError, AttributeError):
    """A name of DeepSpeed's that is not here. `hasattr` sees it as missing."""


class MisuseError(UnsupportedError, AssertionError):
    """What DeepSpeed asserts, and scripts catch as that."""


class RefusedConfigError(ConfigError, AssertionError, ValueError):
    """A config that `initialize` does not take: DeepSpeed asserts part of what it asks of one, and its schema
    raises the rest as ValueErrors."""


class MissingCheckpointError(CheckpointError, FileNotFoundError, AssertionError, ValueError):
    """A checkpoint that is not there. DeepSpeed asserts a tag that is loaded; `zero_to_fp32` raises a
    FileNotFoundError for a tag, and a ValueError where `latest` is missing."""


HERE = "must be a name of the drop-in"


class _Base:
    """What a class is derived from that is derived from a `Placeholder`."""

    placeholder: Placeholder

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls.placeholder()


class Placeholder:
    """Stands where DeepSpeed has a function or class."""

    def __init__(self, name: str, instead: str) -> None:
        self._name = name
        self._instead = instead
        self.__module__, _, self.__name__ = name.rpartition(".")
        self.__qualname__ = self.__name__
        self._base = type(self.__name__, (_Base,), {"placeholder": self})

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(self._name, HERE, got="one of DeepSpeed's alone", do=self._instead)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Asked for when somebody derives a class from it: whoever makes one of those is told."""
        return (self._base,)

    def __instancecheck__(self, value: object) -> bool:
        return False

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, self._base)

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007 (which is what `|` would call)

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007

    def __repr__(self) -> str:
        return f"<`{self._name}` is not in zerodrift: {self._instead}>"


def lookup(module: str, *submodules: str) -> Callable[[str], Any]:
    """A module's `__getattr__`: its absent names, submodules that are imported when they are asked for, and
    the error for a name that nobody knows."""
    theirs = module.removeprefix("zerodrift.")
    short = theirs.removeprefix("deepspeed").removeprefix(".")
    instead, names = ABSENT.get(short, ("", ""))
    absent_names = {**dict.fromkeys(names.split(), instead), **NAMES.get(theirs, {})}
    not_here = {name: Placeholder(f"{theirs}.{name}", do) for name, do in absent_names.items()}
    below = (*submodules, *_below(short))

    def look_up(name: str) -> Any:
        if name in not_here:
            return not_here[name]
        if name in below:
            return importlib.import_module(f"{module}.{name}")
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        here = getattr(sys.modules[module], "__all__", ())
        raise unknown(module, name, [*here, *below, *not_here])

    return look_up


def _below(short: str) -> list[str]:
    """The last names of the absent modules that are right under a module of DeepSpeed's."""
    start = f"{short}." if short else ""
    rest = [name.removeprefix(start) for name in ABSENT if name.startswith(start)]
    return list(dict.fromkeys(name.partition(".")[0] for name in rest))


class AbsentModules(MetaPathFinder, Loader):
    """Finds and makes them, behind Python's own finders: they have no files."""

    @classmethod
    def begin(cls) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        short = name.removeprefix("zerodrift.deepspeed.")
        if short == name or short not in ABSENT:
            return None
        return ModuleSpec(name, self, is_package=bool(_below(short)))

    def exec_module(self, module: ModuleType) -> None:
        instead, names = ABSENT[module.__name__.removeprefix("zerodrift.deepspeed.")]
        module.__dict__["__doc__"] = f"Nothing of `{module.__name__.removeprefix('zerodrift.')}`. {instead}"
        module.__dict__["__all__"] = names.split()
        module.__dict__["__getattr__"] = lookup(module.__name__)


def absent(name: str, instead: str) -> NotHereError:
    """For an attribute that DeepSpeed has."""
    return NotHereError(name, HERE, got="one of DeepSpeed's alone", do=instead)


def unknown(owner: str, name: str, known: Iterable[str]) -> NotHereError:
    """For a name that neither DeepSpeed nor the drop-in is known to have."""
    todo = did_you_mean(name, list(known))
    return NotHereError(f"{owner}.{name}", HERE, do=todo)


NAMES: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        "init_inference": "Generate with the model itself inside `engine.gathered()`, or export it.",
        "default_inference_config": "There is no inference engine; generate with the model itself.",
        "InferenceEngine": "There is no inference engine; generate with the model itself.",
        "DeepSpeedInferenceConfig": "There is no inference engine; generate with the model itself.",
        "DeepSpeedHybridEngine": "There is no inference engine; generate with the model itself.",
        "tp_model_init": "Shard with `zero_optimization.stage: 3` instead of over a tensor-parallel axis.",
        "set_autotp_mode": "Shard with `zero_optimization.stage: 3` instead of over a tensor-parallel axis.",
        "PipelineModule": "Use a plain module with `zero_optimization.stage: 3`.",
        "PipelineEngine": "Use a plain module with `zero_optimization.stage: 3`.",
        "DualPipeVModule": "Use `zerodrift.initialize` with `pipeline: {schedule: dualpipev}`.",
        "DualPipeVEngine": "Use `zerodrift.initialize` with `pipeline: {schedule: dualpipev}`.",
        "DeepSpeedTransformerLayer": "Use `torch.nn.TransformerEncoderLayer` or the model's own layer.",
        "DeepSpeedTransformerConfig": "Use `torch.nn.TransformerEncoderLayer` or the model's own layer.",
        "replace_transformer_layer": "The model runs as it is; there is no kernel injection.",
        "revert_transformer_layer": "The model runs as it is; there is no kernel injection.",
        "add_tuning_arguments": "Write the schedule in the config's `scheduler` block.",
        "is_compile_supported": "Call `torch.compile` on the model's blocks.",
        "DeepSpeedConfig": "Use `zerodrift.load(file)`, which checks every key.",
        "DeepSpeedOptimizerCallable": "Annotate with `Callable[[Any], torch.optim.Optimizer]`.",
        "DeepSpeedSchedulerCallable": "Annotate with `Callable[[torch.optim.Optimizer], Any]`.",
        "domino": "There is no tensor parallelism to overlap.",
        "OnDevice": "Use `with torch.device('meta'):`, or `zero.Init`.",
    },
    "deepspeed.comm": {
        "inference_all_reduce": "Use `all_reduce`.",
        "all_reduce_coalesced": "Call `all_reduce` per tensor.",
        "all_gather_coalesced": "Call `all_gather_into_tensor` per tensor.",
        "P2POp": "Use `torch.distributed.P2POp`.",
        "batch_isend_irecv": "Use `torch.distributed.batch_isend_irecv`.",
        "enable_symm_mem_for_group": "Use `torch.distributed._symmetric_memory` itself.",
        "initialize_mesh_device": "Use `torch.distributed.device_mesh.init_device_mesh`.",
    },
    "deepspeed.zero": {
        "TiledLinear": "Use `torch.nn.Linear`: stage 3 shards its weight like any other.",
        "TiledLinearReturnBias": "Use `torch.nn.Linear`: stage 3 shards its weight like any other.",
        "MiCS_Init": "Use `zero.Init`, and `mics_shard_size` or `sharding.replicate` in the config.",
        "DeepSpeedTensorOverride": "Buffers and tensors stay what the model made them.",
    },
    "deepspeed.utils": {
        "zero_to_torch": "Use `zero_to_fp32`, and cast what it wrote.",
        "OnDevice": "Use `with torch.device('meta'):`, or `zero.Init`.",
        "get_full_hp_param": "Use `safe_get_full_fp32_param`.",
        "set_full_hp_param": "Use `safe_set_full_fp32_param`.",
        "get_full_hp_grad": "Use `safe_get_full_grad`.",
        "set_full_hp_grad": "Use `safe_set_full_grad`.",
        "link_hp_params": "Use `safe_get_full_fp32_param`.",
        "lazy_init_hp_params_optimizer_state": "Use `safe_get_full_optimizer_state`.",
        "fragment_address": "Use `safe_get_full_fp32_param` and its kin.",
        "get_hp_fragment_mapping": "Use `safe_get_full_fp32_param` and its kin.",
        "map_to_flat_opt_states": "Use `safe_get_full_optimizer_state`.",
        "get_numactl_cmd": "Bind ranks to cores with the launcher.",
        "get_caller_func": "Use `inspect.stack`.",
        "get_model_parallel_group": "There is no tensor parallelism: the model's ranks are one.",
        "get_tensor_model_parallel_group": "There is no tensor parallelism: the model's ranks are one.",
        "get_tensor_model_parallel_src_rank": "There is no tensor parallelism: the model's ranks are one.",
        "set_tensor_model_parallel_rank": "There is no tensor parallelism: the model's ranks are one.",
        "set_tensor_model_parallel_world_size": "There is no tensor parallelism: the model's ranks are one.",
    },
    "deepspeed.utils.tensor_fragment": dict.fromkeys(
        (
            "tensor_fragment",
            "fragment_address",
            "get_hp_fragment_mapping",
            "get_full_hp_param",
            "set_full_hp_param",
        ),
        "Use `safe_get_full_fp32_param` and its kin.",
    ),
    "deepspeed.utils.zero_to_fp32": dict.fromkeys(
        ("get_optim_files", "get_model_state_file", "get_checkpoint_files", "parse_model_states"),
        "Use `get_fp32_state_dict_from_zero_checkpoint`, which reads checkpoints of both.",
    ),
    "deepspeed.checkpoint": dict.fromkeys(
        ("DeepSpeedCheckpoint",),
        "Every checkpoint loads on any number of ranks, at any stage: there is nothing to convert.",
    ),
    "deepspeed.ops": {
        "DeepSpeedTransformerLayer": "The model runs as it is; there is no kernel injection.",
        "DeepSpeedTransformerConfig": "The model runs as it is; there is no kernel injection.",
    },
    "deepspeed.ops.adam": dict.fromkeys(
        ("ZenFlowCPUAdam", "ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3"),
        "Every gradient is applied in the step that made it: use `FusedAdam`.",
    ),
    "deepspeed.moe.utils": dict.fromkeys(
        (
            "split_params_into_different_moe_groups_for_optimizer",
            "split_params_into_shared_and_expert_params",
            "split_params_grads_into_shared_and_expert_params",
            "configure_moe_param_groups",
        ),
        "A mixture of experts in plain modules is sharded like any other part of the model.",
    ),
    "deepspeed.pipe": dict.fromkeys(
        ("PipelineModule", "LayerSpec", "TiedLayerSpec", "ProcessTopology"),
        "Use a plain module with `zero_optimization.stage: 3`.",
    ),
    "deepspeed.runtime.config": {"DeepSpeedConfig": "Use `zerodrift.load(file)`, which checks every key."},
    "deepspeed.runtime.lr_schedules": dict.fromkeys(
        (
            "add_tuning_arguments",
            "parse_arguments",
            "override_params",
            "get_config_from_args",
            "get_lr_from_config",
        ),
        "Write the schedule in the config's `scheduler` block.",
    ),
    "deepspeed.runtime.zero.config": dict.fromkeys(
        ("DeepSpeedZeroConfig", "get_zero_config", "read_zero_config_deprecated"),
        "Use `zerodrift.load(file)`, which checks every key.",
    ),
    "deepspeed.runtime.zero.offload_config": dict.fromkeys(
        ("DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig"),
        "Use `zerodrift.load(file)`, which checks every key.",
    ),
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        **dict.fromkeys(
            ("CheckpointFunction", "gather_partitioned_activations", "partition_activations_in_checkpoint"),
            "Use `torch.utils.checkpoint`.",
        ),
        **dict.fromkeys(
            (
                "CudaRNGStatesTracker",
                "get_cuda_rng_tracker",
                "model_parallel_cuda_manual_seed",
                "model_parallel_reconfigure_tp_seed",
            ),
            "Random numbers are torch's, and come back in a recomputation: call `torch.manual_seed`.",
        ),
        "set_num_layers": "Leave it out: nothing is kept in buffers whose size depends on it.",
    },
    "deepspeed.runtime.torch_autocast": {
        "is_autocast_initialized": "Ask `engine.torch_autocast_enabled()`.",
        "get_autocast_dtype": "Ask `engine.torch_autocast_dtype()`.",
        "init_autocast_params": "Write `torch_autocast` in the config.",
        "autocast_if_enabled": "Call the engine, which enters autocast as its config says.",
    },
    "deepspeed.runtime.utils": {
        "clip_grad_norm_": "Write `gradient_clipping` in the config: the norm is global and exact.",
        "get_global_norm": "Use `engine.get_global_grad_norm()`.",
        "get_grad_norm": "Use `engine.get_global_grad_norm()`.",
        "partition_uniform": "Units and segments are the plan's.",
        "partition_balanced": "Units and segments are the plan's.",
    },
}
"""By module: the name, and what to use instead."""

ENGINE = {
    "compile": "Call `torch.compile` on the model's blocks before `initialize`.",
    "is_compiled": "Call `torch.compile` on the model's blocks before `initialize`.",
    "offload_states": "Checkpoint and `destroy`, or use `zero_optimization.offload_optimizer`.",
    "reload_states": "Checkpoint and `destroy`, or use `zero_optimization.offload_optimizer`.",
    "allreduce_gradients": "`backward` and `step` reduce; `no_sync` puts it off.",
    "set_custom_curriculum_learning_schedule": "Order the samples in the loader.",
    "get_pld_theta": "Every layer runs in every step; drop layers in the model.",
    "clip_fp32_gradients": "Write `gradient_clipping` in the config.",
    "load_moe_state_dict": "Experts are saved and loaded with the rest.",
    "register_compile_pass": "Call `torch.compile` on the model's blocks before `initialize`.",
    "get_wall_clock_timers": "Use `torch.profiler`.",
    "set_batch_fn": "Prepare batches in the iterator that `train_batch` gets.",
    "reset_activation_shape": "There is no pipeline whose shapes could be kept.",
    "timers": "Use `torch.profiler`.",
    "flops_profiler": "Use `torch.profiler` with `with_flops=True`.",
}
"""Methods of the engine."""
