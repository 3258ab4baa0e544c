"""Tiny configurations of real `transformers` architectures: the library's own classes, random weights.

Importing this needs `transformers`; tests skip without it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from zerodrift.versions import numbers

VOCABULARY, LENGTH = 97, 10

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def since(version: str) -> pytest.MarkDecorator:
    """Skip a test of the code of models on `transformers` before this version."""
    older = numbers(transformers.__version__, version) < numbers(version)
    return pytest.mark.skipif(older, reason=f"knows the code of transformers {version}")


@dataclass(frozen=True)
class Architecture:
    """One architecture and its router parameters."""

    build: Callable[[], nn.Module]
    routers: str
    """Glob on parameter names; empty for a dense model."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _gpt_oss() -> nn.Module:
    layers = ["sliding_attention", "full_attention"]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
    sizes = {**SIZES, **more, "head_dim": 8, "layer_types": layers, "rope_parameters": rope}
    return GptOssForCausalLM(GptOssConfig(**sizes))


def _qwen3_moe() -> nn.Module:
    more = {"head_dim": 8, "num_experts": 4, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, **more))


def _deepseek_v3() -> nn.Module:
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16}
    experts = {"n_shared_experts": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    sizes = {**SIZES, **EXPERTS, **heads, **ranks, **experts, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))


ARCHITECTURES = {
    "llama": Architecture(_llama, ""),
    "gpt-oss": Architecture(_gpt_oss, "*.router.*"),
    "qwen3-moe": Architecture(_qwen3_moe, "*.mlp.gate.*"),
    "deepseek-v3": Architecture(_deepseek_v3, "*.mlp.gate.*"),
}


def rules(name: str) -> list[dict[str, Any]]:
    """Return rules that pin the routers."""
    routers = ARCHITECTURES[name].routers
    return [{"match": routers, "pin": "fp32"}] if routers else []


def deep(name: str, layers: int = 4) -> nn.Module:
    """Make the architecture with as many layers as two ranks with two pieces each need."""
    small = ARCHITECTURES[name].model()
    changed = copy.deepcopy(small.config)
    for key in ("layer_types", "mlp_layer_types"):
        if getattr(changed, key, None):
            setattr(changed, key, (list(getattr(changed, key)) * layers)[-layers:])
    changed.num_hidden_layers = layers
    torch.manual_seed(0)
    return type(small)(changed)


MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURE |= {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8}
MIXTURE |= {"n_group": 1, "topk_group": 1}
SLIDING = ["sliding_attention"] * 3 + ["full_attention"]
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4, "head_dim": 8},
    "gemma3_text": {"sliding_window": 4, "head_dim": 8, "layer_types": SLIDING},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "cohere2": {"sliding_window": 4},
    "phi": {"partial_rotary_factor": 0.5},
}
"""Config keys that make the layers of a type differ from each other, or scale their input."""


def of_type(kind: str, layers: int = 4, **more: Any) -> Any:
    """Make a causal model of a type of the library."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64}
    elif kind.startswith("mamba"):
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": layers, **more}
    else:
        mixed = MIXTURE if "moe" in kind or kind == "mixtral" else {}
        sizes = {**SIZES, "num_hidden_layers": layers, **mixed, **OWN.get(kind, {}), **more}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


def labelled(number: int, rank: int = 0) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(number, rank), "labels": tokens(number, rank)}


def exact_gradients(model: Any, ranks: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean loss over all micro-batches of all ranks, in fp64 by plain torch."""
    model.double()
    model.config._experts_implementation = "eager"  # grouped products of torch know no fp64
    for batch in (labelled(micro, rank) for rank in range(ranks) for micro in range(micro_batches)):
        (model(**batch, use_cache=False).loss / (ranks * micro_batches)).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def some(*quick: str) -> list[Any]:
    """Return all architectures as parameters of a test: these for every run, the others marked slow."""
    rest = [pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES if name not in quick]
    return [*quick, *rest]


def recompute(model: Any, use_reentrant: bool = False) -> None:
    """Turn on activation checkpointing by the library's own method."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    next(getattr(model, name) for name in names if hasattr(model, name))({"use_reentrant": use_reentrant})


@functools.cache
def tokens(number: int, rank: int = 0) -> torch.Tensor:
    """Return one of a few batches that repeat, which a model can learn."""
    generator = torch.Generator().manual_seed(31 * number + rank)
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
