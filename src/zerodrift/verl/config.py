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
    """The config with the pins, and with what verl says; an error where the config says something else."""
    heading, tree, problems = tree_of(convert_to_regular_types(engine.config or {}), "config")
    for key in ("optimizer", "scheduler"):
        if tree.get(key) is not None:
            problems.add(key, "must be left to verl's `optim`", got="one in the config", do="Leave it out.")
    said: dict[str, tuple[Any, str]] = {"gradient_accumulation_steps": (1, "count of micro-batches")}
    if not engine.forward_only:
        said["gradient_clipping"] = clip, "optim.clip_grad"
    for key, (there, name) in said.items():
        if tree.get(key) not in (None, "auto", there):
            got = f"{tree[key]} in the config and {there} there"
            problems.add(key, f"must be verl's {name}", got=got, do="Leave it out.")
    problems.raise_as(ConfigError, heading)
    precision = tree.get("precision") or {}
    if "mode" not in precision and not any(
        (tree.get(key) or {}).get("enabled") for key in ("bf16", "fp16", "torch_autocast")
    ):
        precision = {"mode": MODES[engine.dtype], **precision}
    pins = [{"match": pattern, "pin": "fp32"} for pattern in engine.pins]
    precision = {**precision, "rules": [*(precision.get("rules") or ()), *pins]}
    return {**tree, **{key: there for key, (there, _) in said.items()}, "precision": precision}


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
