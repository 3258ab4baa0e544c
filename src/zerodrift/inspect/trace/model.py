"""The models of a watched run: modules and parameters by the paths in their author's code.

Wrappers around a model and packs of parameters are no part of a path.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from zerodrift.inspect.trace.parameter import LiveParameter, local, unwrapped
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
"""Class of a wrapper -> name of the wrapped child."""


def _bases(module: torch.nn.Module) -> list[str]:
    return [base.__name__ for base in type(module).__mro__]


def is_compiled(module: torch.nn.Module) -> bool:
    return module.__dict__.get("_compiled_call_impl") is not None or "OptimizedModule" in _bases(module)


def _identities(root: torch.nn.Module) -> list[int]:
    """Return the ids of modules and parameters; they differ if a name may have another tensor.

    A lazy parameter stays the same object when it gets its shape.
    """
    modules = list(root.modules())
    held = (parameter for module in modules for parameter in module._parameters.values())
    return [*map(id, modules), *(0 if p is not None and is_lazy(p) else id(p) for p in held)]


def _class_of(module: torch.nn.Module) -> type:
    """Return the class that the author wrote: `fully_shard` derives one of its own."""
    first, *bases = type(module).__mro__
    if "FSDPModule" not in _bases(module):
        return first
    return next(kind for kind in bases if kind.__name__ != "FSDPModule")


def _inside(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that a wrapper holds; None if it is no wrapper."""
    children = (module._modules.get(_WRAPPED.get(name, "")) for name in _bases(module))
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
        for name, child in reversed(module._modules.items()):
            if child is not None:
                waiting.append((path if child is inner else _join(path, name), child))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_Leaf = tuple[str, torch.nn.Module, str, torch.Tensor, tuple[int, ...], bool]
"""Path, module, name in the module, tensor, whole shape, whether each rank has a slice."""


def _leaves_of(modules: list[tuple[str, torch.nn.Module]]) -> Iterator[_Leaf]:
    """Yield every parameter, those that FSDP has packed included."""
    paths = {id(module): path for path, module in modules}
    shapes: dict[int, tuple[int, ...]] = {}
    for _, module in modules:
        if (handle := module.__dict__.get("_handle")) is not None:
            tensors = getattr(handle.flat_param, "_params", None) or ()
            pairs = zip(tensors, handle.flat_param._shapes, strict=False)
            shapes |= {id(tensor): tuple(shape) for tensor, shape in pairs}
    for path, module in modules:
        for name, held in module._parameters.items():
            if held is None or is_lazy(held):
                continue
            pack: Any = (tensor := unwrapped(held))
            if hasattr(pack, "_param_infos"):
                for info, shape in zip(pack._param_infos, pack._shapes, strict=True):
                    home = paths.get(id(info.module), path)
                    yield home, info.module, info.param_name, tensor, tuple(shape), True
            else:
                shape = shapes.get(id(tensor)) or tuple(getattr(tensor, "ds_shape", tensor.shape))
                is_sliced = id(tensor) in shapes or hasattr(tensor, "ds_tensor")
                yield path, module, name, tensor, shape, is_sliced


