"""The trainer's check of its first step: code of an architecture that computes wider than the plan is
reported, and code that rounds ends the run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
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

LINEAR = {f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 4))}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24}
ATTENTION = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
HEADS = {f"mamba_{name}": 8 for name in ("n_heads", "d_head", "d_state")}
HEADS |= {"mamba_n_groups": 2, "mamba_chunk_size": 4}
LINEARLY = ["linear_attention", "full_attention"]

MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {**EXPERTS, "head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "qwen3_next": {**EXPERTS, **LINEAR, "head_dim": 8, "num_experts": 4, "layer_types": LINEARLY},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "jamba": {**ATTENTION, "use_mamba_kernels": False, "num_experts": 4, "num_experts_per_tok": 2},
    "bamba": {**HEADS, "attn_layer_indices": [1]},
    "olmo2": {},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
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


def first_steps(names: Sequence[str], rules: list[dict[str, Any]]) -> dict[str, tuple[list[str], list[str]]]:
    """Run two steps of the trainer, the first of them checked; return the wider and the differing columns."""
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
    return found


@pytest.mark.parametrize(
    ("names", "world"),
    [
        (("gemma3_text", "qwen3_next", "bamba", "olmo2"), 1),
        pytest.param(tuple(MODELS), 2, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
@on_ranks("world", timeout=120)
def test_what_an_architecture_computes_wider_is_said_and_no_finding(
    names: tuple[str, ...], world: int
) -> None:
    for name, (wider, narrower) in first_steps(names, []).items():
        assert narrower == [], (name, narrower)
        columns = {"grad" if "leaves gradients of" in line else "compute" for line in wider}
        assert columns == Casts(name).wider != set(), (name, wider)
        assert all(line.startswith("wider than planned: the model's own code ") for line in wider)


@on_ranks(1, timeout=120)
def test_what_an_architecture_itself_rounds_is_a_finding_by_name() -> None:
    """Mamba 2 casts `dt_bias` to the dtype of its activations, against any rule."""
    wider, narrower = first_steps(["mamba2"], [{"match": "*dt_bias", "pin": "fp32"}])["mamba2"]
    casts = Casts("mamba2", in_fp32="dt_bias")
    assert len(wider) == len(casts.wider) and len(narrower) == len(casts.rounded), (wider, narrower)
    said = "`compute` must be float32 (precision.rules[0]: '*dt_bias'); got bfloat16"
    for name, text in zip(sorted(casts.rounded), narrower, strict=True):
        assert text.startswith(f"`{name}`: {said}"), text
