"""The weight conversions of `transformers`, run on tensors that only remember where their elements come from.

Some architectures hold their weights in another form than their checkpoints do: experts stacked, gate and up
joined, names changed. `transformers` declares how, as patterns and operations on whole tensors. Here its own
functions choose names and run, in both directions, and what they are given are `SymbolicTensor`s: without
memory, each with a `Layout` that follows every view, stack, concatenation and transposition. What comes out
says which elements of which files a parameter is, so a slice of it can be read and written as one.

Invariant: an operation that does more than move elements is refused by name; nothing is approximated.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from zerodrift.dtypes import DType, from_torch, widest
from zerodrift.errors import UnsupportedError
from zerodrift.io.safetensors.boxes import Layout, NoStridesError, Shape, concatenate
from zerodrift.io.safetensors.files import SavedPart, SavedTensor
from zerodrift.model.header import Stored
from zerodrift.model.safetensors import natural
from zerodrift.versions import numbers


class SymbolicTensor(torch.Tensor):
    """A tensor of shape and dtype alone. A subclass, because operations ask what they are given."""

    elements: Layout

    @staticmethod
    def make(layout: Layout, dtype: torch.dtype) -> SymbolicTensor:
        plain = torch.empty(layout.shape, dtype=dtype, device="meta")
        tensor = torch.Tensor._make_subclass(SymbolicTensor, plain)
        tensor.elements = layout
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        move = _MOVES.get(name)
        if move is not None:
            return move(*args, **(kwargs or {}))
        if name in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NotTraceableError(f"`{name}`")


class NotTraceableError(Exception):
    """An operation that does more than move elements."""


_QUESTIONS = {"__get__", "__len__", "__repr__", "size", "dim", "ndimension", "numel", "stride"}
_QUESTIONS |= {"is_floating_point", "is_contiguous", "data_ptr"}
"""What may be asked of a tensor; `__get__` is every attribute: shape, dtype, device. One without memory is at
address 0, which is aligned to anything."""


def _like(tensor: SymbolicTensor, layout: Layout) -> SymbolicTensor:
    return SymbolicTensor.make(layout, tensor.dtype)


def _dim(tensor: SymbolicTensor, dim: int, more: int = 0) -> int:
    return dim % (len(tensor.elements.shape) + more)


def _unchanged(tensor: SymbolicTensor, *args: Any, **kwargs: Any) -> SymbolicTensor:
    return tensor


def _cast(
    tensor: SymbolicTensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
) -> SymbolicTensor:
    asked = dtype or next((arg for arg in args if isinstance(arg, torch.dtype)), tensor.dtype)
    if asked is not tensor.dtype:
        raise NotTraceableError(f"a cast to {asked}")
    return tensor


def _cat(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    return _like(tensors[0], concatenate([t.elements for t in tensors], _dim(tensors[0], dim)))


def _stack(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    place = _dim(tensors[0], dim, 1)
    return _like(tensors[0], concatenate([t.elements.unsqueeze(place) for t in tensors], place))


def _split(tensor: SymbolicTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[SymbolicTensor, ...]:
    place = _dim(tensor, dim)
    length = tensor.elements.shape[place]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    parts, start = [], 0
    for size in sizes:
        parts.append(_like(tensor, tensor.elements.narrow(place, start, size)))
        start += size
    return tuple(parts)


def _chunk(tensor: SymbolicTensor, chunks: int, dim: int = 0) -> tuple[SymbolicTensor, ...]:
    length = tensor.elements.shape[_dim(tensor, dim)]
    return _split(tensor, max(1, -(-length // chunks)), dim)


def _narrow(tensor: SymbolicTensor, dim: int, start: int, length: int) -> SymbolicTensor:
    return _like(tensor, tensor.elements.narrow(_dim(tensor, dim), start, length))


def _select(tensor: SymbolicTensor, dim: int, index: int) -> SymbolicTensor:
    return _squeeze(_narrow(tensor, dim, index % tensor.elements.shape[_dim(tensor, dim)], 1), dim)


def _unbind(tensor: SymbolicTensor, dim: int = 0) -> tuple[SymbolicTensor, ...]:
    return tuple(_select(tensor, dim, n) for n in range(tensor.elements.shape[_dim(tensor, dim)]))


def _transpose(tensor: SymbolicTensor, dim0: int, dim1: int) -> SymbolicTensor:
    dims = list(range(len(tensor.elements.shape)))
    a, b = _dim(tensor, dim0), _dim(tensor, dim1)
    dims[a], dims[b] = b, a
    return _like(tensor, tensor.elements.permute(dims))


def _permute(tensor: SymbolicTensor, *dims: Any) -> SymbolicTensor:
    asked = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return _like(tensor, tensor.elements.permute([_dim(tensor, dim) for dim in asked]))


def _t(tensor: SymbolicTensor) -> SymbolicTensor:
    return _transpose(tensor, 0, 1) if len(tensor.elements.shape) == 2 else tensor


def _reshape(tensor: SymbolicTensor, *shape: Any) -> SymbolicTensor:
    asked = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    with torch._C.DisableTorchFunctionSubclass():
        # What -1 stands for, and whether it fits, is torch's to say.
        full = tuple(torch.empty(tensor.elements.shape, device="meta").reshape(asked).shape)
    return _like(tensor, tensor.elements.reshape(full))


def _flatten(tensor: SymbolicTensor, start_dim: int = 0, end_dim: int = -1) -> SymbolicTensor:
    shape, first, last = tensor.elements.shape, _dim(tensor, start_dim), _dim(tensor, end_dim)
    return _reshape(tensor, [*shape[:first], -1, *shape[last + 1 :]])


def _squeeze(tensor: SymbolicTensor, dim: int | None = None) -> SymbolicTensor:
    shape = tensor.elements.shape
    gone = range(len(shape)) if dim is None else (_dim(tensor, dim),)
    kept = tuple(size for place, size in enumerate(shape) if place not in gone or size != 1)
    return _like(tensor, tensor.elements.reshape(kept))


def _unsqueeze(tensor: SymbolicTensor, dim: int) -> SymbolicTensor:
    return _like(tensor, tensor.elements.unsqueeze(_dim(tensor, dim, 1)))


def _getitem(tensor: SymbolicTensor, index: Any) -> SymbolicTensor:
    asked = index if isinstance(index, tuple) else (index,)
    dim = 0
    for part in asked:
        if part is Ellipsis:
            dim = len(tensor.elements.shape) - (len(asked) - asked.index(Ellipsis) - 1)
        elif isinstance(part, int):
            tensor = _select(tensor, dim, part)
        elif isinstance(part, slice) and part.step in (None, 1):
            start, stop, _ = part.indices(tensor.elements.shape[dim])
            tensor, dim = _narrow(tensor, dim, start, max(0, stop - start)), dim + 1
        else:
            raise NotTraceableError(f"an index {part!r}")
    return tensor


_MOVES: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "split": _split,
    "chunk": _chunk,
    "narrow": _narrow,
    "select": _select,
    "unbind": _unbind,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "permute": _permute,
    "t": _t,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "__getitem__": _getitem,
    "contiguous": _unchanged,
    "clone": _unchanged,
    "detach": _unchanged,
    "cpu": _unchanged,
    "to": _cast,
}
"""What moves elements and does nothing else, by its name in torch."""


# --- from names in files to names in the model ----------------------------------------------------------


@dataclass(slots=True)
class ModelTensors:
    """What the tensors of files are in the model."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    """Name in the model -> where its elements are; sources are numbered as the tensors were given."""
    unexpected: list[str] = field(default_factory=list)
    """Names in the files that the model has no place for."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """(name in the model, why it cannot be put together)."""
    used: list[Any] = field(default_factory=list)
    """The conversions that matched a name."""


def convert(model: nn.Module, names: Sequence[str], tensors: Sequence[Stored]) -> ModelTensors:
    """Which tensors make which of the model's `names`, as `from_pretrained` would have it."""
    names_of = _library(model)
    result = ModelTensors()
    known = dict.fromkeys(names, True)
    if names_of is None:
        for number, tensor in enumerate(tensors):
            if tensor.name in known:
                result.layouts[tensor.name] = Layout.of(number, tensor.shape)
            else:
                result.unexpected.append(tensor.name)
        return result
    names_of.run(known, tensors, result)
    return result


