"""The models of a watched run: modules and parameters by the paths that their author gave them.

Every wrapper around a model, and every pack of parameters, is looked through.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from zerodrift.inspect.trace.parameter import LiveParameter, Owners, local, read
from zerodrift.inspect.trace.records import ModelRecord, ParameterRecord, dtype_name

_WRAPPED = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_forward_module",
}
"""Class of a wrapper -> its child, whose name is no part of a path."""


@functools.lru_cache(maxsize=1 << 12)
def _bases(kind: Any) -> tuple[str, ...]:
    return tuple(base.__name__ for base in kind.__mro__)


def is_compiled(module: torch.nn.Module) -> bool:
    kind: Any = type(module)
    return module.__dict__.get("_compiled_call_impl") is not None or "OptimizedModule" in _bases(kind)


def _all_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of `root.modules()` in any order: this runs before every forward."""
    found, waiting, visited = [], [root], {id(root)}
    while waiting:
        module = waiting.pop()
        found.append(module)
        for child in module._modules.values():
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                waiting.append(child)
    return found


def _identities(root: torch.nn.Module) -> list[int]:
    """Return the ids of modules and parameters, which change if a name may be another tensor's."""
    return [id(one) for module in _all_modules(root) for one in (module, *module._parameters.values())]


def _class_of(module: torch.nn.Module) -> type:
    """Return the class that the author wrote: `fully_shard` derives one of its own."""
    kinds: Any = type(module).__mro__
    if "FSDPModule" in _bases(kinds[0]):
        kinds = [kind for kind in kinds[1:] if kind.__name__ != "FSDPModule"]
    return kinds[0]


