"""The table of DeepSpeed's keys: what each one becomes here. `tree` acts on it, and the docs print it.

Every key that DeepSpeed 0.19.6 reads, and every key that came until 0.19.8, has one of three fates. *Used*:
the key decides something, named by our column or decision; its type is in `schema.py`. *Ignored*: the key
tunes machinery that is not here, so the same model is trained without it; the entry names what decides
instead. *Refused*: dropping the key would train, place or save something other than the config says. A
refused key is accepted at its harmless values, which ask for nothing.

A key may end in `.*`, for a block whose keys share one fate; an exact entry goes before it. Under a refused
`enabled` the other keys of its block are ignored. Keys that share a fate and a text stand in one row. `off`
lists the harmless values of a refused key, false unless they are given.

Invariant: no DeepSpeed key is silent. `tests/unit/test_deepspeed_table.py` holds the table against a list
of every key in DeepSpeed's source, and against the schema in both directions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

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


TABLE = """
# Batch, clipping and averaging
used train_batch_size: the batch: two of the three numbers give the third
used train_micro_batch_size_per_gpu: the batch: samples per forward on one rank
used gradient_accumulation_steps: the batch: micro-batches per optimizer step
refused managed_gradient_accumulation: the engine counts the micro-batches of a step; the drop-in's obeys it
    instead: Write the number of micro-batches as `gradient_accumulation_steps`.
    off: true
used gradient_clipping: the clip: the global norm of the true gradients, in every mode and stage
used prescale_gradients: the averaging: divided by all ranks before the reduction, at every stage
used gradient_predivide_factor: the averaging: divided by this before the reduction, at every stage
used gradient_allreduce_op: the averaging: mean or sum, at every stage
refused sparse_gradients: gradients are summed in dense segments
    instead: Embeddings with `sparse=False` need no such key.
ignored dataloader_drop_last: the caller makes the loaders: pass `drop_last` to `DataLoader`
used steps_per_print: the interval of the printed line; 0 or infinity is never

