"""Match the tensors of a checkpoint with the parameters and buffers of a model, or report all that is wrong.

Invariant: without an error, every element of every name in `Match.filled` has one place in a file.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from zerodrift.dtypes import DType, widest
from zerodrift.errors import ModelError, Problems, did_you_mean
from zerodrift.model import (
    BufferSpec,
    ParameterSpec,
    QuantisedTensor,
    StoredTensor,
    find_quantised,
    listed,
    non_persistent_buffers,
    read,
)
from zerodrift.plan import BufferRow, Row
from zerodrift.weights.boxes import Box
from zerodrift.weights.conversions import convert
from zerodrift.weights.quantised import has_whole_blocks


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A parameter or a buffer that a checkpoint may have values for."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: DType
    is_buffer: bool = False

    @property
    def name(self) -> str:
        return self.names[0]


def expected_tensors(
    parameters: Iterable[ParameterSpec | Row], buffers: Iterable[BufferSpec | BufferRow], model: nn.Module
) -> tuple[ExpectedTensor, ...]:
    """List what a state dict of the model would hold, tied parameters once."""
    tensors = []
    for each in parameters:
        form = (each.whole_shape, each.source) if isinstance(each, Row) else (each.shape, each.dtype)
        tensors.append(ExpectedTensor(each.names, *form))
    left_out = non_persistent_buffers(model)
    for buffer in buffers:
        if buffer.name not in left_out:
            dtype = buffer.storage if isinstance(buffer, BufferRow) else buffer.dtype
            tensors.append(ExpectedTensor((buffer.name,), buffer.shape, dtype, is_buffer=True))
    return tuple(tensors)


@dataclass(frozen=True, slots=True)
class TensorPlaces:
    """The places of the values of one parameter or buffer. Sources are numbered as in `Match.tensors`."""

    boxes: tuple[Box, ...]
    exact: DType
    """A dtype that represents every value in the files exactly."""
    again: tuple[tuple[Box, ...], ...] = ()
    """Places of the same values under other names that the model ties to it."""


@dataclass
class Match:
    """A checkpoint and a model, matched."""

    path: str
    tensors: tuple[StoredTensor, ...]
    """Tensors of the files. Quantised ones have the shape and dtype of their decoded values."""
    filled: dict[str, TensorPlaces] = field(default_factory=dict)
    """By the first name of a parameter or buffer."""
    missing: list[str] = field(default_factory=list)
    """Names that are allowed to keep the model's own values."""
    unexpected: list[str] = field(default_factory=list)
    """Names that are allowed to stay unread."""
    conversions: list[Any] = field(default_factory=list)
    """Conversions of `transformers` that were used; the model keeps them to be saved in the same form."""

    quantised: dict[int, QuantisedTensor] = field(default_factory=dict)
    """By their number among `tensors`."""


Strict = bool | Sequence[str]
"""True: no name may be missing or unexpected. False: any name may. Globs: names that match one may."""


def match(
    path: str | Path,
    tensors: tuple[StoredTensor, ...],
    model: nn.Module,
    want: Sequence[ExpectedTensor],
    strict: Strict,
) -> Match:
    """Find the values of a model in a checkpoint, or raise one ModelError with all that is wrong.

    A model with adapters of `peft` is matched by the names of its base model; adapters stay as they are.
    """
    base, in_files = _base_of(model)
    names = [in_files(name) for entry in want for name in entry.names]
    problems = Problems()
    tensors, quantised = find_quantised(tensors, names, problems)
    problems.raise_as(ModelError, f"weights of {path}")
    converted = convert(base, names, tensors)
    by_number = {n: quantised[t.name] for n, t in enumerate(tensors) if t.name in quantised}
    result = Match(str(path), tensors, conversions=converted.used, quantised=by_number)
    refused = {name for name, _ in converted.refused}
    for name, why in converted.refused:
        problems.add(name, "must be readable from the files", got=why)
    for entry in want:
        own = [in_files(name) for name in entry.names]
        layouts = [(name, converted.layouts[name]) for name in own if name in converted.layouts]
        if not layouts and not refused & set(own):
            result.missing.append(entry.name)
        places: list[tuple[Box, ...]] = []
        for name, layout in layouts:
            if layout.shape != entry.shape:
                must, got = f"must have shape {list(entry.shape)}", f"{list(layout.shape)} in the files"
                problems.add(name, must, got=got)
                continue
            places.append(layout.boxes())
            _check_dtypes(name, entry, places[-1], result, problems)
        if places:
            sources = tuple({tensors[box.number].dtype for box in places[0]}) or (entry.dtype,)
            exact = widest(sources) if sources[0].is_floating else sources[0]
            result.filled[entry.name] = TensorPlaces(places[0], exact, tuple(places[1:]))
    placed = set(names)
    result.unexpected = [*converted.unexpected, *(name for name in converted.layouts if name not in placed)]
    _check_names(model, result, strict, [*names, *(tensor.name for tensor in tensors)], problems)
    if problems:
        _explain(Path(path), problems)
    problems.raise_as(ModelError, f"weights of {path}")
    return result


