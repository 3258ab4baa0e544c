"""The trainer's check of its first step: code of an architecture that computes wider than the plan is
reported, and code that rounds ends the run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.models.architectures import EXPERTS, of_type, tokens
from tests.numerics.runs import config, make
from tests.ranks.harness import on_ranks
from zerodrift.inspect.check import compare
from zerodrift.inspect.trace.engine import observe
from zerodrift.inspect.trace.records import merged

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 24}
HEADS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
}
LINEARLY = ["linear_attention", "full_attention"]

MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_next": {**EXPERTS, **LINEAR, "head_dim": 8, "num_experts": 4, "layer_types": LINEARLY},
    "bamba": {**HEADS, "attn_layer_indices": [1]},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "olmo2": {},
}
"""Type -> keys of its config beyond sizes."""


def build(kind: str) -> nn.Module:
    made: nn.Module = of_type(kind, 2, **MODELS[kind])
    return made


class Casts(TorchFunctionMode):
    """Casts of parameters in a bf16 model's own code: `wider` are the columns of parameters that are cast
    up or meet a wider tensor; `rounded` are the fp32 parameters that are cast to bf16."""

    def __init__(self, name: str, in_fp32: str = "none") -> None:
        super().__init__()
        self.wider: set[str] = set()
        self.rounded: set[str] = set()
        model = build(name).bfloat16()
        self._names = {id(parameter): key for key, parameter in model.named_parameters()}
        for key, parameter in model.named_parameters():
            parameter.data = parameter.float() if key.endswith(in_fp32) else parameter.data
        with self:
            model(input_ids=tokens(0), labels=tokens(0))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        for each in tensors if isinstance(out, torch.Tensor) else ():
            name = self._names.get(id(each._base if each._is_view() else each))
            if name and (each.dtype, out.dtype) == (torch.bfloat16, torch.float32):
                self.wider.add("compute" if len(tensors) == 1 else "grad")
            elif name and (each.dtype, out.dtype) == (torch.float32, torch.bfloat16):
                self.rounded.add(name)
        return out


def first_step(name: str, rules: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Run a checked step of the trainer; return the wider columns and the differing ones."""
    warnings.simplefilter("ignore")  # of the library, on kernels that are not installed
    engine, ids = make(config(3, "bf16", precision={"rules": rules}), build(name)), tokens(0)
    with observe(engine) as mine:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        assert engine.step().updated
    seen = merged(engine.comm.all_gather_object(mine))
    narrower = [str(each) for each in compare.findings(engine.plan, seen)]
    return list(compare.widened(engine.plan, seen)), narrower


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks("world", timeout=120)
def test_what_an_architecture_computes_wider_is_said_and_no_finding(world: int) -> None:
    for name in MODELS:
        wider, narrower = first_step(name, [])
        assert narrower == [], (name, narrower)
        columns = {"grad" if "leaves gradients of" in line else "compute" for line in wider}
        assert columns == Casts(name).wider != set(), (name, wider)
        assert all(line.startswith("wider than planned: the model's own code ") for line in wider)


@on_ranks(1, timeout=120)
def test_what_an_architecture_itself_rounds_is_a_finding_by_name() -> None:
    """Mamba 2 casts `dt_bias` to the dtype of its activations, against any rule."""
    wider, narrower = first_step("mamba2", [{"match": "*dt_bias", "pin": "fp32"}])
    casts = Casts("mamba2", in_fp32="dt_bias")
    assert len(wider) == len(casts.wider) and len(narrower) == len(casts.rounded), (wider, narrower)
    said = "`compute` must be float32 (precision.rules[0]: '*dt_bias'); got bfloat16"
    for name, text in zip(sorted(casts.rounded), narrower, strict=True):
        assert text.startswith(f"`{name}`: {said}"), text