# Precision
used bf16.enabled: `precision.mode`, by the rule of [`auto`](config.md#what-auto-means)
alias bfloat16: bf16
used bf16.bf16_master_weights_and_grads: `master: same` and `accumulate: bf16`
used bf16.bf16_optimizer_states: `state: bf16-stochastic`
used bf16.check_grad_overflow: skip a step with a non-finite gradient, or raise; at every stage
ignored bf16.immediate_grad_update: gradients are always added in place
used fp16.enabled: `precision.mode`, by the rule of [`auto`](config.md#what-auto-means)
used fp16.auto_cast: the model's floating inputs are always cast to `compute`
used fp16.loss_scale: the loss scale, static; also for fp16 autocast
used fp16.initial_scale_power: the loss scale, dynamic: where it starts
used fp16.loss_scale_window: the loss scale, dynamic: when it doubles
used fp16.hysteresis: the loss scale, dynamic: when it halves
used fp16.consecutive_hysteresis: the loss scale, dynamic: when the hysteresis is refilled
used fp16.min_loss_scale: the loss scale, dynamic: where it stops
used fp16.fp16_master_weights_and_grads: `master: same` and `accumulate: fp16`
used torch_autocast.enabled: mode `autocast-bf16` or `autocast-fp16`
used torch_autocast.dtype: which of the two; bf16 by default
used torch_autocast.lower_precision_safe_modules: `gather` and `reduce` of parameters of exactly these classes
used gradient_accumulation_dtype: `accumulate`, at every stage. DeepSpeed drops it at top level
used data_types.grad_accum_dtype: `accumulate`, at every stage
used data_types.param_dtype: a check: it must agree with the mode
used data_types.buffer_dtype: `precision.buffers`
ignored data_types.keep_in_fp32_modules: buffers keep their dtype, unless `data_types.buffer_dtype` casts all
used communication_data_type: the wire dtype of `reduce`, for every parameter that is not pinned
ignored seq_parallel_communication_data_type: there is no sequence parallelism here
refused fp32_allreduce: DeepSpeed no longer reads it
    instead: Write `communication_data_type: fp32`.
refused amp.enabled: Apex is not used
    instead: Write `"torch_autocast": {"enabled": true}`.

# zero_optimization
[zero_optimization]
used stage: the sharding of `storage`, `accumulate`, `master` and `state`
used mics_shard_size: the mesh: ranks that share one copy of the model
ignored mics_hierarchical_params_gather: a gather stays inside its shard group, in the backend's hops
used fp32_pinned_parameters: a `pin: fp32` rule per substring
used load_from_fp32_weights: always true: masters start from the model's own bits
ignored contiguous_gradients: gradients always lie in one flat accumulator
ignored reduce_bucket_size allgather_bucket_size stage3_module_granularity_threshold
    module_granularity_threshold: parameters are gathered and reduced in units: `sharding.units`
ignored reduce_scatter use_multi_rank_bucket_allreduce: every stage runs the same reduction, one message per
    segment of a unit
ignored allgather_partitions: updated shards always come back in one gather
ignored overlap_comm: the engine overlaps wherever the backend can
ignored parameter_alignment: parameters always start on a multiple of 256 elements
ignored compute_grad_norm: the norm of a step is always computed
ignored round_robin_gradients: ranks own equal contiguous slices of a segment
ignored sub_group_size: the optimizer updates segment by segment
refused legacy_stage1: there is one implementation of every stage
ignored elastic_checkpoint: every checkpoint loads at any world size and any stage
ignored ignore_unused_parameters: an unused parameter never stops a step
ignored stage3_prefetch_bucket_size prefetch_bucket_size: `sharding.prefetch` says how far ahead units are
    gathered, in bytes
ignored stage3_param_persistence_threshold param_persistence_threshold: small parameters travel in their
    unit's flat buffer, without messages of their own
ignored stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters
    max_live_parameters stage3_max_reuse_distance max_reuse_distance: `sharding.keep_gathered` says how long
    a gathered unit lives
ignored stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save: a saved model is always whole, in its `export` dtypes
ignored leaf_module.*: a unit is gathered whole: no module needs to be marked
ignored stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params: a unit is one all-gather
ignored stage3_allgather_sequential allgather_sequential: a unit is gathered in place, with no copy
ignored memory_efficient_linear: `torch.nn.Linear` is left as it is
ignored override_module_apply: `Module.apply` is left as it is
ignored pipeline_loading_checkpoint: weights are read straight into their shards
ignored log_trace_cache_warnings: the order of gathers is planned, not traced
ignored enable_sanity_checks: the plan's invariants are always checked
ignored save_muon_momentum_buffer_in_memory: nothing is offloaded to NVMe
used zero_quantized_weights: `gather: int8`, encoded from fp32 values at every stage
used zero_quantized_nontrainable_weights: `frozen: int8`, for linear layers, at every stage
used zero_quantized_gradients: `reduce: {wire: int4}`, encoded once and summed in fp32
used zero_hpz_partition_size: `sharding.secondary`: ranks that share a second copy, for gathers in a backward
refused zeropp_loco_param: DeepSpeed decays and resets what rounding has lost; here all of it is added
    instead: Write `"precision": {"reduce": {"feedback": true}}`.
    off: {}
refused zenflow: every gradient is applied in the step that made it
    instead: Remove it; `offload_optimizer` alone is supported.
[top level]
ignored allgather_size: parameters are gathered and reduced in units: `sharding.units`
ignored disable_allgather: DeepSpeed reads the key and does nothing with it

# Offload
[zero_optimization.offload_optimizer]
used device: where `master` and `state` rest: none or cpu
ignored pin_memory: transfer buffers are page-locked, and other memory stays on the host
refused ratio: master and state rest in host memory wholly or not at all
    off: 1.0
ignored nvme_path buffer_count fast_init pipeline_read pipeline_write: nothing is offloaded to NVMe
ignored super_offload: the update on the host is zerodrift's own
ignored cpuadam_cores_perc: torch's own threads do the update
[zero_optimization.offload_param]
refused device: parameters rest on their device, which changes no value: stage 3 shards them over all ranks
    instead: Remove it; `offload_optimizer` moves master and state to the host.
    off: "none"
    without effect: "cpu"
ignored nvme_path buffer_count buffer_size max_in_cpu pin_memory: parameters rest on their device
[zero_optimization]
used cpu_offload: the older spelling of `"offload_optimizer": {"device": "cpu"}`
ignored cpu_offload_param: parameters rest on their device
ignored cpu_offload_use_pin_memory: transfer buffers are page-locked, and other memory stays on the host
[top level]
ignored aio.*: nothing is offloaded to NVMe

# Optimizer and schedule
used optimizer.type: the optimizer that is built if none is passed
used optimizer.params.*: its arguments; a default is DeepSpeed's, or torch's under `torch_adam`
refused optimizer.params.max_grad_norm: clipping belongs to the step, not to the optimizer
    instead: Write `gradient_clipping`.
    off:
refused optimizer.params.fp32_optimizer_states: moments follow their column
    instead: Set `precision.state`, or `bf16.bf16_optimizer_states`.
    off: true
ignored optimizer.legacy_fusion: there is one update per dtype
used scheduler.type: the schedule that is built if none is passed
used scheduler.params.*: its arguments
used zero_allow_untested_optimizer: an unknown optimizer is declared elementwise, and so steps on shards
ignored zero_force_ds_cpu_optimizer: the update runs where the master rests, for any optimizer

# Pipeline, tensor, expert and sequence parallelism
used pipeline.stages: the number of pipeline stages
ignored pipeline.partition: the model's own split says where stages begin
ignored pipeline.seed_layers: layers are seeded by the caller
ignored pipeline.activation_checkpoint_interval pipeline.use_reentrant: activation checkpointing is the
    model's own: `torch.utils.checkpoint`, or in transformers `gradient_checkpointing_enable()`
ignored pipeline.pipe_partitioned pipeline.grad_partitioned: there is no tensor parallelism
refused tensor_parallel.autotp_size tensor_parallel.tensor_parallel.tp_size tensor_parallel.tp.tp_size:
    modules are not split over ranks
    instead: Shard with `zero_optimization.stage: 3` instead.
    off: 0, 1
ignored tensor_parallel.*: tensor parallelism is off, or refused by `tensor_parallel.autotp_size`
refused expert_parallel.enabled: modules are not replaced by expert-parallel ones
    instead: Stage 3 shards the experts over all ranks.
ignored use_data_before_expert_parallelism: the order of the mesh's axes is fixed
refused sequence_parallel_size: a sequence is not split over ranks
    off: 0, 1

# Checkpoints
ignored checkpoint.tag_validation: ranks write under rank 0's tag; the drop-in fails or warns as it says
ignored checkpoint.load_universal: every checkpoint loads at any world size and any stage
refused checkpoint.use_node_local_storage: a checkpoint is one folder that all ranks see
    instead: Save to shared storage.
ignored checkpoint.parallel_write.* checkpoint.checkpoint_serialization checkpoint.writer.*: each rank writes
    its own shards with torch's Distributed Checkpoint
refused nebula.enabled: there is no checkpoint service
    instead: Call `save_checkpoint` as often as needed.
refused datastates_ckpt: there is no checkpoint engine of another package
    instead: `Checkpoints(..., asynchronous=True)` writes beside training: docs/checkpoints.md.

# What would change the training
[compression_training]
refused weight_quantization.shared_parameters.enabled: weights stay as planned
refused activation_quantization.shared_parameters.enabled: activations stay in `compute`
refused sparse_pruning.shared_parameters.enabled row_pruning.shared_parameters.enabled
    head_pruning.shared_parameters.enabled channel_pruning.shared_parameters.enabled: weights are not pruned
refused layer_reduction.enabled: no layer is dropped
ignored *: the block is off, or refused by its `enabled`
[top level]
refused weight_quantization: weights stay in their `storage` dtype
    instead: Quantize the exported model.
    off: false, {}, {"enabled": false}
refused quantize_training.enabled: weights are not quantized while they train
ignored eigenvalue.*: DeepSpeed does not read it at this place
refused progressive_layer_drop.enabled: every layer runs in every step
    instead: Drop layers in the model.
refused curriculum_learning.enabled: data is the caller's
    instead: Order the samples in the loader.
refused data_efficiency.enabled: data is the caller's
    instead: Sample in the loader, route tokens in the model.
refused sparse_attention: attention is the model's own
    instead: Choose the attention in the model.
    off: false, {}
refused elasticity.enabled: the batch sizes are those in the config
    instead: Write the batch sizes; a checkpoint loads at any world size.
refused autotuning.enabled: no config is searched for
    instead: `zerodrift plan` prints memory and traffic of a config without running it.
refused hybrid_engine.enabled: there is no inference engine here
    instead: Generate with the model itself.
refused compile.deepcompile: the engine's hooks are not compiled into the graph
    instead: Call `torch.compile` on the model's blocks.
ignored compile.*: DeepCompile is off, or refused by `compile.deepcompile`
ignored graph_harvesting: no graphs are captured and replayed
ignored disable_python_gc: when Python collects garbage is the script's: `gc.disable()`

# What is measured and printed
ignored activation_checkpointing.*: activation checkpointing is the model's own: `torch.utils.checkpoint`,
    or in transformers `gradient_checkpointing_enable()`
ignored wall_clock_breakdown: `torch.profiler` times a step
ignored memory_breakdown: `zerodrift plan` prints bytes at rest and at peak
ignored dump_state: `zerodrift plan` prints every decision with its reason
ignored flops_profiler.*: `torch.profiler` with `with_flops=True` counts them
ignored comms_logger.*: the bill of `zerodrift plan` counts every collective of a step
ignored timers.*: `torch.profiler` times a step
ignored tensorboard.* wandb.* csv_monitor.*: the drop-in obeys them; elsewhere the engine has the numbers
ignored comet.*: the step's loss, norm, scale and skips are on the engine; `steps_per_print` prints them
ignored log_level: the key sets the level of DeepSpeed's own logger
ignored vocabulary_size: DeepSpeed only warns about alignment
"""
"""One row per fate and text: fate, keys, text. A row in brackets is the block around the keys below it."""

OFF = "the block is off, or refused by its `enabled`"

_ROW = re.compile(
    r"^(used|alias|ignored|refused) ([^:]+): (.+)"
    r"(?:\n    instead: (.+))?(?:\n    off:(.*))?(?:\n    without effect:(.*))?",
    re.MULTILINE,
)


def _read_table() -> Iterator[tuple[str, tuple[Entry, ...]]]:
    unwrapped = re.sub(r"\n    (?!instead:|off:|without effect:)", " ", TABLE)
    for part in unwrapped.split("\n# ")[1:]:
        title, _, rest = part.partition("\n")
        outside, *blocks = re.split(r"^\[(.+)\]$", rest, flags=re.MULTILINE)
        entries: list[Entry] = []
        for block, rows in zip(["top level", *blocks[::2]], [outside, *blocks[1::2]], strict=True):
            prefix = "" if block == "top level" else f"{block}."
            for fate, keys, text, instead, off, without in (row.groups() for row in _ROW.finditer(rows)):
                harmless = json.loads(f"[{'false' if off is None and fate == 'refused' else off or ''}]")
                values = tuple(harmless), tuple(json.loads(f"[{without or ''}]"))
                kind = cast(Fate, fate)
                entries += (Entry(prefix + key, kind, text, instead or "", *values) for key in keys.split())
                if fate == "refused" and (switch := re.fullmatch(r"(\w+)\.enabled", prefix + keys)):
                    entries.append(Entry(f"{switch[1]}.*", "ignored", OFF))
        yield title, tuple(entries)


SECTIONS = dict(_read_table())
"""Title -> keys that a reader looks up together."""

ENTRIES: dict[str, Entry] = {entry.key: entry for entries in SECTIONS.values() for entry in entries}


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