def _library(model: nn.Module) -> _Library | None:
    """The conversions of a model of `transformers` 5; None for any other module, and for version 4, which
    keeps one form."""
    loading = _loader() if hasattr(model, "base_model_prefix") and hasattr(model, "config") else None
    if loading is None:
        return None
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not isinstance(model, PreTrainedModel):
        return None
    return _Library(loading, model, get_model_conversion_mapping(model))


def _loader() -> Any:
    """The module of `transformers` that converts weights; None for version 4. Private names; tested with
    transformers 5.0 to 5.24."""
    try:
        import transformers
    except ImportError:
        return None
    if numbers(transformers.__version__) < (5,):
        return None
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        attrgetter(*_PRIVATE)(loading)
        attrgetter("get_model_conversion_mapping")(importlib.import_module("transformers.conversion_mapping"))
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"transformers {transformers.__version__}",
            "must have the functions by which weights of its models are converted",
            got=str(error),
            do="Install a version that docs/versions.md names.",
        ) from error
    return loading


_PRIVATE = (
    *("WeightConverter", "WeightRenaming", "dot_natural_key", "rename_source_key"),
    "revert_weight_conversion",
)


class _Library:
    """The steps of `transformers`' own loader, without its reading."""

    def __init__(self, loading: Any, model: Any, transforms: Sequence[Any]) -> None:
        self._loading, self._model, self._transforms = loading, model, transforms
        self._renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}

    def run(self, known: Mapping[str, bool], tensors: Sequence[Stored], result: ModelTensors) -> None:
        pending: dict[str, Any] = {}
        order = sorted(range(len(tensors)), key=lambda n: self._loading.dot_natural_key(tensors[n].name))
        for number in order:
            tensor = tensors[number]
            name, pattern = self._renamed(tensor.name, known)
            layout = Layout.of(number, tensor.shape)
            if name not in known:
                result.unexpected.append(tensor.name)
            elif pattern is None and name in result.layouts:
                result.refused.append((name, f"`{tensor.name}` is a second tensor for it"))
            elif pattern is None:
                result.layouts[name] = layout
            else:
                if name not in pending:
                    pending[name] = deepcopy(self._by_pattern[pattern])
                pending[name].add_tensor(
                    name, tensor.name, pattern, SymbolicTensor.make(layout, tensor.dtype.torch)
                )
        for name, converter in pending.items():
            self._converted(name, converter, result)
        names = [tensor.name for tensor in tensors]
        result.used = [transform for transform in self._transforms if _was_used(transform, names)]

    def _renamed(self, name: str, known: Mapping[str, bool]) -> tuple[str, str | None]:
        rename, prefix = self._loading.rename_source_key, self._model.base_model_prefix
        renamed, pattern = rename(name, self._renamings, self._converters, prefix, known)
        if renamed not in known and name in known:
            return rename(name, [], [], prefix, known)
        return renamed, pattern

    def _converted(self, name: str, converter: Any, result: ModelTensors) -> None:
        operations = ", ".join(type(operation).__name__ for operation in converter.operations)
        try:
            converted = converter.convert(name, model=self._model, config=self._model.config)
            if isinstance(converted, tuple):  # with what went wrong, which is None; transformers 5.0
                converted, _ = converted
            for target, value in converted.items():
                tensor = value[0] if isinstance(value, list) else value
                result.layouts[target] = tensor.elements
        except (NotTraceableError, NoStridesError) as error:
            why = f"{operations} of `transformers` is not a move of elements: {error}"
            result.refused.append((name, why))
        except Exception as error:  # whatever its code raises on tensors that do not fit
            text = " ".join(str(error).split())[:300]
            result.refused.append((name, f"{operations} of `transformers` failed: {text}"))


