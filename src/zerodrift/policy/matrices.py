"""Which parameters Muon updates, where no rule says so: the hidden matrices.

Muon makes every direction of a matrix's update equally long. That is meant for matrices between hidden
activations; a row of an embedding or of the head belongs to one token, a row of a router to one expert,
and most of them see few gradients. The rule is DeepSpeed's (two dimensions or more, and no name with
`embed` or `lm_head` in it) and a few cases more, and every row of a plan says which case it was.

A gpt-oss model stacks the biases of its experts into two dimensions, so the name of a parameter counts too.

Invariant: pure, and the answer depends on the names, classes and shape of the parameter alone.
"""

from __future__ import annotations

import re

from zerodrift.model.spec import ParameterSpec

RULE = "hidden matrices, stacked ones one by one; not embeddings, heads, routers, norms, biases, convolutions"
"""The rule in a clause, for reports."""

HEADS = ("lm_head", "head", "embed_out", "classifier", "score")
"""Last components of a module's path that are an output head."""

ROUTERS = ("router", "gate")
"""Components of a name that are a router. `gate_proj` is none."""

_CONVOLUTION = re.compile(r"(Lazy)?Conv(Transpose)?[123]d")
"""torch's own. `Conv1D`, which GPT-2 has, is a linear layer."""


def not_hidden(parameter: ParameterSpec) -> str:
    """Why a parameter is no hidden matrix; `""` for one that is. Tied parameters are asked by every name."""
    if len(parameter.shape) < 2:
        return "a vector, no matrix" if parameter.shape else "a single number"
    for name, owner in zip(parameter.names, parameter.owners, strict=True):
        role = _role(name, owner.klass.rpartition(".")[2])
        if role:
            return role
    return ""


def _role(name: str, klass: str) -> str:
    """What a parameter is by its name and its module's class, if that is anything special."""
    parts = name.lower().split(".")
    module = parts[-2] if len(parts) > 1 else ""
    if klass.startswith("Embedding") or "embed" in name.lower() or module in ("wte", "wpe"):
        return "an embedding"
    if module in HEADS:
        return "an output head"
    if any(part in ROUTERS for part in parts):
        return "a router"
    if parts[-1].endswith("bias"):
        return "a bias"
    if "norm" in module:
        return "a norm"
    if _CONVOLUTION.fullmatch(klass):
        return "a convolution"
    return ""
