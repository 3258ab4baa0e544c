"""The dtypes of a sampler, as a small table: what is multiplied in what, and what is kept in what.

    compute: bf16
    head: fp32
    kv: fp8_e4m3
    tensors: {"*.experts.*": fp16}

What is not named is as the trainer has it. `compute` is for every parameter that has no key of its own.

Invariant: every key is known and every value is a dtype that the key admits, or one error says what is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerodrift.dtypes import DType, parse
from zerodrift.errors import ConfigError, Problems, did_you_mean, first_line
from zerodrift.files import opened
from zerodrift.numerics.roles import ROLES, Role

_TRAINING = (DType.FP32, DType.BF16, DType.FP16)
_CACHED = (*_TRAINING, DType.FP8_E4M3, DType.FP8_E5M2)

ACTIVATIONS: Mapping[str, tuple[DType, ...]] = {
    "kv": _CACHED,
    "softmax": _TRAINING,
    "rotary": _TRAINING,
    "logits": _TRAINING,
    "logprobs": _TRAINING,
}
"""Key -> what it admits: dtypes of what a forward computes, beside those of parameters."""

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
"""Key -> what it is of."""


@dataclass(frozen=True, slots=True)
class SamplerDtypes:
    """A table, read."""

    compute: DType | None = None
    roles: tuple[tuple[Role, DType], ...] = ()
    tensors: tuple[tuple[str, DType], ...] = ()
    """Globs, in the order in which they were written."""
    buffers: DType | None = None
    activations: tuple[tuple[str, DType], ...] = ()


def read_sampler(path: Path) -> SamplerDtypes:
    """The table in a YAML or JSON file."""
    import yaml

    try:
        with opened(path) as file:
            text = file.read().decode("utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(path, "must be a file that can be read", got=error.strerror or error) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(path, "must be YAML or JSON", got=first_line(error)) from None
    return sampler(data, str(path))


def sampler(data: Any, where: str = "sampler") -> SamplerDtypes:
    """The same from a dict."""
    if not isinstance(data, Mapping):
        raise ConfigError(where, "must be a block of keys", got=type(data).__name__, do=_LIST)
    problems = Problems()
    found: dict[str, DType] = {}
    tensors: list[tuple[str, DType]] = []
    for key, value in data.items():
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS) or _LIST
            problems.add(str(key), "must be a key of the sampler's table", got=repr(key), do=hint)
        elif key == "tensors":
            tensors += _globs(value, problems)
        else:
            dtype = _dtype(key, value, ACTIVATIONS.get(key, _TRAINING), problems)
            if dtype is not None:
                found[key] = dtype
    problems.raise_as(ConfigError, where)
    return SamplerDtypes(
        found.get("compute"),
        tuple((role, found[role]) for role in ROLES if role in found),
        tuple(tensors),
        found.get("buffers"),
        tuple((key, found[key]) for key in ACTIVATIONS if key in found),
    )


_LIST = f"Keys are {', '.join(KEYS)}."


def _globs(value: Any, problems: Problems) -> list[tuple[str, DType]]:
    if not isinstance(value, Mapping):
        problems.add("tensors", "must be a block of globs, each with a dtype", got=repr(value))
        return []
    found = []
    for pattern, text in value.items():
        dtype = _dtype(f"tensors.{pattern}", text, _TRAINING, problems)
        if dtype is not None:
            found.append((str(pattern), dtype))
    return found


def _dtype(key: str, value: Any, admitted: tuple[DType, ...], problems: Problems) -> DType | None:
    try:
        dtype = parse(value) if isinstance(value, str) else None
    except ConfigError:
        dtype = None
    if dtype is None or dtype not in admitted:
        words = ", ".join(map(str, admitted[:-1])) + f" or {admitted[-1]}"
        problems.add(key, f"must be {words}", got=repr(value))
        return None
    return dtype
