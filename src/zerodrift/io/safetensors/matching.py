"""Which tensors of a checkpoint fill which parameters and buffers of a model, or everything that is wrong.

Names are settled by `conversions.py`; here what was found is held against what the model has: names, shapes
and dtypes, ties, and what a caller or the model itself allows to be missing or too much. No weight is read.

Invariant: with no problem raised, every element of every name in `Match.filled` has one place in a file.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from zerodrift.dtypes import DType, widest
from zerodrift.errors import ModelError, Problems, did_you_mean
from zerodrift.io.safetensors.boxes import Box
from zerodrift.io.safetensors.conversions import ModelTensors, convert
from zerodrift.model.document import listed, read
from zerodrift.model.header import Stored
from zerodrift.model.module import transient
from zerodrift.model.spec import BufferSpec, ParameterSpec
from zerodrift.plan.table import BufferRow, Row

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Expected:
    """A parameter or a buffer that a checkpoint may have values for."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: DType
    is_buffer: bool = False

    @property
    def name(self) -> str:
        return self.names[0]


def expected(
    parameters: Iterable[ParameterSpec | Row], buffers: Iterable[BufferSpec | BufferRow], model: nn.Module
) -> tuple[Expected, ...]:
    """What a state dict of the model would hold, tied parameters once."""
    left_out = transient(model)
    tensors = []
    for parameter in parameters:
        if isinstance(parameter, Row):
            tensors.append(Expected(parameter.names, parameter.whole_shape, parameter.source))
        else:
            tensors.append(Expected(parameter.names, parameter.shape, parameter.dtype))
    for buffer in buffers:
        if buffer.name not in left_out:
            dtype = buffer.storage if isinstance(buffer, BufferRow) else buffer.dtype
            tensors.append(Expected((buffer.name,), buffer.shape, dtype, is_buffer=True))
    return tuple(tensors)


@dataclass(frozen=True, slots=True)
class Filled:
    """Where the values of one parameter or buffer are."""

    boxes: tuple[Box, ...]
    """Sources are numbered as in `Match.tensors`."""
    exact: DType
    """Holds every value of every source."""
    again: tuple[tuple[Box, ...], ...] = ()
    """The same values under other names that the model ties to it."""


