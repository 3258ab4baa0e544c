"""Tensors inside of what people hand to a model and get from it: containers of any depth and class.

Tuples, lists, mappings, sets, dataclasses and plain objects are looked into; modules, classes and functions
are not, and objects that hang in objects no deeper than `DEPTH`.

Invariant: what can be written to keeps its identity. A tensor in it is replaced in its place, and `undo` puts
the caller's own back, wherever it has been moved to meanwhile; only what cannot change, such as a tuple, is
built anew.
"""

from __future__ import annotations

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
"""Plain objects are followed into plain objects so many times: a logger or a trainer leads everywhere."""

_CLOSED = (
    *(str, bytes, bytearray, int, float, complex, type(None), type, nn.Module, enum.Enum),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)
"""What holds no tensors of a caller's."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor, each once."""
    if type(value) is torch.Tensor:
        return [value]
    found = []
    seen: dict[int, Any] = {}
    """By id; held, so that no id comes again."""
    queue = deque([(value, 0)])
    while queue:
        item, depth = queue.popleft()
        kind = type(item)
        if id(item) in seen or (kind is not torch.Tensor and isinstance(item, _CLOSED)):
            continue
        seen[id(item)] = item
        if kind is torch.Tensor or isinstance(item, torch.Tensor):  # what is most often there, in few calls
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
    """Tensors that stand in for a caller's own, until `undo`."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._change = change
        self._seen: dict[int, tuple[Any, Any]] = {}
        """id -> what was there and what has come for it, which are held so that no id comes again."""
        self._changed: list[Any] = []
        """Containers in which something stands in."""

    def apply(self, value: Any) -> Any:
        """The value with every tensor changed; the same object where it can be written to, or nothing was."""
        return self._visit(value, 0)

    @property
    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor that was changed, and what stands in for it."""
        for old, new in self._seen.values():
            if isinstance(old, torch.Tensor) and new is not old:
                yield old, new

    def undo(self) -> None:
        """Give every container its own tensors back."""
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
        self._keep(item, item)  # before its parts, which may hold it
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
    """Whether it is an object of a class of its own, with attributes."""
    return not isinstance(item, (tuple, list, deque, set, frozenset, Mapping))


def _leads_anywhere(item: Any) -> bool:
    """Whether it may hold more than data: a dataclass says what it holds."""
    return _is_plain(item) and not dataclasses.is_dataclass(item)


def _parts(item: Any) -> list[tuple[Any, Any]]:
    """(key, what is there): the key is what `_put` takes."""
    if isinstance(item, (tuple, list, deque)):
        return list(enumerate(item))
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, (set, frozenset)):
        return [(child, child) for child in item]
    names = dict.fromkeys(getattr(item, "__dict__", None) or ())
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names.update(dict.fromkeys([slots] if isinstance(slots, str) else slots))
    return [(name, object.__getattribute__(item, name)) for name in names if _has(item, name)]


def _has(item: Any, name: str) -> bool:
    try:
        object.__getattribute__(item, name)
    except AttributeError:
        return False
    return True


def _put(item: Any, key: Any, new: Any) -> None:
    try:
        if isinstance(item, set):
            item.remove(key)
            item.add(new)
        elif _is_plain(item):
            object.__setattr__(item, key, new)  # a frozen dataclass is put back as it was
        else:
            item[key] = new
    except (TypeError, AttributeError) as error:
        raise ModelError(
            type(item).__name__,
            "must let its floating tensors be replaced, which are cast to what the model computes in",
            got="one that cannot be written to",
            do="Pass a dict, or tensors of that dtype.",
        ) from error


def _built(item: Any, parts: list[tuple[Any, Any]]) -> Any:
    if isinstance(item, types.MappingProxyType):
        return types.MappingProxyType(dict(parts))
    values = [child for _, child in parts]
    if isinstance(item, frozenset):
        return type(item)(values)
    try:
        built: Any = tuple.__new__(type(item), values)  # whatever its own class asks for
    except TypeError:
        return type(item)(values)  # one of torch's
    if hasattr(item, "__dict__"):
        vars(built).update(vars(item))
    return built
