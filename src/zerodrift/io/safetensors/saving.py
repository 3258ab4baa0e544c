"""Where a model's parameters lie in the tensors of its checkpoint.

`transformers` keeps some architectures in another layout in memory than in files: experts stacked into one
parameter, gate and up projections joined, names renamed. It declares how, as operations on whole tensors.
Here the same operations run on tensors without memory, and what comes out is arithmetic: which block of
which parameter is which elements of which tensor. Readers and writers use that with slices of any size.

Invariant: the blocks of a parameter cover each of its elements exactly once, and the blocks of a tensor each
of the tensor's.

[Note: tracing] A meta tensor has a shape, strides and an offset, and views of it share its storage. Under
`_Views` a copy is a view too, so that after chunks, splits, transpositions and `contiguous` a tensor still
says which elements of which parameter it is made of. A concatenation is a new tensor that remembers its
parts. What cannot be said with strides (interleaving) is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerodrift.errors import UnsupportedError
from zerodrift.model.safetensors import natural

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a parameter, and where it is in a tensor of the checkpoint."""

    parameter: str
    low: Shape
    """First index in each dimension of the parameter."""
    shape: Shape
    """Elements in each dimension of the parameter."""
    start: int
    """The element of the tensor, counted flat, where the block's first one is."""
    strides: Shape
    """Elements of the tensor from one index to the next, for each dimension of the parameter."""


@dataclass(frozen=True, slots=True)
class Laid:
    """One tensor of the checkpoint, as blocks of parameters."""

    name: str
    shape: Shape
    blocks: tuple[Block, ...]


def strides_of(shape: Iterable[int]) -> Shape:
    """Row-major strides, in elements."""
    found: list[int] = []
    count = 1
    for size in reversed(tuple(shape)):
        found.append(count)
        count *= size
    return tuple(reversed(found))


def plain(name: str, shape: Shape, parameter: str | None = None) -> Laid:
    """A tensor that is one parameter as it is."""
    block = Block(parameter or name, (0,) * len(shape), shape, 0, strides_of(shape))
    return Laid(name, shape, (block,))


def layout(model: nn.Module, shapes: Mapping[str, Shape]) -> tuple[Laid, ...]:
    """The tensors that a checkpoint of `model` holds for parameters and buffers of these names and shapes, in
    the layout that `from_pretrained` reads; for any other module just those names."""
    revert = _revert(model)
    if revert is None:
        return tuple(plain(name, shape) for name, shape in shapes.items())
    with _Views() as views:
        state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        sources = {_key(tensor): name for name, tensor in state.items()}
        try:
            found = revert(model, dict(state))
        except _CannotTraceError:
            raise _refused(type(model).__name__) from None
        laid = []
        for name, tensor in found.items():
            blocks = tuple(_blocks(tensor, sources, shapes, views, type(model).__name__))
            laid.append(Laid(name, tuple(tensor.shape), blocks))
    _check(laid, shapes, type(model).__name__)
    # `transformers` sorts or does not, depending on where the model came from.
    order = {name: number for number, name in enumerate(shapes)}
    laid.sort(key=lambda tensor: (min(order[b.parameter] for b in tensor.blocks), natural(tensor.name)))
    return tuple(laid)


def _revert(model: nn.Module) -> Any:
    """The function of `transformers` that takes a state dict to the checkpoint's layout, None where there is
    nothing of the kind. It has no public name; tested with transformers 5.23."""
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 keeps one layout
        return None
    return revert_weight_conversion


# --- tracing ------------------------------------------------------------------------------------------


class _Views(TorchDispatchMode):
    """See [Note: tracing]. A mode is torch's way to see operations, and torch's modes are classes."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        """Storage of a concatenation -> it, and (its part, what the part was) for each."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return aten.alias.default(args[0])
        if func is aten._unsafe_view.default:
            # What follows a copy that made strides plain, which here was none.
            raise _CannotTraceError
        out = func(*args, **(kwargs or {}))
        if func in (aten.cat.default, aten.stack.default):
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            if func is aten.stack.default:
                parts = list(out.unbind(dim))
            else:
                parts = list(out.split([tensor.shape[dim] for tensor in args[0]], dim))
            self.joined[_key(out)] = (out, list(zip(parts, args[0], strict=True)))
        return out


class _CannotTraceError(Exception):
    """An operation that is no matter of strides."""


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _blocks(
    tensor: torch.Tensor, sources: Mapping[int, str], shapes: Mapping[str, Shape], views: _Views, where: str
) -> Iterator[Block]:
    """What `tensor` is made of, by the storage that it is a view of."""
    name = sources.get(_key(tensor))
    if name is not None:
        yield _block(name, shapes[name], tensor, 0, strides_of(tensor.shape), where)
        return
    whole, parts = views.joined.get(_key(tensor), (None, []))
    if whole is None or tensor.shape != whole.shape or tensor.stride() != whole.stride():
        raise _refused(where)
    for part, source in parts:
        name = sources.get(_key(source))
        if name is None:
            raise _refused(where)
        yield _block(name, shapes[name], source, int(part.storage_offset()), part.stride(), where)


def _block(
    name: str, shape: Shape, view: torch.Tensor, start: int, strides: Iterable[int], where: str
) -> Block:
    """The block that a view of a parameter is; `start` and `strides` say where it is in the tensor."""
    own = strides_of(shape)
    offset = view.storage_offset()
    low = tuple(offset // stride % size if size else 0 for stride, size in zip(own, shape, strict=True))
    lengths, steps = [1] * len(shape), [0] * len(shape)
    for size, stride, step in zip(view.shape, view.stride(), strides, strict=True):
        if size == 1:
            continue
        dim = next((d for d in range(len(shape)) if own[d] == stride and shape[d] > 1), None)
        if dim is None or lengths[dim] != 1 or low[dim] + size > shape[dim]:
            if math.prod(shape) == 0:
                continue
            raise _refused(where)
        lengths[dim], steps[dim] = size, step
    if math.prod(shape) == 0:
        return Block(name, (0,) * len(shape), shape, start, strides_of(shape))
    return Block(name, low, tuple(lengths), start, tuple(steps))


def _check(laid: list[Laid], shapes: Mapping[str, Shape], where: str) -> None:
    """That nothing was lost or doubled on the way. Counting is enough: a conversion that moves every element
    gives as many blocks' elements as there are, and one that does not, does not."""
    counted = dict.fromkeys(shapes, 0)
    for tensor in laid:
        numbers = [math.prod(block.shape) for block in tensor.blocks]
        if sum(numbers) != math.prod(tensor.shape):
            raise _refused(where)
        for block, number in zip(tensor.blocks, numbers, strict=True):
            counted[block.parameter] += number
    if any(counted[name] != math.prod(shape) for name, shape in shapes.items()):
        raise _refused(where)


def _refused(where: str) -> UnsupportedError:
    return UnsupportedError(
        f"`{where}`: must be stored in blocks of its parameters to be read and written in slices; got a "
        f"weight conversion of `transformers` that mixes elements. Save it with `save_pretrained` on one "
        "rank."
    )