class LiveModel:
    """A module whose forward was called, and its parameters by path."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self.parameters: list[LiveParameter] = []
        self.paths: dict[int, str] = {}  # id of a module -> its path
        self._leaves: dict[int, list[tuple[str, LiveParameter]]] = {}
        self._by_tensor: dict[int, LiveParameter] = {}
        self._scanned: list[int] = []
        self.scan()

    def _wrapping(self) -> list[torch.nn.Module]:
        chain = [self.root]
        while (child := _inside(chain[-1])) is not None:
            chain.append(child)
        return chain

    @property
    def wrappers(self) -> tuple[str, ...]:
        """Classes around the model, outermost first."""
        return tuple(type(module).__name__ for module in self._wrapping()[:-1])

    def leaf(self, module: torch.nn.Module, name: str) -> LiveParameter | None:
        return next((p for leaf, p in self._leaves.get(id(module), ()) if leaf == name), None)

    def resting(self, tensor: torch.Tensor) -> LiveParameter | None:
        parameter = self._by_tensor.get(id(tensor))
        return parameter if parameter is not None and parameter.tensor() is tensor else None

    def copied(self, tensor: torch.Tensor) -> LiveParameter | None:
        """Return the parameter that this tensor is a wider copy of, by its values."""
        copies = [p for p in self.parameters if _is_copy(tensor, p.tensor())]
        return copies[0] if len(copies) == 1 else None

    def look(self) -> bool:
        """Record the tensors between steps; return True if a name or a dtype changed."""
        changed = _identities(self.root) != self._scanned
        if changed:
            self.scan()
        tables = {p.record.shape for p in self.parameters if p.record.kind.endswith("Embedding")}
        for parameter in self.parameters:
            changed |= parameter.look(may_be_tied=parameter.record.shape in tables)
        return changed

    def held(self, module: torch.nn.Module) -> Iterator[tuple[LiveParameter, torch.Tensor]]:
        """Yield the tensors that a module's forward computes with; a library may have replaced them."""
        for leaf, parameter in self._leaves.get(id(module), ()):
            tensor = module.__dict__.get(leaf)
            tensor = module._parameters.get(leaf) if tensor is None else tensor
            if isinstance(tensor, torch.Tensor) and local(tensor).numel():
                yield parameter, unwrapped(tensor)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, module in _modules_of(self.root):
            held = module._buffers.items()
            yield from ((_join(path, leaf), buffer) for leaf, buffer in held if buffer is not None)

    def buffers_in(self, tensor: torch.Tensor) -> list[str]:
        storage = local(tensor).untyped_storage()._cdata
        return [name for name, held in self._buffers() if local(held).untyped_storage()._cdata == storage]

    def record(self, world: int) -> ModelRecord:
        inner = self._wrapping()[-1]
        ties = getattr(getattr(inner, "config", None), "tie_word_embeddings", None)
        buffers = {
            name: dtype_name(buffer.dtype)
            for name, buffer in self._buffers()
            if buffer.is_floating_point() and buffer.numel() > 0
        }
        return ModelRecord(
            name=_class_of(inner).__name__,
            parameters=[parameter.end(world) for parameter in self.parameters],
            buffers=buffers,
            trained=any(parameter.optimized for parameter in self.parameters),
            wrappers=self.wrappers,
            ties=ties if isinstance(ties, bool) else None,
        )

    def scan(self) -> None:
        """Find the paths of all parameters again. Known tensors and known paths keep their records."""
        modules, known = list(_modules_of(self.root)), self._by_tensor
        names = {parameter.record.name: parameter for parameter in self.parameters}
        self.parameters, self._leaves, self._by_tensor = [], {}, {}
        self.paths = {id(module): path for path, module in modules}
        for path, module, leaf, tensor, shape, is_sliced in _leaves_of(modules):
            name, is_packed = _join(path, leaf), hasattr(tensor, "_param_infos")
            parameter = self._by_tensor.get(id(tensor))
            if parameter is not None:
                if name != parameter.record.name and name not in parameter.record.also:
                    parameter.record.also += (name,)
            else:
                parameter = (None if is_packed else known.get(id(tensor))) or names.get(name)
                if parameter is None:
                    kind = _class_of(module)
                    dotted = f"{kind.__module__}.{kind.__qualname__}"
                    record = ParameterRecord(name, shape, dotted, tensor.requires_grad)
                    parameter = LiveParameter(record, tensor)
                parameter.record.name = name
                parameter.record.trained |= tensor.requires_grad
                parameter.is_sliced = is_sliced
                held = parameter.tensor()
                if tensor.is_leaf or held is None:  # else a result replaces it for a call
                    parameter.rests_in(held := tensor)
                if not is_packed:  # else the tensor also holds other parameters
                    self._by_tensor[id(held)] = parameter
                self.parameters.append(parameter)
            self._leaves.setdefault(id(module), []).append((leaf, parameter))
        self._scanned = _identities(self.root)


def _is_copy(tensor: torch.Tensor, parameter: torch.Tensor | None) -> bool:
    if parameter is None or tensor.dtype == parameter.dtype:
        return False
    if (tensor.shape, tensor.device) != (parameter.shape, parameter.device):
        return False
    return torch.equal(tensor.detach().to(parameter.dtype), parameter.detach())
