"""Run the weight conversions of `transformers` on symbolic tensors, which record where elements come from.

Some architectures hold their weights in another form than their checkpoints: experts are stacked, gate and up
projections joined, names changed. `transformers`' own functions run here on `SymbolicTensor`s, in both
directions, so that a slice of a parameter can be read or written alone.

Invariant: an operation that does more than move elements is refused by name.
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
from zerodrift.model import StoredTensor, natural
from zerodrift.versions import numbers
from zerodrift.weights.boxes import Layout, NotAMoveError, Shape, concatenate
from zerodrift.weights.writer import SavedPart, SavedTensor


class SymbolicTensor(torch.Tensor):
    """A tensor with a shape, a dtype and a layout. torch decomposes calls into operations of `_MOVES`."""

    elements: Layout
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(layout: Layout, dtype: torch.dtype) -> SymbolicTensor:
        plain = torch.empty(layout.shape, dtype=dtype, device="meta")
        tensor = torch.Tensor._make_subclass(SymbolicTensor, plain)
        tensor.elements = layout
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in _MOVES:
            raise NotAMoveError(f"`{name}`")
        first = args[0] if isinstance(args[0], SymbolicTensor) else args[0][0]
        moved = _MOVES[name](*args, **(kwargs or {}))
        if isinstance(moved, Layout):
            return SymbolicTensor.make(moved, first.dtype)
        return tuple(SymbolicTensor.make(layout, first.dtype) for layout in moved)


def _stack(tensors: Sequence[SymbolicTensor], dim: int = 0) -> Layout:
    place = dim % (tensors[0].dim() + 1)
    return concatenate([t.elements.unsqueeze(place) for t in tensors], place)


def _split(tensor: SymbolicTensor, sizes: int | Sequence[int], dim: int = 0) -> list[Layout]:
    dim %= tensor.dim()
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    return [tensor.elements.narrow(dim, sum(sizes[:n]), size) for n, size in enumerate(sizes)]


def _slice(
    tensor: SymbolicTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Layout:
    if step != 1:
        raise NotAMoveError(f"a step of {step}")
    dim %= tensor.dim()
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    return tensor.elements.narrow(dim, first, max(0, last - first))


def _select(tensor: SymbolicTensor, dim: int, index: int) -> Layout:
    dim %= tensor.dim()
    shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
    return tensor.elements.narrow(dim, index % tensor.shape[dim], 1).reshape(shape)


def _transpose(tensor: SymbolicTensor, dim0: int = 0, dim1: int = 1) -> Layout:
    dims = list(range(tensor.dim()))
    if dims:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return tensor.elements.permute(dims)


def _view(tensor: SymbolicTensor, shape: Sequence[int]) -> Layout:
    rest = -math.prod(shape)
    sizes = tuple(tensor.numel() // rest if size == -1 else size for size in shape)
    return tensor.elements.reshape(sizes)


def _squeeze(tensor: SymbolicTensor, dims: int | Sequence[int] | None = None) -> Layout:
    every = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % tensor.dim() for dim in every}
    shape = tuple(n for dim, n in enumerate(tensor.shape) if dim not in gone or n != 1)
    return tensor.elements.reshape(shape)


def _copy(tensor: SymbolicTensor, dtype: torch.dtype | None = None, **_: Any) -> Layout:
    if dtype not in (None, tensor.dtype):
        raise NotAMoveError(f"a cast to {dtype}")
    return tensor.elements


_MOVES: dict[str, Callable[..., Layout | list[Layout]]] = {
    "cat": lambda ts, dim=0: concatenate([t.elements for t in ts], dim % ts[0].dim()),
    "permute": lambda t, dims: t.elements.permute([dim % t.dim() for dim in dims]),
    "unsqueeze": lambda t, dim: t.elements.unsqueeze(dim % (t.dim() + 1)),
    "unbind": lambda t, dim=0: [_select(t, dim, index) for index in range(t.shape[dim])],
}
_MOVES |= {f.__name__[1:]: f for f in (_stack, _split, _slice, _select, _transpose, _view, _squeeze)}
_MOVES |= {"t": _transpose, "split_with_sizes": _split, "_unsafe_view": _view}
_MOVES |= dict.fromkeys(("clone", "detach", "alias", "_to_copy"), _copy)
"""Operations of torch that only move elements."""


# --- from names in files to names in the model ------------------------------------------------------------


@dataclass(slots=True)
class ModelTensors:
    """Layouts of the model's parameters over the tensors of files, which are numbered in the given order."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    """Names in the files that the model has no place for."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """(name in the model, reason why it cannot be assembled)."""
    used: list[Any] = field(default_factory=list)
    """Conversions of `transformers` that matched a name."""


def convert(model: nn.Module, names: Sequence[str], tensors: Sequence[StoredTensor]) -> ModelTensors:
    """Find the tensors that each of the model's `names` is made of, as `from_pretrained` would."""
    known, result = dict.fromkeys(names, True), ModelTensors()
    loading = _loader() if hasattr(model, "base_model_prefix") and hasattr(model, "config") else None
    if loading is not None:
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel):
            _convert_with(loading, model, known, tensors, result)
            return result
    for number, tensor in enumerate(tensors):
        if tensor.name in known:
            result.layouts[tensor.name] = Layout.of(number, tensor.shape)
        else:
            result.unexpected.append(tensor.name)
    return result


_PRIVATE = (
    *("WeightConverter", "WeightRenaming", "dot_natural_key", "rename_source_key"),
    "revert_weight_conversion",
)


