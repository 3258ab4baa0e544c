"""A pytest plugin for accelerate's tests of its DeepSpeed plugin.

A CPU counts as an accelerator, and models of the hub are made from configs with random weights.

    zerodrift run -- python -m pytest -p deepspeed_suite -p accelerate_suite --outcomes FILE tests/deepspeed
"""

from __future__ import annotations

from typing import Any

import accelerate.test_utils
import transformers
from accelerate.test_utils import testing

NUMBERS = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": 200}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**NUMBERS),
    "sshleifer/tiny-gpt2": lambda: transformers.GPT2Config(**NUMBERS),
    "apple/mobilevit-xx-small": transformers.MobileViTConfig,
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": lambda: transformers.Qwen2MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=200,
    ),
}


def _admit(test: Any) -> Any:
    return test


for _module in (testing, accelerate.test_utils):
    _module.require_non_cpu = _module.require_fp16 = _admit  # type: ignore[attr-defined]


def _make(kind: Any) -> Any:
    """Return a `from_pretrained` for an auto class."""
    load = kind.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if name not in CONFIGS:
            return load(cls, name, *args, **kwargs)
        config = CONFIGS[name]()
        return config if cls is transformers.AutoConfig else cls.from_config(config)

    return classmethod(from_pretrained)


for _kind in (transformers.AutoConfig, transformers.AutoModel, transformers.AutoModelForCausalLM):
    _kind.from_pretrained = _make(_kind)