def _base_of(model: Any) -> tuple[nn.Module, Callable[[str], str]]:
    """Return the base of a model, and the function from names in the model to names in files of the base."""
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return model, str
    adapters = "|".join(map(re.escape, model.peft_config))
    inside = re.compile(rf"\.(base_layer|original_module|modules_to_save\.({adapters}))\.")
    return model.get_base_model(), lambda name: inside.sub(".", name.removeprefix("base_model.model."))


def _check_dtypes(
    name: str, entry: ExpectedTensor, boxes: Sequence[Box], result: Match, problems: Problems
) -> None:
    """Report tensors whose dtype may not be converted to that of the model."""
    for stored in {box.number: result.tensors[box.number] for box in boxes}.values():
        must, got, do = "", f"{stored.dtype} of `{stored.name}`", ""
        if not entry.dtype.is_floating:
            if stored.dtype is not entry.dtype:
                must = f"must be {entry.dtype} in the files"
        elif not stored.dtype.is_floating or stored.dtype is DType.FP64:
            must = "must be in a floating dtype of at most 32 bits in the files"
            if stored.dtype is DType.FP64:
                do = "Its values would be rounded. To accept that, convert the file to fp32."
        elif entry.is_buffer and not entry.dtype.holds(stored.dtype):
            must = f"must be at most {entry.dtype} in the files, the dtype of the buffer"
            do = f"Give the buffer the dtype {stored.dtype}: its values would be rounded."
        if must:
            problems.add(name, must, got=got, do=do)


OUTSIDE_STATE = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
"""Ends of names of buffers that state dicts no longer hold -> a pattern of their names in old files."""


def _check_names(
    model: nn.Module, result: Match, strict: Strict, known: Sequence[str], problems: Problems
) -> None:
    """Report names that are missing or unexpected, unless the caller or the model itself allows them."""
    patterns: list[re.Pattern[str]] = []
    globs = [strict] if isinstance(strict, str) else [] if isinstance(strict, bool) else list(strict)
    for text in globs:
        patterns.append(re.compile(fnmatch.translate(text)))
        if not any(patterns[-1].match(name) for name in known):
            must = "must match a name in the model or in the files"
            problems.add("strict", must, got=repr(text), do=did_you_mean(text, known))

    def refused(names: Sequence[str], declared: Sequence[str]) -> list[str]:
        names = [] if strict is False else names
        names = [name for name in names if not any(pattern.match(name) for pattern in patterns)]
        return [name for name in names if not any(re.search(pattern, name) for pattern in declared)]

    # Patterns of a model of `transformers` for names that its checkpoints may lack, or may have in excess.
    may_lack = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    may_hold = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if hasattr(model, "peft_config"):
        may_lack.append(rf"\.{re.escape(str(getattr(model.base_model, 'prefix', 'lora_')))}")
    buffers = [name for name, _ in model.named_buffers()]
    may_hold += [p for end, p in OUTSIDE_STATE.items() if any(name.endswith(end) for name in buffers)]
    if lacking := refused(result.missing, may_lack):
        must = "must hold every parameter and buffer of the model"
        do = "If they are to start from the model's own values, allow it: `strict=[...]` with globs."
        problems.add(result.path, must, got=f"no {listed(lacking)}", do=do)
    if extra := refused(result.unexpected, may_hold):
        must = "must hold no tensor that the model does not have"
        do = "If they are to be left out, allow it: `strict=[...]` with globs."
        problems.add(result.path, must, got=listed(extra), do=do)
    result.unexpected = [name for name in result.unexpected if name not in extra]


def _explain(path: Path, problems: Problems) -> None:
    """Add a line if the checkpoint's config says that it is quantized."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    document = (read(file, Problems()) or {}) if file.is_file() else {}
    quantized = document.get("quantization_config")
    if isinstance(quantized, dict):
        do = "Dequantize it first, for example with `transformers`, and save it."
        got = repr(quantized.get("quant_method"))
        problems.add(str(file), "must be of a checkpoint that is not quantized", got=got, do=do)


def dtypes(result: Match) -> dict[str, DType]:
    """Return the dtype of each name in the files: narrow if its blocks are whole, else that of its values."""
    found = {}
    for name, filled in result.filled.items():
        sources = [result.quantised.get(box.number) for box in filled.boxes]
        narrow = {None if source is None else source.dtype for source in sources}
        (only,) = narrow if len(narrow) == 1 else (None,)
        found[name] = only if only is not None and has_whole_blocks(filled.boxes) else filled.exact
    return found
