"""The table of DeepSpeed's keys: what each one becomes here. `tree` acts on it, and the docs print it.

Every key that DeepSpeed 0.19.6 reads has one of three fates. *Used*: the key decides something, named by our
column or decision; its type is in `schema.py`. *Ignored*: the key tunes machinery that is not here, so the
same model is trained without it; the entry names what decides instead. *Refused*: dropping the key would
train, place or save something other than the config says. A refused key is accepted at its harmless values,
which ask for nothing.

A key may end in `.*`, for a block whose keys share one fate; an exact entry goes before it. Keys that share a
fate and a text stand in one row, separated by spaces.

Invariant: no DeepSpeed key is silent. `tests/unit/test_deepspeed_table.py` holds the table against a list
of every key in DeepSpeed's source, and against the schema in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Fate = Literal["used", "alias", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class Entry:
    """The fate of one key, or of all keys of a block."""

    key: str
    """Dotted path as DeepSpeed spells it, or `block.*`."""
    fate: Fate
    text: str
    """The decision of a used key, the target of an alias, the reason of an ignored or refused key."""
    instead: str = ""
    """Refused: the keys to write instead, a sentence of its own."""
    harmless: tuple[Any, ...] = ()
    """Refused: the values at which the key asks for nothing. Null and "auto" always are."""
    without_effect: tuple[Any, ...] = ()
    """Refused: the values at which the trained model does not depend on the key."""


@dataclass(frozen=True, slots=True)
class Section:
    """Keys that a reader looks up together."""

    title: str
    entries: tuple[Entry, ...]


Rows = list[Entry]


def _section(title: str, *rows: Rows) -> Section:
    return Section(title, tuple(entry for row in rows for entry in row))


def _block(name: str, *rows: Rows) -> Rows:
    return [replace(entry, key=f"{name}.{entry.key}") for row in rows for entry in row]


def _used(keys: str, text: str) -> Rows:
    return [Entry(key, "used", text) for key in keys.split()]


def _ignored(keys: str, because: str) -> Rows:
    return [Entry(key, "ignored", because) for key in keys.split()]


def _refused(
    keys: str,
    because: str,
    instead: str = "",
    harmless: tuple[Any, ...] = (False,),
    without_effect: tuple[Any, ...] = (),
) -> Rows:
    return [Entry(key, "refused", because, instead, harmless, without_effect) for key in keys.split()]


def _refused_block(name: str, because: str, instead: str = "") -> Rows:
    return _refused(f"{name}.enabled", because, instead) + _ignored(f"{name}.*", _OFF)


_ONE_REDUCTION = "every stage runs the same reduction, one message per segment of a unit"
_UNITS = "parameters are gathered and reduced in units: `sharding.units`"
_AHEAD = "`sharding.prefetch` says how far ahead units are gathered, in bytes"
_LIFETIME = "`sharding.keep_gathered` says how long a gathered unit lives"
_NO_NVME = "nothing is offloaded to NVMe"
_NO_PARAM_OFFLOAD = "parameters rest on their device; see `zero_optimization.offload_param.device`"
_OFF = "the block is off, or refused by its `enabled`"
_PRINTED = "the step's loss, norm, scale and skips are on the engine; `steps_per_print` prints them"
_CURVES = "the drop-in writes what DeepSpeed writes; elsewhere a step's numbers are on the engine"
_MODEL_CHECKPOINTS = (
    "activation checkpointing is the model's own: `torch.utils.checkpoint`, or in transformers "
    "`gradient_checkpointing_enable()`"
)
_DCP = "checkpoints are written by torch's Distributed Checkpoint, each rank its own shards"
_NO_TENSOR_PARALLEL = "tensor parallelism is off, or refused by `tensor_parallel.autotp_size`"

BATCH = _section(
    "Batch, clipping and averaging",
    _used("train_batch_size", "the batch: two of the three numbers give the third"),
    _used("train_micro_batch_size_per_gpu", "the batch: samples per forward on one rank"),
    _used("gradient_accumulation_steps", "the batch: micro-batches per optimizer step"),
    _refused(
        "managed_gradient_accumulation",
        "the engine counts the micro-batches of a step; the drop-in's obeys it",
        "Write the number of micro-batches as `gradient_accumulation_steps`.",
        (True,),
    ),
    _used("gradient_clipping", "the clip: the global norm of the true gradients, in every mode and stage"),
    _used("prescale_gradients", "the averaging: divided by all ranks before the reduction, at every stage"),
    _used("gradient_predivide_factor", "the averaging: divided by this before the reduction, at every stage"),
    _used("gradient_allreduce_op", "the averaging: mean or sum, at every stage"),
    _refused(
        "sparse_gradients",
        "gradients are summed in dense segments",
        "Embeddings with `sparse=False` need no such key.",
    ),
    _ignored("dataloader_drop_last", "the caller makes the loaders: pass `drop_last` to `DataLoader`"),
    _used("steps_per_print", "the interval of the printed line; 0 or infinity is never"),
)

PRECISION = _section(
    "Precision",
    _used("bf16.enabled", "`precision.mode`, by the rule of [auto.md](auto.md)"),
    [Entry("bfloat16", "alias", "bf16")],
    _used("bf16.bf16_master_weights_and_grads", "`master: same` and `accumulate: bf16`"),
    _used("bf16.bf16_optimizer_states", "`state: bf16-stochastic`"),
    _used("bf16.check_grad_overflow", "skip a step with a non-finite gradient, or raise; at every stage"),
    _ignored("bf16.immediate_grad_update", "gradients are always added in place"),
    _used("fp16.enabled", "`precision.mode`, by the rule of [auto.md](auto.md)"),
    _used("fp16.auto_cast", "the model's floating inputs are always cast to `compute`"),
    _used("fp16.loss_scale", "the loss scale, static; also for fp16 autocast"),
    _used("fp16.initial_scale_power", "the loss scale, dynamic: where it starts"),
    _used("fp16.loss_scale_window", "the loss scale, dynamic: when it doubles"),
    _used("fp16.hysteresis", "the loss scale, dynamic: when it halves"),
    _used("fp16.consecutive_hysteresis", "the loss scale, dynamic: when the hysteresis is refilled"),
    _used("fp16.min_loss_scale", "the loss scale, dynamic: where it stops"),
    _used("fp16.fp16_master_weights_and_grads", "`master: same` and `accumulate: fp16`"),
    _used("torch_autocast.enabled", "mode `autocast-bf16` or `autocast-fp16`"),
    _used("torch_autocast.dtype", "which of the two; bf16 by default"),
    _used(
        "torch_autocast.lower_precision_safe_modules",
        "`gather` and `reduce` of these classes' parameters; subclasses must be listed too",
    ),
    _used("gradient_accumulation_dtype", "`accumulate`, at every stage. DeepSpeed drops it at top level"),
    _used("data_types.grad_accum_dtype", "`accumulate`, at every stage"),
    _used("data_types.param_dtype", "a check: it must agree with the mode"),
    _used("data_types.buffer_dtype", "`precision.buffers`"),
    _used("communication_data_type", "the wire dtype of `reduce`, for every parameter that is not pinned"),
    _ignored(
        "seq_parallel_communication_data_type",
        "there is no sequence parallelism here; `communication_data_type` is for the data axis",
    ),
    _refused("fp32_allreduce", "DeepSpeed no longer reads it", "Write `communication_data_type: fp32`."),
    _refused_block("amp", "Apex is not used", 'Write `"torch_autocast": {"enabled": true}`.'),
)

ZERO = _section(
    "zero_optimization",
    _block(
        "zero_optimization",
        _used("stage", "the sharding of `storage`, `accumulate`, `master` and `state`"),
        _used("mics_shard_size", "the mesh: ranks that share one copy of the model"),
        _ignored(
            "mics_hierarchical_params_gather",
            "a gather stays inside its shard group, and the backend orders its hops",
        ),
        _used("fp32_pinned_parameters", "a `pin: fp32` rule per substring"),
        _used("load_from_fp32_weights", "always true: masters start from the model's own bits"),
        _ignored("contiguous_gradients", "gradients always lie in one flat accumulator"),
        _ignored("reduce_scatter", _ONE_REDUCTION),
        _ignored("reduce_bucket_size", _UNITS),
        _ignored("use_multi_rank_bucket_allreduce", _ONE_REDUCTION),
        _ignored("allgather_partitions", "updated shards always come back in one gather"),
        _ignored("allgather_bucket_size", _UNITS),
        _ignored("overlap_comm", "the engine overlaps wherever the backend can"),
        _ignored("round_robin_gradients", "ranks own equal contiguous slices of a segment"),
        _ignored("sub_group_size", "the optimizer updates segment by segment"),
        _refused("legacy_stage1", "there is one implementation of every stage", "Remove it."),
        _ignored("elastic_checkpoint", "every checkpoint loads at any world size and any stage"),
        _ignored(
            "ignore_unused_parameters",
            "an unused parameter never stops a step; the engine counts which gradients arrived",
        ),
        _ignored("stage3_prefetch_bucket_size prefetch_bucket_size", _AHEAD),
        _ignored(
            "stage3_param_persistence_threshold param_persistence_threshold",
            "small parameters travel in their unit's flat buffer, without messages of their own",
        ),
        _ignored(
            "stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters "
            "max_live_parameters stage3_max_reuse_distance max_reuse_distance",
            _LIFETIME,
        ),
        _ignored(
            "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
            "stage3_gather_fp16_weights_on_model_save",
            "a saved model is always whole, in its `export` dtypes",
        ),
        _ignored("stage3_module_granularity_threshold module_granularity_threshold", _UNITS),
        _ignored("leaf_module.*", "a unit is gathered whole: no module needs to be marked"),
        _ignored(
            "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params",
            "a unit is one all-gather",
        ),
        _ignored(
            "stage3_allgather_sequential allgather_sequential", "a unit is gathered in place, with no copy"
        ),
        _ignored("memory_efficient_linear", "`torch.nn.Linear` is left as it is"),
        _ignored("override_module_apply", "`Module.apply` is left as it is"),
        _ignored("pipeline_loading_checkpoint", "weights are read straight into their shards"),
        _ignored("log_trace_cache_warnings", "the order of gathers is planned, not traced"),
        _ignored("enable_sanity_checks", "the plan's invariants are always checked"),
        _ignored("save_muon_momentum_buffer_in_memory", _NO_NVME),
        _refused(
            "zero_quantized_weights",
            "weights are not quantized on the wire",
            "Set `precision.gather` for a narrower wire.",
        ),
        _refused(
            "zero_quantized_nontrainable_weights",
            "frozen weights are not quantized",
            "Frozen parameters rest in their `storage` dtype.",
        ),
        _refused(
            "zero_quantized_gradients",
            "gradients are not quantized on the wire",
            "Set `precision.reduce` for a narrower wire.",
        ),
        _refused("zeropp_loco_param", "gradients are not quantized on the wire", "Remove it.", ({},)),
        _refused(
            "zero_hpz_partition_size",
            "there is no second copy of the shards",
            "To keep gathers inside a node, set `sharding.replicate` to the number of nodes.",
            (0, 1),
        ),
        _refused(
            "zenflow",
            "every gradient is applied in the step that made it",
            "Remove it; `offload_optimizer` alone is supported.",
        ),
    ),
    _ignored("allgather_size", _UNITS),
    _ignored("disable_allgather", "DeepSpeed reads the key and does nothing with it"),
)

OFFLOAD = _section(
    "Offload",
    _block(
        "zero_optimization.offload_optimizer",
        _used("device", "where `master` and `state` rest: none or cpu"),
        _ignored("pin_memory", "transfer buffers are page-locked, and other memory stays on the host"),
        _refused("ratio", "master and state rest in host memory wholly or not at all", "Remove it.", (1.0,)),
        _ignored("nvme_path buffer_count fast_init pipeline_read pipeline_write", _NO_NVME),
        _ignored("super_offload", "the update on the host is zerodrift's own"),
        _ignored("cpuadam_cores_perc", "torch's own threads do the update"),
    ),
    _block(
        "zero_optimization.offload_param",
        _refused(
            "device",
            "parameters rest on their device, which changes no value: stage 3 shards them over all ranks",
            "Remove it; `offload_optimizer` moves master and state to the host.",
            ("none",),
            ("cpu",),
        ),
        _ignored("nvme_path buffer_count buffer_size max_in_cpu pin_memory", _NO_PARAM_OFFLOAD),
    ),
    _refused(
        "zero_optimization.cpu_offload",
        "DeepSpeed deprecated this spelling",
        'Write `"offload_optimizer": {"device": "cpu"}`.',
    ),
    _refused(
        "zero_optimization.cpu_offload_param",
        "parameters rest on their device",
        "Stage 3 shards them over all ranks; `offload_optimizer` moves master and state to the host.",
    ),
    _refused(
        "zero_optimization.cpu_offload_use_pin_memory",
        "DeepSpeed deprecated this spelling",
        'Write `"offload_optimizer": {"device": "cpu", "pin_memory": true}`.',
    ),
    _ignored("aio.*", _NO_NVME),
)

OPTIMIZER = _section(
    "Optimizer and schedule",
    _used("optimizer.type", "the optimizer that is built if none is passed"),
    _used("optimizer.params.*", "its arguments; a default is DeepSpeed's, or torch's under `torch_adam`"),
    _refused(
        "optimizer.params.max_grad_norm",
        "clipping belongs to the step, not to the optimizer",
        "Write `gradient_clipping`.",
        (),
    ),
    _refused(
        "optimizer.params.fp32_optimizer_states",
        "moments follow their column",
        "Set `precision.state`, or `bf16.bf16_optimizer_states`.",
        (True,),
    ),
    _ignored("optimizer.legacy_fusion", "there is one update per dtype"),
    _used("scheduler.type", "the schedule that is built if none is passed"),
    _used("scheduler.params.*", "its arguments"),
    _used(
        "zero_allow_untested_optimizer",
        "whether an unknown optimizer is declared elementwise, and so steps on shards",
    ),
    _ignored("zero_force_ds_cpu_optimizer", "the update runs where the master rests, for any optimizer"),
)

PARALLEL = _section(
    "Pipeline, tensor, expert and sequence parallelism",
    _used("pipeline.stages", "the number of pipeline stages"),
    _ignored("pipeline.partition", "the model's own split says where stages begin"),
    _ignored("pipeline.seed_layers", "layers are seeded by the caller"),
    _ignored("pipeline.activation_checkpoint_interval pipeline.use_reentrant", _MODEL_CHECKPOINTS),
    _ignored(
        "pipeline.pipe_partitioned pipeline.grad_partitioned",
        "there is no tensor parallelism to split activations over",
    ),
    _refused(
        "tensor_parallel.autotp_size tensor_parallel.tensor_parallel.tp_size tensor_parallel.tp.tp_size",
        "modules are not split over ranks",
        "Shard with `zero_optimization.stage: 3` instead.",
        (0, 1),
    ),
    _ignored("tensor_parallel.*", _NO_TENSOR_PARALLEL),
    _refused_block(
        "expert_parallel",
        "modules are not replaced by expert-parallel ones",
        "Stage 3 shards the experts over all ranks.",
    ),
    _ignored("use_data_before_expert_parallelism", "the order of the mesh's axes is fixed"),
    _refused("sequence_parallel_size", "a sequence is not split over ranks", "Remove it.", (0, 1)),
)

CHECKPOINT = _section(
    "Checkpoints",
    _ignored("checkpoint.tag_validation", "ranks always agree on the tag before they write"),
    _ignored("checkpoint.load_universal", "every checkpoint loads at any world size and any stage"),
    _refused(
        "checkpoint.use_node_local_storage",
        "a checkpoint is one folder that all ranks see",
        "Save to shared storage.",
    ),
    _ignored("checkpoint.parallel_write.* checkpoint.checkpoint_serialization checkpoint.writer.*", _DCP),
    _refused_block("nebula", "there is no checkpoint service", "Call `save_checkpoint` as often as needed."),
    _refused(
        "datastates_ckpt",
        "there is no checkpoint engine of another package",
        "`Checkpoints(..., asynchronous=True)` writes beside training: docs/checkpoints.md.",
    ),
)

CHANGES_TRAINING = _section(
    "What would change the training",
    _block(
        "compression_training",
        _refused("weight_quantization.shared_parameters.enabled", "weights stay as planned"),
        _refused("activation_quantization.shared_parameters.enabled", "activations stay in `compute`"),
        _refused(
            "sparse_pruning.shared_parameters.enabled row_pruning.shared_parameters.enabled "
            "head_pruning.shared_parameters.enabled channel_pruning.shared_parameters.enabled",
            "weights are not pruned",
        ),
        _refused("layer_reduction.enabled", "no layer is dropped"),
        _ignored("*", _OFF),
    ),
    _refused(
        "weight_quantization",
        "weights stay in their `storage` dtype",
        "Quantize the exported model.",
        (False, {}, {"enabled": False}),
    ),
    _refused_block("quantize_training", "weights are not quantized while they train"),
    _ignored("eigenvalue.*", "DeepSpeed does not read it at this place"),
    _refused_block("progressive_layer_drop", "every layer runs in every step", "Drop layers in the model."),
    _refused_block("curriculum_learning", "data is the caller's", "Order the samples in the loader."),
    _refused_block(
        "data_efficiency", "data is the caller's", "Sample in the loader, route tokens in the model."
    ),
    _refused(
        "sparse_attention", "attention is the model's own", "Choose the attention in the model.", (False, {})
    ),
    _refused_block(
        "elasticity",
        "the batch sizes are those in the config",
        "Write the batch sizes; a checkpoint loads at any world size.",
    ),
    _refused_block(
        "autotuning",
        "no config is searched for",
        "`zerodrift plan` prints memory and traffic of a config without running it.",
    ),
    _refused_block("hybrid_engine", "there is no inference engine here", "Generate with the model itself."),
    _refused(
        "compile.deepcompile",
        "the engine's hooks are not compiled into the graph",
        "Call `torch.compile` on the model's blocks.",
    ),
    _ignored("compile.*", "DeepCompile is off, or refused by `compile.deepcompile`"),
    _ignored("graph_harvesting", "no graphs are captured and replayed"),
)

OBSERVATION = _section(
    "What is measured and printed",
    _ignored("activation_checkpointing.*", _MODEL_CHECKPOINTS),
    _ignored("wall_clock_breakdown", "`torch.profiler` times a step"),
    _ignored("memory_breakdown", "`zerodrift plan` prints bytes at rest and at peak"),
    _ignored("dump_state", "`zerodrift plan` prints every decision with its reason"),
    _ignored("flops_profiler.*", "`torch.profiler` with `with_flops=True` counts them"),
    _ignored("comms_logger.*", "the bill of `zerodrift plan` counts every collective of a step"),
    _ignored("timers.*", "`torch.profiler` times a step"),
    _ignored("tensorboard.* wandb.* csv_monitor.*", _CURVES),
    _ignored("comet.*", _PRINTED),
    _ignored("log_level", "the key sets the level of DeepSpeed's own logger"),
    _ignored("vocabulary_size", "DeepSpeed only warns about alignment"),
)


SECTIONS = (BATCH, PRECISION, ZERO, OFFLOAD, OPTIMIZER, PARALLEL, CHECKPOINT, CHANGES_TRAINING, OBSERVATION)

ENTRIES: dict[str, Entry] = {entry.key: entry for section in SECTIONS for entry in section.entries}


def find(key: str, table: Mapping[str, Entry] = ENTRIES) -> Entry | None:
    """Return the entry that decides a key: its own, or that of the nearest block above it."""
    entry = table.get(key)
    while entry is None and "." in key:
        key = key.rpartition(".")[0]
        entry = table.get(f"{key}.*") or table.get(key)
    return entry


def is_block(key: str, table: Mapping[str, Entry] = ENTRIES) -> bool:
    """Return True if the table has keys under this one."""
    return any(known.startswith(f"{key}.") for known in table)


def names_in(block: str) -> set[str]:
    """Return the names that the table has directly under a block, `""` for the top level."""
    prefix = f"{block}." if block else ""
    below = (key.removeprefix(prefix) for key in ENTRIES if key.startswith(prefix))
    return {name.partition(".")[0] for name in below} - {"*"}