@dataclass
class Match:
    """A checkpoint and a model, put together."""

    path: str
    tensors: tuple[Stored, ...]
    filled: dict[str, Filled] = field(default_factory=dict)
    """By the first name of what is filled."""
    missing: list[str] = field(default_factory=list)
    """Allowed to be: their values are the model's own."""
    unexpected: list[str] = field(default_factory=list)
    """Allowed to be: nothing reads them."""
    conversions: list[Any] = field(default_factory=list)
    """Those of `transformers` that were used; its models keep them to be saved in the same form."""

    @cached_property
    def known(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(tensor.name for tensor in self.tensors)


Strict = bool | Sequence[str]
"""True: nothing may be missing or too much. False: anything may. Patterns: what they match may."""


def match(
    path: str | Path, tensors: tuple[Stored, ...], model: nn.Module, want: Sequence[Expected], strict: Strict
) -> Match:
    """Every value that the checkpoint has for the model; one ModelError with all that is wrong."""
    names = [name for entry in want for name in entry.names]
    converted = convert(model, names, tensors)
    problems = Problems()
    result = Match(str(path), tensors, conversions=converted.used)
    refused = {name for name, _ in converted.refused}
    for name, why in converted.refused:
        problems.add(name, "must be readable from the files", got=why)
    for entry in want:
        _fill(entry, converted, refused, result, problems)
    placed = set(names)
    unplaced = [name for name in converted.layouts if name not in placed]
    allowed = _Allowed(model, strict, [*names, *(tensor.name for tensor in tensors)], problems)
    _judge(result, [*converted.unexpected, *unplaced], allowed, problems)
    if problems:
        _explain(Path(path), problems)
    problems.raise_as(ModelError, f"weights of {path}")
    return result


def _fill(
    entry: Expected, converted: ModelTensors, refused: set[str], result: Match, problems: Problems
) -> None:
    here = [(name, converted.layouts[name]) for name in entry.names if name in converted.layouts]
    if not here:
        if not refused & set(entry.names):
            result.missing.append(entry.name)
        return
    kept: list[tuple[Box, ...]] = []
    for name, layout in here:
        if layout.shape != entry.shape:
            problems.add(
                name, f"must have shape {list(entry.shape)}", got=f"{list(layout.shape)} in the files"
            )
            continue
        boxes = layout.boxes()
        _check_dtypes(name, entry, boxes, result, problems)
        kept.append(boxes)
    if kept:
        sources = tuple({result.tensors[box.number].dtype for box in kept[0]}) or (entry.dtype,)
        exact = widest(sources) if sources[0].is_floating else sources[0]
        result.filled[entry.name] = Filled(kept[0], exact, tuple(kept[1:]))


def _check_dtypes(
    name: str, entry: Expected, boxes: Sequence[Box], result: Match, problems: Problems
) -> None:
    """What may be converted on the way in: floating values of at most 32 bits."""
    tensors, known = result.tensors, result.known
    for stored in {box.number: tensors[box.number] for box in boxes}.values():
        got, todo = f"{stored.dtype} of `{stored.name}`", ""
        if not entry.dtype.is_floating:
            fine = stored.dtype is entry.dtype
            must = f"must be {entry.dtype} in the files"
        else:
            fine = stored.dtype.is_floating and stored.dtype is not DType.FP64
            must = "must be in a floating dtype of at most 32 bits in the files"
            if stored.dtype is DType.FP64:
                todo = "Its values would be rounded. Convert the file to fp32 if that is meant."
            scale = _scale_of(stored, known) if stored.dtype.size == 1 else ""
            if fine and scale:
                fine, must = False, "must be stored without a scale"
                got, todo = f"{got}, scaled by `{scale}`", "Dequantize the checkpoint first."
        if fine and entry.is_buffer and entry.dtype.is_floating and not entry.dtype.holds(stored.dtype):
            fine, must = False, f"must be at most {entry.dtype} in the files, the dtype of the buffer"
            todo = f"Give the buffer the dtype {stored.dtype}: its values would be rounded."
        if not fine:
            problems.add(name, must, got=got, do=todo)


def _scale_of(stored: Stored, known: Collection[str]) -> str:
    """The name of what scales a quantized tensor, by the usual names for it; empty if nothing does."""
    stem = stored.name.removesuffix(".weight")
    likely = [f"{stored.name}{end}" for end in ("_scale_inv", "_scale", ".scale", "_scales")]
    likely += [f"{stem}.{end}" for end in ("weight_scale", "weight_scale_inv", "scale", "scales")]
    return next((name for name in likely if name in known), "")


# --- what may be missing or too much --------------------------------------------------------------------


class _Allowed:
    """What the caller and the model itself allow."""

    def __init__(self, model: nn.Module, strict: Strict, known: Sequence[str], problems: Problems) -> None:
        self._all = strict is False
        self._patterns: tuple[re.Pattern[str], ...] = ()
        if not isinstance(strict, bool):
            patterns = [strict] if isinstance(strict, str) else list(strict)
            self._patterns = tuple(re.compile(fnmatch.translate(pattern)) for pattern in patterns)
            for text, pattern in zip(patterns, self._patterns, strict=True):
                if not any(pattern.match(name) for name in known):
                    must = "must match a name in the model or in the files"
                    problems.add("strict", must, got=repr(text), do=did_you_mean(text, known))
        self._missing = _declared(model, "_keys_to_ignore_on_load_missing")
        self._unexpected = _declared(model, "_keys_to_ignore_on_load_unexpected")
        buffers = [name for name, _ in model.named_buffers()]
        # Tensors that old files hold for what is a buffer outside of the state dict by now.
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            self._unexpected.append(re.compile(r"rotary_emb\.inv_freq"))
        if any(name.endswith("position_ids") for name in buffers):
            self._unexpected.append(re.compile(r"(^|\.)position_ids$"))

    def missing(self, name: str) -> bool:
        return self._given(name) or any(pattern.search(name) for pattern in self._missing)

    def unexpected(self, name: str) -> bool:
        return self._given(name) or any(pattern.search(name) for pattern in self._unexpected)

    def _given(self, name: str) -> bool:
        return self._all or any(pattern.match(name) for pattern in self._patterns)


def _declared(model: nn.Module, attribute: str) -> list[re.Pattern[str]]:
    """Patterns by which a model of `transformers` says what its checkpoints lack or have too much."""
    patterns: Any = getattr(model, attribute, None)
    return [re.compile(pattern) for pattern in patterns or ()]


def _judge(result: Match, unexpected: Sequence[str], allowed: _Allowed, problems: Problems) -> None:
    lacking = [name for name in result.missing if not allowed.missing(name)]
    todo = "If they are to start from the model's own values, allow it: `strict=[...]` with globs."
    if lacking:
        problems.add(
            result.path,
            "must hold every parameter and buffer of the model",
            got=f"no {listed(lacking)}",
            do=todo,
        )
    extra = [name for name in unexpected if not allowed.unexpected(name)]
    todo = "If they are to be left out, allow it: `strict=[...]` with globs."
    if extra:
        problems.add(
            result.path, "must hold nothing that the model has no place for", got=listed(extra), do=todo
        )
    result.unexpected = [name for name in unexpected if name not in extra]


def _explain(path: Path, problems: Problems) -> None:
    """One more line where the checkpoint itself says why it does not fit."""
    file = (path if path.is_dir() else path.parent) / CONFIG
    if not file.is_file():
        return
    document: Mapping[str, Any] = read(file, Problems()) or {}
    quantized = document.get("quantization_config")
    if isinstance(quantized, dict):
        method = quantized.get("quant_method")
        todo = "Dequantize it first, for example with `transformers`, and save it."
        problems.add(str(file), "must be of a checkpoint that is not quantized", got=f"{method!r}", do=todo)


def dtypes(result: Match) -> dict[str, DType]:
    """Name in the model -> the dtype that the checkpoint has for it."""
    return {name: filled.exact for name, filled in result.filled.items()}
