"""What is inside what: modules and parameters under the paths that their author gave them, through every
wrapper around them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_WRAPPED = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_forward_module",
}
"""Class -> the child that it stands around, whose name says nothing."""


def _classes(module: torch.nn.Module) -> tuple[str, ...]:
    kind: Any = type(module)
    return _bases(kind)


@functools.lru_cache(maxsize=1 << 12)
def _bases(kind: type) -> tuple[str, ...]:
    return tuple(base.__name__ for base in kind.__mro__)


def is_compiled(module: torch.nn.Module) -> bool:
    called = module.__dict__.get("_compiled_call_impl")
    return called is not None or "OptimizedModule" in _classes(module)


def all_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """What `root.modules()` has, in an order of its own: this is asked before every forward."""
    found, waiting, visited = [], [root], {id(root)}
    while waiting:
        module = waiting.pop()
        found.append(module)
        for child in module._modules.values():
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                waiting.append(child)
    return found


def identities(root: torch.nn.Module) -> list[int]:
    """Of every parameter and of where it is: others if a name may be another's."""
    found = []
    for module in all_modules(root):
        found.append(id(module))
        found += map(id, module._parameters.values())
    return found


def class_of(module: torch.nn.Module) -> type:
    """The class that the author wrote: `fully_shard` makes one of its own of it."""
    kinds = type(module).__mro__
    if "FSDPModule" in _classes(module):
        kinds = tuple(kind for kind in kinds[1:] if kind.__name__ != "FSDPModule")
    return kinds[0]


def inside(module: torch.nn.Module) -> torch.nn.Module | None:
    """What a wrapper stands around."""
    for kind in _classes(module):
        child = module._modules.get(_WRAPPED.get(kind, ""))
        if child is not None:
            return child
    return None


def modules_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module, under its author's path."""
    waiting, visited = [("", root)], set()
    while waiting:
        path, module = waiting.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        yield path, module
        inner = inside(module)
        children = []
        for name, child in module._modules.items():
            if child is not None:
                children.append((path if child is inner else f"{path}.{name}" if path else name, child))
        waiting += reversed(children)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A parameter where a module has it, or where FSDP took it from."""

    path: str
    module: torch.nn.Module
    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    packed: bool = False
    """Whether the tensor has other parameters too."""
    sliced: bool = False
    """Whether each rank has a slice of it."""


def leaves_of(root: torch.nn.Module) -> Iterator[_Leaf]:
    modules = list(modules_of(root))
    paths = {id(module): path for path, module in modules}
    flats = [handle.flat_param for _, m in modules if (handle := m.__dict__.get("_handle")) is not None]
    shapes = {
        id(tensor): tuple(shape)
        for flat in flats
        for tensor, shape in zip(getattr(flat, "_params", None) or (), flat._shapes, strict=False)
    }
    for path, module in modules:
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            if not hasattr(tensor, "_param_infos"):
                shape = shapes.get(id(tensor)) or tuple(getattr(tensor, "ds_shape", tensor.shape))
                sliced = id(tensor) in shapes or hasattr(tensor, "ds_tensor")
                yield _Leaf(path, module, name, tensor, shape, sliced=sliced)
                continue
            flat: Any = tensor
            for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
                inside = paths.get(id(info.module), path)
                yield _Leaf(
                    inside, info.module, info.param_name, tensor, tuple(shape), packed=True, sliced=True
                )


def buffers_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in modules_of(root):
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                yield (f"{path}.{leaf}" if path else leaf), buffer
