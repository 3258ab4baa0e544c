"""Find and replace tensors inside containers of any depth and class, and record the inputs of a forward.

Tuples, lists, mappings, sets, dataclasses and plain objects are searched. Modules, classes and functions are
not, nor plain objects nested deeper than `DEPTH`.

Invariant: only a container that cannot be written to, such as a tuple, is built anew. In others tensors are
replaced, and `undo` puts the caller's tensors back, also where the model has moved their replacements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zerodrift.errors import ModelError

DEPTH = 3
"""Nesting of plain objects that is searched. Objects such as loggers and trainers refer to everything."""

_CLOSED = (
    *(str, bytes, bytearray, int, float, complex, type(None), type, nn.Module, enum.Enum),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor, each once."""
    if type(value) is torch.Tensor:
        return [value]
    found = []
    seen: dict[int, Any] = {}
    """id -> visited item, which is held so that its id is not used again."""
    queue = deque([(value, 0)])
    while queue:
        item, depth = queue.popleft()
        kind = type(item)
        if id(item) in seen or (kind is not torch.Tensor and isinstance(item, _CLOSED)):
            continue
        seen[id(item)] = item
        if kind is torch.Tensor or isinstance(item, torch.Tensor):  # the usual kind without a call
            found.append(item)
            continue
        if kind is tuple or kind is list or kind is dict:
            queue.extend([(child, depth) for child in (item.values() if kind is dict else item)])
            continue
        deeper = depth + _leads_anywhere(item)
        if deeper <= DEPTH:
            queue.extend((child, deeper) for _, child in _parts(item))
    return found


class Replacement:
    """Replaces the tensors of a caller's containers until `undo`."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._change = change
        self._seen: dict[int, tuple[Any, Any]] = {}
        """id of old -> (old, new), which are held so that no id is used again."""
        self._changed: list[Any] = []

    def apply(self, value: Any) -> Any:
        """Return the value with every tensor changed: the same object, if that can be written to."""
        return self._visit(value, 0)

    @property
    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor that was changed, with its replacement."""
        for old, new in self._seen.values():
            if isinstance(old, torch.Tensor) and new is not old:
                yield old, new

    def undo(self) -> None:
        """Put the caller's tensors back into every container."""
        own = {id(new): old for old, new in self._seen.values() if new is not old}
        for container in reversed(self._changed):
            for key, child in _parts(container):
                if id(child) in own:
                    _put(container, key, own[id(child)])
        self._changed.clear()

    def _visit(self, item: Any, depth: int) -> Any:
        if isinstance(item, _CLOSED):
            return item
        if id(item) in self._seen:
            return self._seen[id(item)][1]
        if isinstance(item, torch.Tensor):
            return self._keep(item, self._change(item))
        deeper = depth + _leads_anywhere(item)
        if deeper > DEPTH:
            return item
        self._keep(item, item)  # before its parts, because a part may refer to it
        parts = _parts(item)
        changed = [(key, self._visit(child, deeper)) for key, child in parts]
        if all(new is child for (_, new), (_, child) in zip(changed, parts, strict=True)):
            return item
        if isinstance(item, (tuple, frozenset, types.MappingProxyType)):
            return self._keep(item, _built(item, changed))
        self._changed.append(item)
        for (key, new), (_, child) in zip(changed, parts, strict=True):
            if new is not child:
                _put(item, key, new)
        return item

    def _keep(self, old: Any, new: Any) -> Any:
        self._seen[id(old)] = (old, new)
        return new


def _is_plain(item: Any) -> bool:
    return not isinstance(item, (tuple, list, deque, set, frozenset, Mapping))


def _leads_anywhere(item: Any) -> bool:
    """Return whether an item may refer to more than data. A dataclass declares its data."""
    return _is_plain(item) and not dataclasses.is_dataclass(item)


