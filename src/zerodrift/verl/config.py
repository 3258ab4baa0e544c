"""What a user writes in verl's `engine` block, and what this engine does not do.

Invariant: what verl's blocks say is obeyed, or refused before a weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.utils.py_functional import convert_to_regular_types
from verl.workers.config import EngineConfig

from zerodrift.config.tree import tree_of
from zerodrift.errors import ConfigError, Problems

NAME = "zerodrift"
MODES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
}
CONTENTS = ("model", "optimizer", "extra", "hf_model")
"""What verl's `checkpoint` block may name."""
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
"""What a config says of samples in a step, and verl decides."""
SCHEDULE = ("optimizer", "optimizer_impl", "lr_scheduler_type", "min_lr_ratio", "num_cycles")
"""What an `optim` block has that this engine can build."""


@dataclass
class ZeroDriftEngineConfig(EngineConfig):
    """What verl's trainers say of every engine, and a config of zerodrift."""

    strategy: str = NAME
    config: Any = None
    """A file, or keys: precision with its rules, stage, offload. `precision.mode` is `dtype` without one."""
    pins: list[str] = field(default_factory=list)
    """Globs on names of parameters that are fp32 throughout."""
    quiet: bool = False
    """Print no plan."""
    ulysses_sequence_parallel_size: int = 1
    use_torch_compile: bool = False
    """Of the entropy alone."""
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    pad_to_length: bool = False
    pad_to_length_bucket: int = 1024


def written(engine: ZeroDriftEngineConfig, clip: float) -> dict[str, Any]:
    """The config with the pins, and with what verl says, which is what "auto" stands for; an error where the
    config says something else."""
    heading, tree, problems = tree_of(convert_to_regular_types(engine.config or {}), "config")
    for key, whose in (
        ("optimizer", "optim"),
        ("scheduler", "optim"),
        *dict.fromkeys(BATCHES, "data").items(),
    ):
        if tree.get(key) not in (None, "auto"):
            problems.add(
                key, f"must be left to verl's `{whose}`", got="one in the config", do="Leave it out."
            )
    if ((tree.get("pipeline") or {}).get("stages") or 1) != 1:
        problems.add(
            "pipeline.stages", "must be 1: verl drives micro-batches", got=str(tree["pipeline"]["stages"])
        )
    said: dict[str, tuple[Any, str]] = {"gradient_accumulation_steps": (1, "count of micro-batches")}
    if not engine.forward_only:
        said["gradient_clipping"] = clip, "optim.clip_grad"
    for key, (there, name) in said.items():
        if tree.get(key) not in (None, "auto", there):
            got = f"{tree[key]} in the config and {there} there"
            problems.add(key, f"must be verl's {name}", got=got, do="Leave it out.")
    problems.raise_as(ConfigError, heading)
    own = {key: there for key, (there, _) in said.items()}
    rest = {key: value for key, value in tree.items() if key not in BATCHES}
    return {**rest, **own, **_precision(engine, tree)}


def _precision(engine: ZeroDriftEngineConfig, tree: dict[str, Any]) -> dict[str, Any]:
    """The blocks that say a mode: that of verl's `dtype` where the config leaves it open."""
    blocks: dict[str, Any] = {}
    for key in ("bf16", "fp16"):
        block = tree.get(key) or {}
        if block.get("enabled") == "auto":
            block = {**block, "enabled": MODES[engine.dtype] == key}
        blocks |= {key: block} if block else {}
    precision = tree.get("precision") or {}
    asked = [*blocks.values(), tree.get("torch_autocast") or {}]
    if precision.get("mode") in (None, "auto") and not any(block.get("enabled") for block in asked):
        precision = {**precision, "mode": MODES[engine.dtype]}
    pins = [{"match": pattern, "pin": "fp32"} for pattern in engine.pins]
    return {**blocks, "precision": {**precision, "rules": [*(precision.get("rules") or ()), *pins]}}


def require_supported(
    engine: ZeroDriftEngineConfig, model: Any = None, optimizer: Any = None, checkpoint: Any = None
) -> None:
    """Raise where verl's blocks ask for what this engine does not do."""
    problems = Problems()
    offload = "Write `zero_optimization: {offload_optimizer: {device: cpu}}` in the config."
    asked = [
        ("engine.ulysses_sequence_parallel_size", engine.ulysses_sequence_parallel_size, 1, ""),
        ("engine.param_offload", engine.param_offload, False, "Weights stay; stage 3 shards them."),
        ("engine.optimizer_offload", engine.optimizer_offload, False, offload),
        ("engine.router_replay.mode", engine.router_replay.mode, "disabled", ""),
    ]
    if model is not None:
        rank = "Write `model.lora_rank` and `model.lora_alpha`."
        asked += [
            ("model.enable_activation_offload", model.enable_activation_offload, False, ""),
            ("model.use_fused_kernels", model.use_fused_kernels, False, "They round entropy."),
            ("model.tiled_mlp.enabled", bool(model.tiled_mlp.get("enabled")), False, ""),
            ("model.mtp.enable", model.mtp.enable, False, ""),
            ("model.lora.merge", bool(model.lora.get("merge")), False, "The sampler takes the adapter."),
            ("model.lora.rank", int(model.lora.get("rank") or 0), 0, rank),
        ]
        if model.model_type == "value_model":
            asked.append(("model.lora_rank", model.lora_rank, 0, "Train all of a critic."))
        if model.lora_adapter_path and not model.lora_rank:
            problems.add(
                "model.lora_rank", "must be above 0 with `model.lora_adapter_path`", got="0", do=rank
            )
    if checkpoint is not None:
        asked.append(("checkpoint.async_save", checkpoint.async_save, False, ""))
        _check_contents(checkpoint, problems)
    for where, here, must, do in asked:
        if here != must:
            problems.add(where, f"must be {must!r} with this engine", got=repr(here), do=do)
    if engine.dtype not in MODES:
        problems.add("engine.dtype", f"must be one of {', '.join(MODES)}", got=repr(engine.dtype))
    if (
        not engine.forward_only
        and optimizer is not None
        and not all(hasattr(optimizer, key) for key in SCHEDULE)
    ):
        problems.add(
            "optim",
            "must be verl's for fsdp, whose optimizer and schedule this engine takes",
            got=type(optimizer).__name__,
            do="Write `optim=fsdp`, or `_target_: verl.workers.config.FSDPOptimizerConfig`.",
        )
    problems.raise_as(ConfigError)


def _check_contents(checkpoint: Any, problems: Problems) -> None:
    for key in ("save_contents", "load_contents"):
        unknown = [word for word in getattr(checkpoint, key) if word not in CONTENTS]
        if unknown:
            problems.add(f"checkpoint.{key}", f"must be of {', '.join(CONTENTS)}", got=repr(unknown))
    load = set(checkpoint.load_contents)
    if load & {"optimizer", "extra"} and "model" not in load:
        problems.add("checkpoint.load_contents", "must have `model` beside others", got=repr(sorted(load)))