def _loader() -> Any:
    """Return the module of `transformers` 5 that converts weights; None for version 4, which converts none.

    Private names; tested with transformers 5.0 to 5.24.
    """
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
        where = f"transformers {transformers.__version__}"
        must = "must have the functions by which weights of its models are converted"
        do = "Install a version that docs/support.md names."
        raise UnsupportedError(where, must, got=str(error), do=do) from error
    return loading


def _convert_with(
    loading: Any, model: Any, known: Mapping[str, bool], tensors: Sequence[StoredTensor], result: ModelTensors
) -> None:
    """Take the steps of `transformers`' own loader, without reading tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    rename, prefix = loading.rename_source_key, model.base_model_prefix
    pending: dict[str, Any] = {}
    for number in sorted(range(len(tensors)), key=lambda n: loading.dot_natural_key(tensors[n].name)):
        tensor = tensors[number]
        name, pattern = rename(tensor.name, renamings, converters, prefix, known)
        if name not in known and tensor.name in known:
            name, pattern = rename(tensor.name, [], [], prefix, known)
        layout = Layout.of(number, tensor.shape)
        if name not in known:
            result.unexpected.append(tensor.name)
        elif pattern is None and name in result.layouts:
            result.refused.append((name, f"`{tensor.name}` is a second tensor for it"))
        elif pattern is None:
            result.layouts[name] = layout
        else:
            if name not in pending:
                pending[name] = deepcopy(by_pattern[pattern])
            symbolic = SymbolicTensor.make(layout, tensor.dtype.torch)
            pending[name].add_tensor(name, tensor.name, pattern, symbolic)
    for name, converter in pending.items():
        operations = ", ".join(type(operation).__name__ for operation in converter.operations)
        try:
            converted = converter.convert(name, model=model, config=model.config)
            if isinstance(converted, tuple):  # transformers 5.0 adds the errors, None here
                converted, _ = converted
            for target, value in converted.items():
                result.layouts[target] = (value[0] if isinstance(value, list) else value).elements
        except NotAMoveError as error:
            why = f"{operations} of `transformers` is not a move of elements: {error}"
            result.refused.append((name, why))
        except Exception as error:  # `transformers` raises any class for tensors that do not fit
            text = " ".join(str(error).split())[:300]
            result.refused.append((name, f"{operations} of `transformers` failed: {text}"))
    names = [tensor.name for tensor in tensors]
    result.used = [transform for transform in transforms if _was_used(transform, names)]


def _was_used(transform: Any, names: Sequence[str]) -> bool:
    """Return whether a conversion matched a name. Version 5.0 does not record it, so it is computed again."""
    if hasattr(transform, "was_used"):
        return bool(transform.was_used())
    return any(transform.rename_source_key(name)[1] is not None for name in names)


# --- from names in the model to names in files ------------------------------------------------------------


def saved_form(
    model: nn.Module, shapes: Mapping[str, Shape], dtypes: Mapping[str, DType]
) -> tuple[SavedTensor, ...]:
    """Return the tensors of a checkpoint of `model`, in the form that `from_pretrained` reads.

    Only models of `transformers` have another form than their parameters.

    A tensor of several parameters has the widest of their dtypes.
    """
    loading = _loader() if hasattr(model, "save_pretrained") and hasattr(model, "config") else None
    if loading is None:
        return tuple(SavedTensor.of(name, shape, dtypes[name]) for name, shape in shapes.items())
    names, where = list(shapes), type(model).__name__
    state = {
        name: SymbolicTensor.make(Layout.of(number, shapes[name]), dtypes[name].torch)
        for number, name in enumerate(names)
    }
    try:
        reverted = loading.revert_weight_conversion(model, dict(state))
    except NotAMoveError as error:
        raise _refused(where, str(error)) from error
    saved = []
    for name, tensor in reverted.items():
        if not isinstance(tensor, SymbolicTensor):
            raise _refused(where, f"`{name}` is made of something else")
        parts = tuple(SavedPart(names[box.number], box.reversed()) for box in tensor.elements.boxes())
        kinds = tuple(dict.fromkeys(dtypes[part.parameter] for part in parts))
        dtype = widest(kinds) if len(kinds) > 1 else (*kinds, from_torch(tensor.dtype) or DType.FP32)[0]
        saved.append(SavedTensor(name, tensor.elements.shape, dtype, parts))
    _check_complete(saved, shapes, where)
    # `transformers` sorts the names only of some models.
    order = {name: number for number, name in enumerate(names)}

    def place(tensor: SavedTensor) -> Any:
        last = order.get(tensor.name, len(order))  # a tensor without elements has no parts
        return min((order[part.parameter] for part in tensor.parts), default=last), natural(tensor.name)

    return tuple(sorted(saved, key=place))


def _check_complete(saved: Sequence[SavedTensor], shapes: Mapping[str, Shape], where: str) -> None:
    """Raise if an element was lost or doubled. Counting is enough for operations that only move elements."""
    counted = dict.fromkeys(shapes, 0)
    for tensor in saved:
        for part in tensor.parts:
            counted[part.parameter] += part.box.numel
        if sum(part.box.numel for part in tensor.parts) != tensor.numel:
            raise _refused(where, f"`{tensor.name}` is not filled")
    for name, shape in shapes.items():
        if counted[name] != math.prod(shape):
            raise _refused(where, f"elements of `{name}` are lost or doubled")


def _refused(where: str, why: str) -> UnsupportedError:
    must = "must be stored in blocks of its parameters to be read and written in slices"
    got = f"a weight conversion of `transformers` that mixes elements ({why})"
    return UnsupportedError(where, must, got=got, do="Save it with `save_pretrained` on one rank.")
