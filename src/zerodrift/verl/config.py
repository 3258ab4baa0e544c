"""The `engine` block of verl's config, its name in hydra's groups, and the settings that are refused.

The name is `engine=zerodrift` for SFT and `model_engine=zerodrift` for PPO. The blocks for PPO are verl's
blocks for fsdp with another engine and strategy.

Invariant: a setting in verl's blocks is obeyed, or refused before a weight is read. Registering only adds
names.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import verl
from verl.utils.py_functional import convert_to_regular_types
from verl.workers.config import EngineConfig

from zerodrift.config import tree_of
from zerodrift.errors import ConfigError, Problems

NAME = "zerodrift"
MODES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MODES |= {mode: mode for mode in MODES.values()}
CONTENTS = ("model", "optimizer", "extra", "hf_model")
"""The words of verl's `checkpoint` block."""
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
"""Keys of a config that are left to verl."""
SCHEDULE = ("optimizer", "optimizer_impl", "lr_scheduler_type", "min_lr_ratio", "num_cycles")
"""Fields of an `optim` block that the engine can be made from."""


@dataclass
class ZeroDriftEngineConfig(EngineConfig):
    """verl's settings of every engine, and a config of zerodrift."""

    strategy: str = NAME
    config: Any = None
    """A file, or keys: precision with its rules, stage, offload. `precision.mode` defaults to `dtype`."""
    pins: list[str] = field(default_factory=list)
    """Globs on names of parameters that are fp32 throughout."""
    quiet: bool = False
    """Print no plan."""
    ulysses_sequence_parallel_size: int = 1
    use_torch_compile: bool = False
    """Compile the entropy."""
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    pad_to_length: bool = False
    pad_to_length_bucket: int = 1024


def written(engine: ZeroDriftEngineConfig, clip: float) -> dict[str, Any]:
    """Return the config with the pins and verl's settings. Raise if the config contradicts those."""
    heading, tree, problems = tree_of(convert_to_regular_types(engine.config or {}), "config")
    owners = {"optimizer": "optim", "scheduler": "optim", **dict.fromkeys(BATCHES, "data")}
    for key, block in owners.items():
        if tree.get(key) not in (None, "auto"):
            must = f"must be left to verl's `{block}`"
            problems.add(key, must, got="one in the config", do="Leave it out.")
    stages = (tree.get("pipeline") or {}).get("stages") or 1
    if stages != 1:
        problems.add("pipeline.stages", "must be 1: verl drives micro-batches", got=str(stages))
    theirs: dict[str, tuple[Any, str]] = {"gradient_accumulation_steps": (1, "count of micro-batches")}
    if not engine.forward_only:
        theirs["gradient_clipping"] = clip, "optim.clip_grad"
    for key, (value, name) in theirs.items():
        if tree.get(key) not in (None, "auto", value):
            got = f"{tree[key]} in the config and {value} there"
            problems.add(key, f"must be verl's {name}", got=got, do="Leave it out.")
    problems.raise_as(ConfigError, heading)
    rest = {key: value for key, value in tree.items() if key not in BATCHES}
    return {**rest, **{key: value for key, (value, _) in theirs.items()}, **_precision(engine, tree)}