def _inside(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that a wrapper holds; None if it is no wrapper."""
    kind: Any = type(module)
    children = (module._modules.get(_WRAPPED.get(name, "")) for name in _bases(kind))
    return next((child for child in children if child is not None), None)


def _modules_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module with its author's path."""
    waiting, visited = [("", root)], set()
    while waiting:
        path, module = waiting.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        yield path, module
        inner = _inside(module)
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        waiting += [
            (path if child is inner else _join(path, name), child) for name, child in reversed(children)
        ]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class _Leaf(NamedTuple):
    """A parameter in its module, or in the pack that FSDP took it into."""

    path: str
    module: torch.nn.Module
    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    is_sliced: bool
    """Whether each rank has a slice of it."""
    is_packed: bool = False
    """Whether the tensor has other parameters too."""


def _leaves_of(root: torch.nn.Module) -> Iterator[_Leaf]:
    modules = list(_modules_of(root))
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
            pack: Any = tensor
            if not hasattr(tensor, "_param_infos"):
                shape = shapes.get(id(tensor)) or tuple(getattr(tensor, "ds_shape", tensor.shape))
                is_sliced = id(tensor) in shapes or hasattr(tensor, "ds_tensor")
                yield _Leaf(path, module, name, tensor, shape, is_sliced)
                continue
            for info, shape in zip(pack._param_infos, pack._shapes, strict=True):
                home = paths.get(id(info.module), path)
                yield _Leaf(home, info.module, info.param_name, tensor, tuple(shape), True, is_packed=True)


class LiveModel:
    """A module whose forward was called, and its parameters under their author's names."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self.parameters: list[LiveParameter] = []
        self._paths: dict[int, str] = {}
        self._leaves: dict[int, list[tuple[str, LiveParameter]]] = {}
        self._by_tensor: dict[int, LiveParameter] = {}
        self._copies: dict[int, tuple[Any, LiveParameter | None]] = {}
        self._scanned: list[int] = []
        self._scan({})

    def path(self, module: torch.nn.Module) -> str | None:
        """Return a module's path; None if it is not in the model."""
        return self._paths.get(id(module))

    def _wrapping(self) -> list[torch.nn.Module]:
        """Return the wrappers, outermost first, and the model in them."""
        chain = [self.root]
        while (child := _inside(chain[-1])) is not None:
            chain.append(child)
        return chain

    @property
    def wrappers(self) -> tuple[str, ...]:
        """Classes around the model, outermost first."""
        return tuple(type(module).__name__ for module in self._wrapping()[:-1])

    @property
    def is_compiled(self) -> bool:
        return any(map(is_compiled, _all_modules(self.root)))

    def become(self, larger: LiveModel) -> None:
        """Rename everything from a module around the model."""
        self.root = larger.root
        self._scan(self._by_tensor)

    def leaf(self, module: torch.nn.Module, name: str) -> LiveParameter | None:
        return next((p for leaf, p in self._leaves.get(id(module), ()) if leaf == name), None)

    def resting(self, tensor: torch.Tensor) -> LiveParameter | None:
        parameter = self._by_tensor.get(id(tensor))
        return parameter if parameter is not None and parameter.tensor() is tensor else None

    def copied(self, tensor: torch.Tensor) -> LiveParameter | None:
        """Return the parameter that this tensor is a wider copy of, by its values."""
        known = self._copies.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        copies = [p for p in self.parameters if _is_copy(tensor, p.tensor())]
        parameter = copies[0] if len(copies) == 1 else None
        self._copies[id(tensor)] = (weakref.ref(tensor), parameter)
        return parameter

    def look(self) -> bool:
        """Record what rests between steps; return True if a name or a dtype changed."""
        changed = _identities(self.root) != self._scanned
        if changed:
            self._scan(self._by_tensor)
        for parameter in self.parameters:
            changed |= parameter.look()
        return changed

    def remember(self, memory: Owners[LiveParameter]) -> None:
        for parameter in self.parameters:
            tensor = parameter.tensor()
            if tensor is not None and local(tensor).numel():
                memory.put(tensor, parameter)

    def held(self, module: torch.nn.Module) -> Iterator[tuple[LiveParameter, torch.Tensor]]:
        """Yield the tensors that a module's forward computes with, which a library may have replaced."""
        for leaf, parameter in self._leaves.get(id(module), ()):
            tensor = _attribute(module, leaf)
            if isinstance(tensor, torch.Tensor) and local(tensor).numel():
                yield parameter, tensor

    def has_others(self, module: torch.nn.Module) -> bool:
        """Return True if its forward had other tensors than the one before."""
        leaves = self._leaves.get(id(module), ())
        return any(parameter.computed_with() is not _attribute(module, leaf) for leaf, parameter in leaves)

    def stepped(self, since: bool) -> None:
        read([parameter.samples for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.stepped(since)

    def record(self, world: int) -> ModelRecord:
        inner = self._wrapping()[-1]
        ties = getattr(getattr(inner, "config", None), "tie_word_embeddings", None)
        buffers = {
            _join(path, leaf): dtype_name(buffer.dtype)
            for path, module in _modules_of(self.root)
            for leaf, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point() and buffer.numel() > 0
        }
        return ModelRecord(
            name=_class_of(inner).__name__,
            parameters=[parameter.end(world) for parameter in self.parameters],
            buffers=buffers,
            trained=any(parameter.optimized for parameter in self.parameters),
            wrappers=self.wrappers,
            ties=ties if isinstance(ties, bool) else None,
        )

    def _scan(self, known: dict[int, LiveParameter]) -> None:
        """Name everything; keep the records of tensors and of names that are still there."""
        names = {parameter.record.name: parameter for parameter in self.parameters}
        self.parameters, self._leaves, self._by_tensor = [], {}, {}
        self._paths = {id(module): path for path, module in _modules_of(self.root)}
        for leaf in _leaves_of(self.root):
            tensor, name = leaf.tensor, _join(leaf.path, leaf.name)
            parameter = None if leaf.is_packed else self._by_tensor.get(id(tensor))
            if parameter is not None:
                if name != parameter.record.name and name not in parameter.record.also:
                    parameter.record.also += (name,)
            else:
                parameter = (None if leaf.is_packed else known.get(id(tensor))) or names.get(name)
                if parameter is None:
                    kind = _class_of(leaf.module)
                    dotted = f"{kind.__module__}.{kind.__qualname__}"
                    record = ParameterRecord(name, leaf.shape, dotted, tensor.requires_grad)
                    parameter = LiveParameter(record, tensor)
                parameter.record.name = name
                parameter.record.trained |= tensor.requires_grad
                parameter.is_sliced = leaf.is_sliced
                parameter.rests_in(tensor)
                if not leaf.is_packed:
                    self._by_tensor[id(tensor)] = parameter
                self.parameters.append(parameter)
            self._leaves.setdefault(id(leaf.module), []).append((leaf.name, parameter))
        self._scanned = _identities(self.root)


def _attribute(module: torch.nn.Module, name: str) -> Any:
    """Return the tensor that a forward finds under a parameter's name."""
    tensor = module.__dict__.get(name)
    return module._parameters.get(name) if tensor is None else tensor


def _is_copy(tensor: torch.Tensor, parameter: torch.Tensor | None) -> bool:
    """Return True if a parameter is this tensor, rounded."""
    if parameter is None or tensor.dtype == parameter.dtype:
        return False
    if (tensor.shape, tensor.device) != (parameter.shape, parameter.device):
        return False
    return torch.equal(tensor.detach().to(parameter.dtype), parameter.detach())
