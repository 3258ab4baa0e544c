"""What part of a model a parameter belongs to: the words in which samplers say their dtypes.

By the classes of modules and by names, as models of `transformers` and plain ones have them.

Invariant: pure, and every parameter has one role.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from zerodrift.model.spec import ModelSpec, OwningModule

Role = Literal["embedding", "head", "router", "norms", "attention", "experts", "mlp", "rest"]

ROLES: tuple[Role, ...] = get_args(Role)

_HEAD = re.compile(r"(.*_)?(lm_)?head|unembed(ding)?|output_projection|embed_out")
_ROUTER = re.compile(r"router|gate|gating|wg")
_NORM = re.compile(r".*norm\d*|ln(_?\w+)?|.*layernorm.*")
_ATTENTION = re.compile(r".*attn.*|.*attention.*")
_EXPERTS = re.compile(r"(.*_)?experts?")
_MLP = re.compile(r"mlp|ffn?|feed_?forward|.*(gate|up|down)_proj|fc\d*|w[123]")


def role_of(name: str, owner: OwningModule) -> Role:
    """Of a parameter under one of its names."""
    parts = name.lower().split(".")[:-1] or [name.lower()]
    kind = owner.klass.rpartition(".")[2]
    if kind == "Embedding" or "Embedding" in kind:
        return "embedding"
    if "Norm" in kind or _NORM.fullmatch(parts[-1]):
        return "norms"
    if _HEAD.fullmatch(parts[-1]):
        return "head"
    if _ROUTER.fullmatch(parts[-1]) or "Router" in kind:
        return "router"
    if any(_EXPERTS.fullmatch(part) for part in parts):
        return "experts"
    if any(_ATTENTION.fullmatch(part) for part in parts):
        return "attention"
    return "mlp" if any(_MLP.fullmatch(part) for part in parts) else "rest"


def roles(model: ModelSpec) -> dict[str, Role]:
    """First name -> role. A tied parameter that is a head under any of its names is one: that is where it
    matters most."""
    found: dict[str, Role] = {}
    for parameter in model.parameters:
        pairs = zip(parameter.names, parameter.owners, strict=True)
        mine = [role_of(name, owner) for name, owner in pairs]
        found[parameter.name] = "head" if "head" in mine else mine[0]
    return found
