"""Refusals and configs of the engine for verl, from verl's own config classes."""

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
    with pytest.raises(RankError, match="different bits in 1 of 2 tensors, `norm` first"):
        require_same(sent, digests_of(weights.items()))


MODEL = {"enable_activation_offload": False, "use_fused_kernels": False, "tiled_mlp": {}, "lora": {}}
MODEL |= {"lora_rank": 0, "lora_adapter_path": None, "model_type": "language_model"}
"""Keys of verl's config of a model that are obeyed."""


def test_what_it_cannot_do_is_said_at_once() -> None:
    """For each block of verl's config; what verl's defaults say is taken."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import EngineConfig, FSDPOptimizerConfig, MtpConfig, OptimizerConfig

    from zerodrift.errors import ConfigError
    from zerodrift.verl import ZeroDriftEngineConfig, require_supported

    def model(**changes: Any) -> SimpleNamespace:
        return SimpleNamespace(**{**MODEL, "mtp": MtpConfig(), **changes})

    engine = ZeroDriftEngineConfig()
    assert isinstance(engine, EngineConfig)
    require_supported(engine, model(), FSDPOptimizerConfig(), CheckpointConfig())
    asked = {"use_fused_kernels": True, "tiled_mlp": {"enabled": True}, "lora": {"rank": 8, "merge": True}}
    checkpoint = CheckpointConfig(save_contents=["weights"], load_contents=["extra"], async_save=True)
    config = ZeroDriftEngineConfig(param_offload=True, ulysses_sequence_parallel_size=2, dtype="int8")
    with pytest.raises(ConfigError) as raised:
        require_supported(config)
    own = ("engine.param_offload", "engine.ulysses_sequence_parallel_size", "engine.dtype")
    assert all(name in str(raised.value) for name in own)
    with pytest.raises(ConfigError) as raised:
        require_supported(engine, model(**asked, lora_adapter_path="adapter"), OptimizerConfig(), checkpoint)
    for name in (*("use_fused_kernels", "tiled_mlp", "lora.rank", "lora.merge", "lora_rank", "`optim`"),
                 *("save_contents", "load_contents", "async_save")):  # fmt: skip
        assert name in str(raised.value)
    with pytest.raises(ConfigError, match="Train all of a critic"):
        require_supported(engine, model(model_type="value_model", lora_rank=8))


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
    said = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "gradient_clipping": 1}
    said |= {"pipeline": {"stages": 2}}
    with pytest.raises(ConfigError) as raised:
        written(ZeroDriftEngineConfig(config=said), 0.5)
    assert all(name in str(raised.value) for name in said)


def test_hydra_knows_it_by_name() -> None:
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    from zerodrift.verl import ZeroDriftEngineConfig

    keys = "{zero_optimization: {stage: 3}}"
    actor = "actor_rollout_ref.actor.fsdp_config"
    with initialize_config_module("verl.trainer.config", version_base=None):
        own = ["engine=zerodrift", f"engine.config={keys}", "engine.pins=['*']"]
        sft = compose("sft_trainer_engine", own)
        own = ["model_engine=zerodrift", f"{actor}.config={keys}", f"{actor}.dtype=float32"]
        ppo = compose("ppo_trainer", own)
    engine = omega_conf_to_dataclass(sft.engine)
    assert isinstance(engine, ZeroDriftEngineConfig) and engine.pins == ["*"]
    assert engine.config == {"zero_optimization": {"stage": 3}}
    reference = ppo.actor_rollout_ref.ref
    assert reference.strategy == ppo.actor_rollout_ref.actor.strategy == ppo.critic.strategy == "zerodrift"
    assert reference.fsdp_config.config == engine.config and reference.fsdp_config.dtype == "float32"
    assert reference.fsdp_config.forward_only and not ppo.critic.fsdp.forward_only
    assert ppo.critic.fsdp["_target_"] == "zerodrift.verl.ZeroDriftEngineConfig"
