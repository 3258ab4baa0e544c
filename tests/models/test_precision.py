"""What the trainer compares in its first step, over architectures whose own code computes wider than the
plan: that is said and ends nothing; what rounds ends it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import nn

from tests.models.architectures import SIZES, since, tokens
from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks
from zerodrift.inspect.check import compare
from zerodrift.inspect.trace.libraries.engine import observe
from zerodrift.inspect.trace.records import merged

MAMBA: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

MODELS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "gemma3": ("Gemma3ForCausalLM Gemma3TextConfig", {"head_dim": 8}, {"compute"}),
    "glm4-moe": (
        "Glm4MoeForCausalLM Glm4MoeConfig",
        {**EXPERTS, "head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1},
        {"compute"},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM Qwen3NextConfig",
        {
            **EXPERTS,
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {"compute", "grad"},
    ),
    "mamba": ("MambaForCausalLM MambaConfig", {"state_size": 4, "time_step_rank": 4}, {"compute", "grad"}),
    "mamba2": (
        "Mamba2ForCausalLM Mamba2Config",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        {"compute", "grad"},
    ),
    "jamba": (
        "JambaForCausalLM JambaConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        {"compute"},
    ),
    "bamba": (
        "BambaForCausalLM BambaConfig",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
        },
        {"compute", "grad"},
    ),
    "olmo2": ("Olmo2ForCausalLM Olmo2Config", {}, {"grad"}),
    "olmo3": (
        "Olmo3ForCausalLM Olmo3Config",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        {"grad"},
    ),
}
"""Name -> the library's classes, what their config has beyond sizes, and the columns that are wider."""


def build(name: str) -> nn.Module:
    classes, more, _ = MODELS[name]
    model, settings = (getattr(transformers, word) for word in classes.split())
    torch.manual_seed(0)
    made: nn.Module = model(settings(**(MAMBA if name.startswith("mamba") else SIZES), **more))
    return made


def looked_at(names: list[str], rules: list[dict[str, Any]]) -> dict[str, tuple[list[str], list[str]]]:
    """Two steps as the trainer takes them, the first of them looked at: what is wider, and what differs."""
    warnings.simplefilter("ignore")  # of the library, on kernels that are not installed
    found = {}
    for name in names:
        engine = make(config(3, "bf16", precision={"rules": rules}), build(name))

        def step(number: int, engine: Any = engine) -> None:
            ids = tokens(number, engine.mesh.rank())
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            assert engine.step().updated

        with observe(engine) as mine:
            step(0)
        step(1)
        seen = merged(engine.comm.all_gather_object(mine))
        wider, narrower = compare.widened(engine.plan, seen), compare.findings(engine.plan, seen)
        found[name] = (list(wider), [str(each) for each in narrower])
        engine.destroy()
    return found


def check(names: list[str], ranks: int) -> None:
    for found in run_ranks(looked_at, ranks, names, [], timeout=120.0):
        for name in names:
            wider, narrower = found[name]
            assert narrower == [], name
            columns = {"grad" if "leaves gradients of" in line else "compute" for line in wider}
            assert columns == MODELS[name][2], (name, wider)
            assert all(line.startswith("wider than planned: the model's own code ") for line in wider)


def test_what_an_architecture_computes_wider_is_said_and_no_finding() -> None:
    check(["gemma3", "qwen3-next", "bamba", "olmo2"], 1)


@pytest.mark.slow
def test_the_same_of_all_on_two_ranks() -> None:
    check(list(MODELS), 2)


@since("5.20")
def test_what_an_architecture_itself_rounds_is_a_finding_by_name() -> None:
    """Mamba 2 casts `dt_bias` to the dtype of its activations, whatever a rule says of it."""
    rules = [{"match": "*dt_bias", "pin": "fp32"}]
    (found,) = run_ranks(looked_at, 1, ["mamba2"], rules, timeout=120.0)
    wider, narrower = found["mamba2"]
    assert len(wider) == 2 and len(narrower) == 2
    for number, text in enumerate(narrower):
        assert text.startswith(
            f"`backbone.layers.{number}.mixer.dt_bias`: `compute` must be float32 (precision.rules[0]: "
            f"'*dt_bias'); got bfloat16"
        )