def _was_used(transform: Any, names: Sequence[str]) -> bool:
    """Whether a file had what it is for. Version 5.0 does not remember, and is asked for each name."""
    if hasattr(transform, "was_used"):
        return bool(transform.was_used())
    return any(transform.rename_source_key(name)[1] is not None for name in names)


# --- from names in the model to names in files ----------------------------------------------------------


def saved_form(
    model: nn.Module, shapes: Mapping[str, Shape], dtypes: Mapping[str, DType]
) -> tuple[SavedTensor, ...]:
    """The tensors that a checkpoint of `model` holds for parameters and buffers of these names, shapes and
    dtypes, in the form that `from_pretrained` reads; for any other module just those names. A tensor of
    several parameters has the widest of their dtypes."""
    revert = _revert(model)
    if revert is None:
        return tuple(SavedTensor.of(name, shape, dtypes[name]) for name, shape in shapes.items())
    names, where = list(shapes), type(model).__name__
    state = {
        name: SymbolicTensor.make(Layout.of(number, shapes[name]), dtypes[name].torch)
        for number, name in enumerate(names)
    }
    try:
        reverted = revert(model, dict(state))
    except (NotTraceableError, NoStridesError) as error:
        raise _refused(where, str(error)) from error
    saved = []
    for name, tensor in reverted.items():
        if not isinstance(tensor, SymbolicTensor):
            raise _refused(where, f"`{name}` is made of something else")
        parts = tuple(SavedPart(names[box.number], box.reversed()) for box in tensor.elements.boxes())
        saved.append(SavedTensor(name, tensor.elements.shape, _dtype(tensor, parts, dtypes), parts))
    _check(saved, shapes, where)
    # `transformers` sorts or does not, depending on where the model came from.
    order = {name: number for number, name in enumerate(names)}

    def place(tensor: SavedTensor) -> Any:
        last = order.get(tensor.name, len(order))  # of a tensor without elements
        return min((order[part.parameter] for part in tensor.parts), default=last), natural(tensor.name)

    return tuple(sorted(saved, key=place))