def _parts(item: Any) -> list[tuple[Any, Any]]:
    """Return (key, child) pairs; `_put` takes the key."""
    if isinstance(item, (tuple, list, deque)):
        return list(enumerate(item))
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, (set, frozenset)):
        return [(child, child) for child in item]
    held = dict(getattr(item, "__dict__", None) or {})
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):  # nothing was put there
                held[name] = object.__getattribute__(item, name)
    return list(held.items())


def _put(item: Any, key: Any, new: Any) -> None:
    try:
        if isinstance(item, set):
            item.remove(key)
            item.add(new)
        elif _is_plain(item):
            object.__setattr__(item, key, new)  # also in a frozen dataclass, until `undo`
        else:
            item[key] = new
    except (TypeError, AttributeError) as error:
        must = "must let its floating tensors be replaced by casts to the dtype that the model computes in"
        got = "one that cannot be written to"
        do = "Pass a dict, or tensors of that dtype."
        raise ModelError(type(item).__name__, must, got=got, do=do) from error


def _built(item: Any, parts: list[tuple[Any, Any]]) -> Any:
    if isinstance(item, types.MappingProxyType):
        return types.MappingProxyType(dict(parts))
    values = [child for _, child in parts]
    if isinstance(item, frozenset):
        return type(item)(values)
    try:
        built: Any = tuple.__new__(type(item), values)  # its class may take other arguments
    except TypeError:
        return type(item)(values)  # one of torch's return types
    if hasattr(item, "__dict__"):
        vars(built).update(vars(item))
    return built


# --- the inputs of a forward, and the state of autograd ---------------------------------------------------

BEFORE_ALL = -1
"""Lower than the sequence number of any autograd node."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The inputs of a forward, before it runs."""

    inputs: tuple[tuple[torch.Tensor, int], ...]
    """Each tensor with its version: an input that the module changes in place is one of its outputs."""
    newest: int
    """Highest sequence number of the nodes behind the inputs; the forward adds nodes with higher ones."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardInputs:
        given = (*args, *kwargs.values())
        inputs = [tensor for tensor in tensors_in(given) if not tensor.is_inference()]
        numbers = [_number(tensor) for tensor in inputs]
        return cls(tuple((tensor, tensor._version) for tensor in inputs), max(numbers, default=BEFORE_ALL))

    def changed(self) -> Iterator[torch.Tensor]:
        """Yield the inputs that were changed in place."""
        return (tensor for tensor, version in self.inputs if tensor._version != version)

    def made(self, tensor: torch.Tensor) -> bool:
        """Return whether the forward has added the node behind a tensor."""
        return _number(tensor) > self.newest

    def when_backward_ends(self, over: Callable[[], None], inside: bool) -> None:
        """Call `over` when a gradient is about to leave the newest input. autograd runs newer nodes first, so
        all nodes that the forward added have run by then.

        `inside` means a forward inside a backward, by reentrant checkpointing. Its inputs may be leaves,
        which are no older than the weights, so the end of that backward calls `over`. Elsewhere a leaf gets
        no hook, because it would keep the hook for ever.
        """
        for tensor, _ in self.inputs:
            if not tensor.requires_grad or _number(tensor) != self.newest:
                continue
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: over())
            elif inside:
                tensor.register_hook(lambda grad: at_the_end(over))
            return


def at_the_end(then: Callable[[], None]) -> None:
    """Call `then` when the running backward has run all its nodes."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


def _number(tensor: torch.Tensor) -> int:
    """Return the sequence number of the node behind a tensor. Private in torch (2.13 to 2.15)."""
    return BEFORE_ALL if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def current_backward() -> int:
    """Return the number of the backward that runs on this thread, or -1. Private in torch (2.13 to 2.15),
    which uses it for checkpointing."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether autograd runs a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Return whether the code runs inside `torch.func` or `torch.vmap`. Private in torch (2.13 to 2.15)."""
    return torch._C._functorch.peek_interpreter_stack() is not None
