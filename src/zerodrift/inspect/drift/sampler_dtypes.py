"""Read the dtypes of a sampler from a small table.

    compute: bf16
    head: fp32
    kv: fp8_e4m3
    tensors: {"*.experts.*": fp16}

Keys name roles: the part of a model that a parameter belongs to, by the class of its module and by its name.
Parameters without a key are as the trainer has them; `compute` is for all parameters without their own key.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from zerodrift.config import tree_of
from zerodrift.dtypes import DType, parse
from zerodrift.errors import ConfigError, Problems, did_you_mean, listed
from zerodrift.model import ModelSpec, OwningModule

Role = Literal["embedding", "head", "router", "norms", "attention", "experts", "mlp", "rest"]

ROLES: tuple[Role, ...] = get_args(Role)

_HEAD = re.compile(r"(.*_)?(lm_)?head|unembed(ding)?|output_projection|embed_out")
_ROUTER = re.compile(r"router|gate|gating|wg")
_NORM = re.compile(r".*norm\d*|ln(_?\w+)?|.*layernorm.*")
_INSIDE: dict[Role, re.Pattern[str]] = {
    "experts": re.compile(r"(.*_)?experts?"),
    "attention": re.compile(r".*attn.*|.*attention.*"),
    "mlp": re.compile(r"mlp|ffn?|feed_?forward|.*(gate|up|down)_proj|fc\d*|w[123]"),
}

_TRAINING = (DType.FP32, DType.BF16, DType.FP16)

ACTIVATIONS: Mapping[str, tuple[DType, ...]] = {
    "kv": (*_TRAINING, DType.FP8_E4M3, DType.FP8_E5M2),
    **dict.fromkeys(("softmax", "rotary", "logits", "logprobs"), _TRAINING),
}
"""Key of an activation -> the dtypes that it admits."""

KEYS: Mapping[str, str] = {
    "compute": "every parameter that has no key of its own, and what is computed between them",
    "embedding": "the table of token embeddings",
    "head": "the matrix that makes logits",
    "router": "the matrices that choose experts",
    "norms": "gains and biases of norms, and what norms compute in",
    "attention": "projections of attention",
    "experts": "matrices and biases of experts",
    "mlp": "projections of feed-forward layers",
    "rest": "parameters that are none of these",
    "tensors": "parameters by a glob on their names; the last match wins, before every other key",
    "buffers": "floating-point buffers",
    "kv": "keys and values, as a cache holds them",
    "softmax": "the softmax of attention",
    "rotary": "cosines and sines of rotary positions",
    "logits": "what the head returns",
    "logprobs": "the log-softmax that log-probabilities are taken from",
}

_LIST = f"Keys are {', '.join(KEYS)}."


def role_of(name: str, owner: OwningModule) -> Role:
    parts = name.lower().split(".")[:-1] or [name.lower()]
    kind = owner.klass.rpartition(".")[2]
    if "Embedding" in kind:
        return "embedding"
    if "Norm" in kind or _NORM.fullmatch(parts[-1]):
        return "norms"
    if _HEAD.fullmatch(parts[-1]):
        return "head"
    if _ROUTER.fullmatch(parts[-1]) or "Router" in kind:
        return "router"
    return next((role for role, word in _INSIDE.items() if any(map(word.fullmatch, parts))), "rest")


def roles_of(model: ModelSpec) -> dict[str, Role]:
    """First name -> role. A tied parameter that is a head under any of its names is one: that is where its
    dtype matters most."""
    found: dict[str, Role] = {}
    for parameter in model.parameters:
        mine = list(map(role_of, parameter.names, parameter.owners))
        found[parameter.name] = "head" if "head" in mine else mine[0]
    return found


@dataclass(frozen=True, slots=True)
class SamplerDtypes:
    compute: DType | None = None
    roles: tuple[tuple[Role, DType], ...] = ()
    tensors: tuple[tuple[str, DType], ...] = ()  # globs, in the order of the table
    buffers: DType | None = None
    activations: tuple[tuple[str, DType], ...] = ()


def read_sampler_dtypes(path: Path) -> SamplerDtypes:
    heading, tree, problems = tree_of(path, "sampler")
    problems.raise_as(ConfigError, heading)
    return parse_sampler_dtypes(tree, heading)


def parse_sampler_dtypes(data: Any, where: str = "sampler") -> SamplerDtypes:
    """Parse a table; one error tells everything that is wrong with it."""
    if not isinstance(data, Mapping):
        raise ConfigError(where, "must be a block of keys", got=type(data).__name__, do=_LIST)
    problems = Problems()
    found: dict[str, DType] = {}
    tensors: list[tuple[str, DType]] = []

    def dtype_of(key: str, value: Any, admitted: tuple[DType, ...]) -> DType | None:
        with contextlib.suppress(ConfigError):
            if isinstance(value, str) and (dtype := parse(value)) in admitted:
                return dtype
        problems.add(key, f"must be {listed(admitted, 'or')}", got=repr(value))
        return None

    for key, value in data.items():
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS) or _LIST
            problems.add(str(key), "must be a key of the sampler's table", got=repr(key), do=hint)
        elif key == "tensors" and not isinstance(value, Mapping):
            problems.add("tensors", "must be a block of globs, each with a dtype", got=repr(value))
        elif key == "tensors":
            for pattern, text in value.items():
                if (dtype := dtype_of(f"tensors.{pattern}", text, _TRAINING)) is not None:
                    tensors.append((str(pattern), dtype))
        elif (dtype := dtype_of(key, value, ACTIVATIONS.get(key, _TRAINING))) is not None:
            found[key] = dtype
    problems.raise_as(ConfigError, where)
    return SamplerDtypes(
        found.get("compute"),
        tuple((role, found[role]) for role in ROLES if role in found),
        tuple(tensors),
        found.get("buffers"),
        tuple((key, found[key]) for key in ACTIVATIONS if key in found),
    )
