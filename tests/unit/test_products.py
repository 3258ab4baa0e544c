"""`compute: fp8` in a plan: its weights with their reasons, and each refusal with its twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.models import at, moe, parameter, plan
from zerodrift import Config, ConfigError, MatrixProducts, ModelSpec, Precision, UnsupportedError
from zerodrift.kernels import products as kernels
from zerodrift.policy.narrow import MULTIPLE
from zerodrift.record import decode, encode

QUERY = "model.layers.1.self_attn.q_proj.weight"
CONV1D = "transformers.pytorch_utils.Conv1D"
ROUTER, HEAD = "model.layers.1.mlp.gate.weight", "lm_head.weight"


def model(*more: Any) -> ModelSpec:
    return ModelSpec("tiny", (*moe(2).parameters, *more))


def products(precision: dict[str, Any], name: str = QUERY, of: ModelSpec | None = None) -> str:
    """Return the `products` of a parameter in words, with the reason; "" if there are none."""
    row = plan(at(3, "bf16", **precision), of or model()).row(name)
    assert row is not None
    shown, why = row.columns.options().get("products", ""), row.columns.reasons().get("products", "")
    return f"{shown}: {why}" if shown or why else ""


def ruled(**rule: Any) -> dict[str, Any]:
    return {"rules": [{"match": "*q_proj*", **rule}]}


def padded(pattern: str) -> dict[str, Any]:
    return {"rules": [{"match": pattern, "compute": {"pad": True}}]}


ALL, PAIR = {"compute": "fp8"}, {"forward": "fp8", "grad_input": "fp8"}
TWO, NOT = "fp8-hp-grad-weight: precision.compute", "`precision.compute` is not for it"
ONE = "forward fp8, grad_input bf16, grad_weight bf16: precision.compute"
PADDED = "fp8-hp-grad-weight, padded"
PADDED_HEAD = {"match": HEAD, "compute": {**PAIR, "pad": True}}
CHOSEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "all three": (ALL, QUERY, "fp8: precision.compute"),
    "the recipe": ({"compute": "fp8-hp-grad-weight"}, QUERY, TWO),
    "one": ({"compute": {"forward": "fp8"}}, QUERY, ONE),
    "a head": (ALL, HEAD, f"bf16: an output head: {NOT}"),
    "a router": (ALL, ROUTER, f"bf16: a router: {NOT}"),
    "a rule against": (ALL | ruled(compute="bf16"), QUERY, ""),
    "a pin": (ALL | ruled(pin="fp32"), QUERY, ""),
    "cell by cell": (ALL | ruled(compute={"grad_weight": "bf16"}), QUERY, TWO),
    "a head by a rule": ({"rules": [PADDED_HEAD]}, HEAD, f"{PADDED}: precision.rules[0]: '{HEAD}'"),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_which_products_a_weight_has(case: str) -> None:
    precision, name, expected = CHOSEN[case]
    assert products(precision, name) == expected


STACK = parameter("model.layers.0.mlp.experts.up", (3, 96, 48), "models.Experts")
ADAPTER = parameter("model.layers.0.q_proj.lora_A.default.weight", (8, 48))
BASE = parameter("model.layers.0.q_proj.base_layer.weight", (48, 48), trained=False)
LORA = model(ADAPTER, BASE)


def test_stacks_of_experts_and_frozen_bases_have_products_and_adapters_keep_theirs() -> None:
    assert products(ALL, STACK.name, model(STACK)) == "fp8: precision.compute"
    assert products({"compute": "fp8-hp-grad-weight"}, BASE.name, LORA) == "fp8: precision.compute"
    assert products(ALL, ADAPTER.name, LORA).startswith("bf16: an adapter")


def test_a_plan_without_fp8_is_the_plan_of_before() -> None:
    """Such a plan has no text about products, and rows share a segment whatever their `products`."""
    without, fp8 = (plan(at(3, "bf16", **more)) for more in ({}, {"compute": "fp8"}))
    assert "products" not in str(encode(without)) and without.digest != fp8.digest
    assert len(without.segments) == len(fp8.segments)
    assert decode(type(fp8), encode(fp8)) == fp8


def test_typed_blocks_are_the_keys_of_a_dict() -> None:
    compute = MatrixProducts(forward="fp8", grad_input="fp8", grad_weight="bf16", pad=True)
    typed = Config(precision=Precision(mode="bf16", compute=compute))
    written = {"precision": {"mode": "bf16", "compute": {**PAIR, "grad_weight": "bf16", "pad": True}}}
    assert plan(typed).digest == plan(written).digest


ODD = [parameter(f"model.layers.{layer}.mlp.narrow.weight", (48, 40)) for layer in range(2)]
ODD_CONV1D = parameter("h.0.mlp.c_fc.weight", (48, 40), CONV1D)
MANY = parameter("model.layers.0.mlp.many", (4, 96, 48), "models.Many")
LAYER = "neither a linear layer nor a stack of experts"
ALONE = {"forward": "fp8", "grad_weight": "bf16"}
REFUSED: dict[str, tuple[dict[str, Any], Any, str, dict[str, Any]]] = {
    "a size": (
        ALL,
        ODD,
        r"`model.layers.0.mlp.narrow.weight`: must not be multiplied in fp8 \(`precision.compute`\), as a "
        r"weight whose sizes are no multiples of 16.*got shape \[48, 40\].*pad: true",
        {"compute": {"forward": "fp8", "pad": True}},
    ),
    "a size of Conv1D": (ALL, ODD_CONV1D, "c_fc.weight.*multiples of 16", ALL | padded("*.c_fc.weight")),
    "a stack of anything": (
        ALL,
        MANY,
        rf"mlp.many`.*{LAYER}.*shape \[4, 96, 48\] of Many.*"
        r'\{match: "model.layers.\*.mlp.many", compute: bf16\}',
        ALL | {"rules": [{"match": "model.layers.*.mlp.many", "compute": "bf16"}]},
    ),
    "a pin": (ruled(pin="fp32", compute="fp8"), [], "q_proj.weight`.*as a pinned", ruled(compute="fp8")),
    "another dtype": (
        {"compute": {**ALONE, "grad_weight": "fp16"}},
        [],
        "`compute.grad_weight` must be fp8 or the compute dtype, bf16; got fp16",
        {"compute": ALONE},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_fp8_product_is_refused_by_name(case: str) -> None:
    precision, more, message, twin = REFUSED[case]
    of = model(*more) if isinstance(more, list) else model(more)
    with pytest.raises(ConfigError, match=f"(?s){message}") as caught:
        plan(at(3, "bf16", **precision), of)
    assert str(caught.value).count("narrow.weight") <= 1, "every block of a kind is named once"
    assert plan(at(3, "bf16", **twin), of)


def test_a_backend_or_a_device_without_such_products_is_refused() -> None:
    written = {**at(3, "bf16", compute="fp8"), "backend": "fsdp2"}
    with pytest.raises(ConfigError, match=r"`precision.compute`: must be left out with backend fsdp2"):
        plan(written)
    assert plan({**written, "precision": {"mode": "bf16"}})
    kernels.require_products(torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="no fp8 product for devices of type mps"):
        kernels.require_products(torch.device("mps"))
    assert MULTIPLE == kernels.MULTIPLE
