"""What the engine for verl takes from verl's config classes, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")

pytestmark = pytest.mark.slow


def test_a_sampler_that_casts_is_found() -> None:
    from zerodrift.errors import RankError
    from zerodrift.verl import digests_of, require_same

    weights = {"norm": torch.rand(7), "up": torch.rand(300, 5)}
    sent = digests_of(weights.items())
    require_same(sent, digests_of((name, value.clone()) for name, value in weights.items()))
    weights["norm"] = weights["norm"].bfloat16()
    with pytest.raises(RankError, match="other bits in 1 of 2 tensors, `norm` first"):
        require_same(sent, digests_of(weights.items()))


def test_what_it_cannot_do_is_said_at_once() -> None:
    from verl.workers.config import EngineConfig

    from zerodrift.errors import ConfigError
    from zerodrift.verl import ZeroDriftEngineConfig, require_supported

    assert issubclass(ZeroDriftEngineConfig, EngineConfig)
    config = ZeroDriftEngineConfig(param_offload=True, ulysses_sequence_parallel_size=2, dtype="int8")
    with pytest.raises(ConfigError) as raised:
        require_supported(config)
    for name in ("engine.param_offload", "engine.ulysses_sequence_parallel_size", "engine.dtype"):
        assert name in str(raised.value)


def test_what_the_other_blocks_ask_for_is_refused_too() -> None:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, MtpConfig, OptimizerConfig

    from zerodrift.errors import ConfigError
    from zerodrift.verl import ZeroDriftEngineConfig, require_supported

    plain: dict[str, Any] = {
        "enable_activation_offload": False,
        "use_fused_kernels": False,
        "tiled_mlp": {},
        "mtp": MtpConfig(),
        "lora": {},
        "lora_rank": 0,
        "lora_adapter_path": None,
        "model_type": "language_model",
    }
    engine = ZeroDriftEngineConfig()
    require_supported(engine, SimpleNamespace(**plain), FSDPOptimizerConfig(), CheckpointConfig())
    asked = {"use_fused_kernels": True, "tiled_mlp": {"enabled": True}, "lora": {"rank": 8, "merge": True}}
    asked |= {"lora_adapter_path": "adapter"}
    checkpoint = CheckpointConfig(save_contents=["weights"], load_contents=["extra"], async_save=True)
    with pytest.raises(ConfigError) as raised:
        require_supported(engine, SimpleNamespace(**plain | asked), OptimizerConfig(), checkpoint)
    named = ("use_fused_kernels", "tiled_mlp", "lora.rank", "lora.merge", "lora_rank", "`optim`")
    for name in (*named, "save_contents", "load_contents", "async_save"):
        assert name in str(raised.value)
    critic = plain | {"model_type": "value_model", "lora_rank": 8}
    with pytest.raises(ConfigError, match="Train all of a critic"):
        require_supported(engine, SimpleNamespace(**critic))


def test_auto_in_a_config_is_what_verl_says() -> None:
    from zerodrift.errors import ConfigError
    from zerodrift.verl import ZeroDriftEngineConfig
    from zerodrift.verl.config import written

    batches = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    keys: dict[str, Any] = {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", **batches}
    for dtype, mode in (("float32", "fp32"), ("bfloat16", None)):
        found = written(ZeroDriftEngineConfig(config=keys, dtype=dtype, pins=["*.gate"]), 0.5)
        assert not found.keys() & batches.keys() and found["gradient_clipping"] == 0.5
        assert found["bf16"] == {"enabled": mode is None} and found["precision"].get("mode") == mode
        assert found["precision"]["rules"] == [{"match": "*.gate", "pin": "fp32"}]
    said = {
        "train_batch_size": 8,
        "pipeline": {"stages": 2},
        "optimizer": {"type": "AdamW"},
        "gradient_clipping": 1,
    }
    with pytest.raises(ConfigError) as raised:
        written(ZeroDriftEngineConfig(config=said), 0.5)
    assert all(name in str(raised.value) for name in said)


def test_hydra_knows_it_by_name() -> None:
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    from zerodrift.verl import ZeroDriftEngineConfig

    keys = "{zero_optimization: {stage: 3}}"
    with initialize_config_module("verl.trainer.config", version_base=None):
        sft = compose(
            "sft_trainer_engine", ["engine=zerodrift", f"engine.config={keys}", "engine.pins=['*']"]
        )
        actor = "actor_rollout_ref.actor"
        ppo = compose(
            "ppo_trainer",
            [
                "model_engine=zerodrift",
                f"{actor}.fsdp_config.config={keys}",
                f"{actor}.fsdp_config.dtype=float32",
            ],
        )
    engine = omega_conf_to_dataclass(sft.engine)
    assert isinstance(engine, ZeroDriftEngineConfig) and engine.pins == ["*"]
    assert engine.config == {"zero_optimization": {"stage": 3}}
    reference = ppo.actor_rollout_ref.ref
    assert reference.strategy == ppo.actor_rollout_ref.actor.strategy == ppo.critic.strategy == "zerodrift"
    assert reference.fsdp_config.config == engine.config and reference.fsdp_config.dtype == "float32"
    assert reference.fsdp_config.forward_only and not ppo.critic.fsdp.forward_only
    assert ppo.critic.fsdp["_target_"] == "zerodrift.verl.ZeroDriftEngineConfig"
