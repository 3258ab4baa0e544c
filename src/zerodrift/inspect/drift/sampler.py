"""Read a sampler's dtypes from a small table, and its tensors from an exported or quantised folder.

    compute: bf16
    head: fp32
    kv: fp8_e4m3
    tensors: {"*.experts.*": fp16}

Keys name roles: the part of a model that a parameter belongs to, by the class of its module and by its name.
`compute` is for all parameters without their own key. Without either, parameters are like the trainer's.
Tensors keep the dtypes of the files and get the names of the trainer's model. Codes with scales are decoded
to fp32, together with half a step of each element. A tied tensor that the files hold twice is read twice.

Invariant: every tensor of the model is read or named as missing. Files of another model are refused.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from zerodrift.config import tree_of
from zerodrift.dtypes import DType, parse
from zerodrift.errors import ConfigError, ModelError, Problems, UnsupportedError, did_you_mean, listed
from zerodrift.model import ModelSpec, OwningModule, list_tensors
from zerodrift.weights import Box, ExpectedTensor, SafetensorsReader, decode_quantised, match

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

KEYS = ("compute", *ROLES, "tensors", "buffers", *ACTIVATIONS)  # docs/drift.md explains each

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
    """Return the role of each parameter by first name. A tied parameter that is a head under any name is a
    head, where its dtype matters most."""
    found: dict[str, Role] = {}
    for parameter in model.parameters:
        mine = list(map(role_of, parameter.names, parameter.owners))
        found[parameter.name] = "head" if "head" in mine else mine[0]
    return found


@dataclass(frozen=True, slots=True)
class SamplerDtypes:
    keys: Mapping[str, DType] = field(default_factory=dict)  # dtypes by key of the table
    tensors: dict[str, DType] = field(default_factory=dict)  # dtypes by glob, in the order of the table


def read_sampler_dtypes(path: Path) -> SamplerDtypes:
    heading, tree, problems = tree_of(path, "sampler")
    problems.raise_as(ConfigError, heading)
    return parse_sampler_dtypes(tree, heading)


def parse_sampler_dtypes(data: Any, where: str = "sampler") -> SamplerDtypes:
    """Parse a table. One error lists all its mistakes."""
    if not isinstance(data, Mapping):
        raise ConfigError(where, "must be a block of keys", got=type(data).__name__, do=_LIST)
    problems = Problems()
    found: dict[str, DType] = {}
    tensors: dict[str, DType] = {}

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
                    tensors[str(pattern)] = dtype
        elif (dtype := dtype_of(key, value, ACTIVATIONS.get(key, _TRAINING))) is not None:
            found[key] = dtype
    problems.raise_as(ConfigError, where)
    return SamplerDtypes(found, tensors)


_PACKED = re.compile(r".*\.(qweight|qzeros|g_idx|weight_packed|blocks)")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SamplerTensor:
    values: Tensor  # values in the dtype of the files; fp32 if the files scale them
    dtype: str  # dtype of the files: `bf16`, `int8 scaled`
    half_step: Tensor | None = None  # largest rounding error of each element of a scaled tensor


@dataclass(frozen=True, slots=True)
class SamplerWeights:
    path: str
    tensors: dict[str, SamplerTensor]
    """By name in the model; under every name of a tied parameter that the files hold."""
    missing: tuple[str, ...]  # first names that no file has
    unread: tuple[str, ...]  # names in the files that the model has no place for


def read_sampler_weights(path: Path, model: nn.Module, want: Sequence[ExpectedTensor]) -> SamplerWeights:
    """Read all tensors of a folder or file for a model."""
    found = list_tensors(path)
    packed = [tensor.name for tensor in found if _PACKED.fullmatch(tensor.name)]
    if packed:
        must = "must hold a tensor for each of the model, if need be of 8 bits with a scale or in NF4"
        do = "Dequantize it with the library that packed it, and give that folder."
        raise UnsupportedError(path, must, got=f"packed ones: {listed(packed[:_SHOWN])}", do=do)
    matched = match(path, found, model, want, False)
    if matched.missing and matched.unexpected:
        must = "must have the names of the trainer's model"
        got = f"no {listed(matched.missing[:_SHOWN])}, but {listed(matched.unexpected[:_SHOWN])}"
        do = "Export it with the names of the model, or give the files of this one."
        raise ModelError(path, must, got=got, do=do)
    reader = SafetensorsReader()
    tensors: dict[str, SamplerTensor] = {}

    def read(boxes: Sequence[Box], shape: tuple[int, ...], dtype: torch.dtype, steps: bool = False) -> Tensor:
        flat = torch.empty(math.prod(shape), dtype=dtype)
        for box in boxes:
            quantised = matched.quantised.get(box.number)
            if quantised is not None:
                decode_quantised(quantised, reader, box, flat, 0, steps)
            else:
                reader.read(matched.tensors[box.number], box, flat)
        return flat.view(shape)

    try:
        for entry in want:
            filled = matched.filled.get(entry.name)
            for number, boxes in enumerate((filled.boxes, *filled.again) if filled is not None else ()):
                assert filled is not None
                file_name = matched.tensors[boxes[0].number].name if boxes else ""
                name = file_name if file_name in entry.names else entry.names[number]
                quantised = matched.quantised.get(boxes[0].number) if boxes else None
                dtype, half = str(filled.exact), None
                if quantised is not None and all(box.number in matched.quantised for box in boxes):
                    dtype = f"{quantised.stored} scaled"
                    half = read(boxes, entry.shape, torch.float32, steps=True)
                tensors[name] = SamplerTensor(read(boxes, entry.shape, filled.exact.torch), dtype, half)
    finally:
        reader.close()
    names = {entry.name for entry in want}
    missing = tuple(name for name in matched.missing if name in names)
    return SamplerWeights(str(path), tensors, missing, tuple(matched.unexpected))