def _dtype(tensor: SymbolicTensor, parts: Sequence[SavedPart], dtypes: Mapping[str, DType]) -> DType:
    """That of its parameters; the widest where they differ, its own where it has no elements."""
    dtype_list = tuple(dict.fromkeys(dtypes[part.parameter] for part in parts))
    if len(dtype_list) > 1:
        return widest(dtype_list)
    return dtype_list[0] if dtype_list else from_torch(tensor.dtype) or DType.FP32


def _revert(model: nn.Module) -> Any:
    """The function of `transformers` that takes a state dict to the checkpoint's form, None where there is
    nothing of the kind."""
    loading = _loader() if hasattr(model, "save_pretrained") and hasattr(model, "config") else None
    return None if loading is None else loading.revert_weight_conversion


def _check(saved: Sequence[SavedTensor], shapes: Mapping[str, Shape], where: str) -> None:
    """That nothing was lost or doubled on the way. Counting is enough: a conversion that moves every element
    gives as many as there are, and one that does not, does not."""
    counted = dict.fromkeys(shapes, 0)
    for tensor in saved:
        for part in tensor.parts:
            counted[part.parameter] += part.box.numel
        if sum(part.box.numel for part in tensor.parts) != math.prod(tensor.shape):
            raise _refused(where, f"`{tensor.name}` is not filled")
    apart = [name for name, shape in shapes.items() if counted[name] != math.prod(shape)]
    if apart:
        raise _refused(where, f"`{apart[0]}` does not leave as it is")


def _refused(where: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        where,
        "must be stored in blocks of its parameters to be read and written in slices",
        got=f"a weight conversion of `transformers` that mixes elements ({why})",
        do="Save it with `save_pretrained` on one rank.",
    )