def _precision(engine: ZeroDriftEngineConfig, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the blocks that set the mode. The default is verl's `dtype`."""
    blocks: dict[str, Any] = {}
    for key in ("bf16", "fp16"):
        block = tree.get(key) or {}
        if block.get("enabled") == "auto":
            block = {**block, "enabled": MODES[engine.dtype] == key}
        blocks |= {key: block} if block else {}
    precision = tree.get("precision") or {}
    enabled = any(block.get("enabled") for block in (*blocks.values(), tree.get("torch_autocast") or {}))
    if precision.get("mode") in (None, "auto") and not enabled:
        precision = {**precision, "mode": MODES[engine.dtype]}
    pins = [{"match": pattern, "pin": "fp32"} for pattern in engine.pins]
    return {**blocks, "precision": {**precision, "rules": [*(precision.get("rules") or ()), *pins]}}


def require_supported(
    engine: ZeroDriftEngineConfig, model: Any = None, optimizer: Any = None, checkpoint: Any = None
) -> None:
    """Raise if verl's blocks ask for a feature that this engine does not have."""
    problems = Problems()
    offload = "Write `zero_optimization: {offload_optimizer: {device: cpu}}` in the config."
    settings = [
        ("engine.ulysses_sequence_parallel_size", engine.ulysses_sequence_parallel_size, 1, ""),
        ("engine.param_offload", engine.param_offload, False, "Weights stay; stage 3 shards them."),
        ("engine.optimizer_offload", engine.optimizer_offload, False, offload),
        ("engine.router_replay.mode", engine.router_replay.mode, "disabled", ""),
    ]
    if model is not None:
        rank = "Write `model.lora_rank` and `model.lora_alpha`."
        settings += [
            ("model.enable_activation_offload", model.enable_activation_offload, False, ""),
            ("model.use_fused_kernels", model.use_fused_kernels, False, "They round entropy."),
            ("model.tiled_mlp.enabled", bool(model.tiled_mlp.get("enabled")), False, ""),
            ("model.mtp.enable", model.mtp.enable, False, ""),
            ("model.lora.merge", bool(model.lora.get("merge")), False, "The sampler takes the adapter."),
            ("model.lora.rank", int(model.lora.get("rank") or 0), 0, rank),
        ]
        if model.model_type == "value_model":
            settings.append(("model.lora_rank", model.lora_rank, 0, "Train all of a critic."))
        if model.lora_adapter_path and not model.lora_rank:
            must = "must be above 0 with `model.lora_adapter_path`"
            problems.add("model.lora_rank", must, got="0", do=rank)
    if checkpoint is not None:
        settings.append(("checkpoint.async_save", checkpoint.async_save, False, ""))
        for key in ("save_contents", "load_contents"):
            unknown = [word for word in getattr(checkpoint, key) if word not in CONTENTS]
            if unknown:
                problems.add(f"checkpoint.{key}", f"must be of {', '.join(CONTENTS)}", got=repr(unknown))
        contents = set(checkpoint.load_contents)
        if contents & {"optimizer", "extra"} and "model" not in contents:
            must = "must have `model` with others"
            problems.add("checkpoint.load_contents", must, got=repr(sorted(contents)))
    for where, value, wanted, do in settings:
        if value != wanted:
            problems.add(where, f"must be {wanted!r} with this engine", got=repr(value), do=do)
    if engine.dtype not in MODES:
        problems.add("engine.dtype", f"must be one of {', '.join(MODES)}", got=repr(engine.dtype))
    trains = optimizer is not None and not engine.forward_only
    if trains and not all(hasattr(optimizer, key) for key in SCHEDULE):
        must = "must be verl's block for fsdp, from which this engine makes optimizer and schedule"
        do = "Write `optim=fsdp`, or `_target_: verl.workers.config.FSDPOptimizerConfig`."
        problems.add("optim", must, got=type(optimizer).__name__, do=do)
    problems.raise_as(ConfigError)


# --- hydra's groups ---------------------------------------------------------------------------------------


def register() -> None:
    """Add the engine to hydra's groups."""
    from hydra.core.config_store import ConfigStore

    def add(group: str, name: str, node: Any, package: str | None = None) -> None:
        ConfigStore.instance().store(group=group, name=name, node=node, package=package, provider=NAME)

    own: dict[str, Any] = {"_target_": f"zerodrift.verl.{ZeroDriftEngineConfig.__name__}"}
    for one in fields(ZeroDriftEngineConfig):
        if one.name not in ("_target_", "router_replay"):
            own[one.name] = one.default if one.default_factory is MISSING else one.default_factory()
    add("engine", NAME, own)
    add("model_engine", NAME, {"model_engine": NAME}, "_global_")
    for role in ("actor", "ref", "critic"):
        add(role, f"{NAME}_{role}", _role_block(role))


def _role_block(role: str) -> Any:
    """Return verl's block for fsdp with this engine in it."""
    from omegaconf import OmegaConf

    file = Path(verl.__file__).parent / "trainer" / "config" / role / f"dp_{role}.yaml"
    block: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    block["defaults"] = [
        {key.replace("../", "/"): NAME for key in default} if "../engine@" in str(default) else default
        for default in block["defaults"]
    ]
    if role != "ref":
        return block | {"strategy": NAME}
    # A reference follows the actor, so that both compute in the same precision.
    actor = "actor_rollout_ref.actor.fsdp_config"
    block["fsdp_config"] |= {key: f"${{oc.select:{actor}.{key},null}}" for key in ("config", "pins", "dtype")}
    return block
