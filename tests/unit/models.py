"""Small model specs for the pure tests, and plans of them: no torch, no files."""

from __future__ import annotations

from typing import Any

from zerodrift.api import make_plan
from zerodrift.dtypes import DType
from zerodrift.model.spec import BufferSpec, ModelSpec, OwningModule, ParameterSpec
from zerodrift.plan.table import Plan

LINEAR = "torch.nn.modules.linear.Linear"
NORM = "models.RMSNorm"
EMBEDDING = "torch.nn.modules.sparse.Embedding"


def parameter(
    name: str,
    shape: tuple[int, ...],
    klass: str = LINEAR,
    dtype: DType = DType.FP32,
    trained: bool = True,
) -> ParameterSpec:
    """Return a parameter owned by the module in its name."""
    return ParameterSpec((name,), shape, dtype, (OwningModule(name.rpartition(".")[0], klass),), trained)


def tied(names: tuple[str, ...], shape: tuple[int, ...], klasses: tuple[str, ...]) -> ParameterSpec:
    """Return a parameter with several names."""
    owners = tuple(OwningModule(n.rpartition(".")[0], k) for n, k in zip(names, klasses, strict=True))
    return ParameterSpec(names, shape, DType.FP32, owners)


def moe(layers: int = 3, experts: int = 2, dtype: DType = DType.FP32, tie: bool = False) -> ModelSpec:
    """Return a small mixture-of-experts language model."""
    parameters: list[ParameterSpec] = []
    if tie:
        names = ("model.embed_tokens.weight", "lm_head.weight")
        parameters.append(tied(names, (300, 48), (EMBEDDING, LINEAR)))
    else:
        parameters.append(parameter("model.embed_tokens.weight", (300, 48), EMBEDDING, dtype))
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            parameters.append(parameter(f"{prefix}.self_attn.{name}.weight", (48, 48), LINEAR, dtype))
        parameters.append(parameter(f"{prefix}.input_layernorm.weight", (48,), NORM, dtype))
        parameters.append(parameter(f"{prefix}.mlp.gate.weight", (experts, 48), LINEAR, dtype))
        for expert in range(experts):
            for name, shape in (("up_proj", (96, 48)), ("down_proj", (48, 96))):
                full = f"{prefix}.mlp.experts.{expert}.{name}.weight"
                parameters.append(parameter(full, shape, LINEAR, dtype))
    parameters.append(parameter("model.norm.weight", (48,), NORM, dtype))
    if not tie:
        parameters.append(parameter("lm_head.weight", (300, 48), LINEAR, dtype))
    buffers = (
        BufferSpec("model.rotary.inv_freq", (24,), DType.FP32),
        BufferSpec("model.steps", (), DType.INT64),
    )
    return ModelSpec("tiny moe", tuple(parameters), buffers)


def at(stage: int, mode: str = "bf16", **precision: Any) -> dict[str, Any]:
    """Return a config of a stage and a mode."""
    return {"precision": {"mode": mode, **precision}, "zero_optimization": {"stage": stage}}


def plan(written: dict[str, Any], model: ModelSpec | None = None, world: int = 2) -> Plan:
    """Return the plan of a config for the mixture of experts, or for another model."""
    return make_plan(written, model or moe(), world)
