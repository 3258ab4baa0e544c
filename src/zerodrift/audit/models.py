"""The models of a run that is watched: their parameters by name, through every wrapper around them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zerodrift.audit.lines import line_of_script
from zerodrift.audit.observed import name as word
from zerodrift.audit.owners import Owners, local
from zerodrift.audit.samples import Samples, read
from zerodrift.audit.seen import Column, SeenModel, SeenParameter

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


class WatchedParameter:
    """A parameter, the tensor that rests between steps, and what has become of its gradients."""

    def __init__(self, seen: SeenParameter, tensor: torch.Tensor) -> None:
        self.seen = seen
        self.reduced = 0
        self.optimized = False
        self.sliced = False
        """Whether ranks have slices of it, though no type says so."""
        self.gather_word = ""
        """What it is gathered in, where its library packs several dtypes as bytes."""
        self.samples = Samples(seen.numel)
        self.begin = 0
        """The flat index of the first element that this rank has of it; -1 where it has no range of them."""
        self.rests_in(tensor)
        self._computed_with: Callable[[], torch.Tensor | None] = lambda: None
        self._arrived = 0
        self._arrived_in: set[torch.dtype] = set()
        self.computed_in: set[torch.dtype] = set()
        self._numel = seen.numel
        self._first_digest: int | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether an optimizer was given a gradient of it that is not zero."""
        return any(self.seen.facts.get("used", ()))

    @property
    def tensor(self) -> torch.Tensor | None:
        return self._tensor()

    def rests_in(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self.begin = _begin(tensor, self.seen)

    def is_resting(self, tensor: torch.Tensor) -> bool:
        return self._tensor() is tensor

    def is_computed_with(self, tensor: torch.Tensor) -> bool:
        """A module's forward computes with this tensor; returns whether it was another before."""
        if self._computed_with() is tensor:
            return False
        self._computed_with = weakref.ref(tensor)
        return True

    def look(self) -> None:
        """What rests."""
        tensor = self._tensor()
        if tensor is None:
            return
        rests = getattr(tensor, "ds_tensor", tensor)  # DeepSpeed's shard of it
        self.seen.see("storage", word(rests.dtype), "the parameter between steps")
        self.seen.layout = "a flat slice on each rank" if self.sliced else _layout(tensor)
        if self._first_digest is None and self.seen.trained:
            self._first_digest = _digest(local(rests))
            if not self.sliced and _varies(local(rests)):
                self.seen.facts["began"] = self._first_digest

    def gathered(self, dtype: torch.dtype) -> str:
        return (self.gather_word or word(dtype)) if dtype is torch.uint8 else word(dtype)

    def arrives(self, gradient: torch.Tensor, sample: bool) -> None:
        """A gradient, at the leaf. `sample` is whether other ranks have one too, to compare with."""
        self._arrived += 1
        if gradient.dtype not in self._arrived_in:
            self._arrived_in.add(gradient.dtype)
            path = self.seen.name.rpartition(".")[0]
            self.seen.see("grad", word(gradient.dtype), "the gradient at the leaf", path, line_of_script)
        if not sample:
            self.samples.misses()
        elif gradient.numel() == self._numel > 0 and not gradient.is_sparse:
            self.samples.arrives(gradient)

    def used(self, gradient: torch.Tensor, begin: int, at: int, length: int) -> None:
        """What an optimizer was given of it: elements from `begin`, at `at` of a flat gradient."""
        if not gradient.is_sparse and begin >= 0:
            self.samples.given(gradient, begin, at, gradient.numel() - at if length < 0 else length)

    def began(self, master: torch.Tensor, at: int, length: int) -> None:
        """Whether the master holds nothing that storage would not hold; asked once, before its first step."""
        if "master_rounded" in self.seen.facts or not self.seen.whats("storage"):
            return
        storage = getattr(torch, self.seen.whats("storage")[0])
        if not master.is_floating_point() or master.dtype.itemsize <= storage.itemsize:
            return
        flat = master.detach().reshape(-1)[at:]
        flat = flat[:length] if length >= 0 else flat
        self.seen.facts["master_rounded"] = bool(torch.equal(flat.to(storage).to(flat.dtype), flat))

    def stepped(self, since: bool) -> None:
        """What an optimizer was given belongs to what had arrived. Where only other ranks are given it, what
        had arrived here belongs to theirs, once there was a step `since`."""
        never = all(value is None for value in self.seen.facts.get("used", ()))
        if self.samples.was_given or (since and never):
            self.seen.facts["own"], self.seen.facts["used"] = self.samples.end()

    def end(self, world: int) -> SeenParameter:
        """What was seen, with a reason for every cell that was not."""
        seen, tensor = self.seen, self._tensor()
        rests = getattr(tensor, "ds_tensor", tensor)
        seen.facts |= {
            "optimized": self.optimized,
            "gradients": self._arrived,
            "reductions": self.reduced,
        }
        if tensor is not None and isinstance(rests, torch.Tensor) and self._first_digest is not None:
            last = _digest(local(rests))
            seen.facts["changed"] = last != self._first_digest
            if not seen.layout:
                seen.facts["digest"] = last
        for column, reason in _reasons(seen, world, self.optimized).items():
            if not seen.cells.get(column):
                seen.unseen.setdefault(column, reason)
        seen.unseen = {column: why for column, why in seen.unseen.items() if not seen.cells.get(column)}
        return seen


class WatchedModel:
    """A module whose forward was called, and its parameters under the names that its author gave them."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self.parameters: list[WatchedParameter] = []
        self._paths: dict[int, str] = {}
        self._leaves: dict[int, list[tuple[str, WatchedParameter]]] = {}
        self._by_tensor: dict[int, WatchedParameter] = {}
        self._copies: dict[int, tuple[Any, WatchedParameter | None]] = {}
        self._scanned: list[int] = []
        self._scan()

    def has(self, module: torch.nn.Module) -> bool:
        return id(module) in self._paths

    def path(self, module: torch.nn.Module) -> str:
        return self._paths[id(module)]

    @property
    def wrappers(self) -> tuple[str, ...]:
        """Classes around the model, outermost first."""
        found, module = [], self.root
        while (child := _inner(module)) is not None:
            found.append(type(module).__name__)
            module = child
        return tuple(found)

    @property
    def replicated(self) -> bool:
        return "DistributedDataParallel" in self.wrappers

    @property
    def compiled(self) -> bool:
        return any(map(_is_compiled, _all_modules(self.root)))

    def become(self, larger: WatchedModel) -> None:
        """The same model, seen from a module around it."""
        known = self._by_tensor
        self.root = larger.root
        self._scan(known)

    def leaf(self, module: torch.nn.Module, name: str) -> WatchedParameter | None:
        """The parameter that is this attribute of this module."""
        return next((p for leaf, p in self._leaves.get(id(module), ()) if leaf == name), None)

    def resting(self, tensor: torch.Tensor) -> WatchedParameter | None:
        """The parameter that this tensor is."""
        parameter = self._by_tensor.get(id(tensor))
        return parameter if parameter is not None and parameter.is_resting(tensor) else None

    def copied(self, tensor: torch.Tensor) -> WatchedParameter | None:
        """The parameter that this tensor is a wider copy of, told by its values."""
        known = self._copies.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        copies = [p for p in self.parameters if _is_copy(tensor, p.tensor)]
        parameter = copies[0] if len(copies) == 1 else None
        self._copies[id(tensor)] = (weakref.ref(tensor), parameter)
        return parameter

    def look(self, memory: Owners[WatchedParameter]) -> bool:
        """What rests between steps. Returns whether names had to be given anew."""
        anew = _identities(self.root) != self._scanned
        if anew:
            self._scan(self._by_tensor)
        for parameter in self.parameters:
            parameter.look()
            tensor = parameter.tensor
            if tensor is not None and local(tensor).numel():
                memory.put(tensor, parameter)
        return anew

    def look_at(
        self,
        module: torch.nn.Module,
        memory: Owners[WatchedParameter],
        hook: Callable[[WatchedParameter, torch.Tensor], None],
    ) -> None:
        """The tensors that a module's forward computes with, which a library may have put in its place."""
        for leaf, parameter in self._leaves.get(id(module), ()):
            tensor = module.__dict__.get(leaf)
            if tensor is None:
                tensor = module._parameters.get(leaf)
            if not isinstance(tensor, torch.Tensor) or not local(tensor).numel():
                continue
            moved = memory.put(tensor, parameter)
            if parameter.is_computed_with(tensor) or moved:
                hook(parameter, tensor)

    def hook(self, hook: Callable[[WatchedParameter, torch.Tensor], None]) -> None:
        for parameter in self.parameters:
            tensor = parameter.tensor
            if tensor is not None and parameter.seen.trained:
                hook(parameter, tensor)

    def stepped(self, since: bool) -> None:
        read([parameter.samples for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.stepped(since)

    def seen(self, world: int) -> SeenModel:
        inner = self.root
        while (child := _inner(inner)) is not None:
            inner = child
        buffers = {
            path: word(buffer.dtype)
            for path, buffer in _buffers(self.root)
            if buffer.is_floating_point() and buffer.numel() > 0
        }
        ties = getattr(getattr(inner, "config", None), "tie_word_embeddings", None)
        return SeenModel(
            name=_class(inner).__name__,
            parameters=[parameter.end(world) for parameter in self.parameters],
            buffers=buffers,
            trained=any(parameter.optimized for parameter in self.parameters),
            wrappers=self.wrappers,
            ties=ties if isinstance(ties, bool) else None,
        )

    def _scan(self, known: dict[int, WatchedParameter] | None = None) -> None:
        """Name everything, keeping what was seen of tensors and of names that are still there."""
        known = known or {}
        names = {parameter.seen.name: parameter for parameter in self.parameters}
        self.parameters, self._leaves, self._by_tensor = [], {}, {}
        self._paths = {id(module): path for path, module in _modules(self.root)}
        for leaf in _leaves(self.root):
            module, tensor = leaf.module, leaf.tensor
            name = f"{leaf.path}.{leaf.name}" if leaf.path else leaf.name
            parameter = None if leaf.packed else self._by_tensor.get(id(tensor))
            if parameter is not None:
                if name != parameter.seen.name and name not in parameter.seen.also:
                    parameter.seen.also += (name,)
            else:
                parameter = (None if leaf.packed else known.get(id(tensor))) or names.get(name)
                if parameter is None:
                    kind = f"{_class(module).__module__}.{_class(module).__qualname__}"
                    seen = SeenParameter(name, leaf.shape, kind, tensor.requires_grad)
                    parameter = WatchedParameter(seen, tensor)
                parameter.seen.name = name
                parameter.seen.trained |= tensor.requires_grad
                parameter.sliced = leaf.sliced
                parameter.rests_in(tensor)
                if not leaf.packed:
                    self._by_tensor[id(tensor)] = parameter
                self.parameters.append(parameter)
            self._leaves.setdefault(id(module), []).append((leaf.name, parameter))
        self._scanned = _identities(self.root)


# --- what is inside what ------------------------------------------------------------------------------


def _classes(module: torch.nn.Module) -> tuple[str, ...]:
    kind: Any = type(module)
    return _bases(kind)


@functools.lru_cache(maxsize=1 << 12)
def _bases(kind: type) -> tuple[str, ...]:
    return tuple(base.__name__ for base in kind.__mro__)


def _is_compiled(module: torch.nn.Module) -> bool:
    called = module.__dict__.get("_compiled_call_impl")
    return called is not None or "OptimizedModule" in _classes(module)


def _all_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
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


def _identities(root: torch.nn.Module) -> list[int]:
    """Of every parameter and of where it is: others if a name may be another's."""
    found = []
    for module in _all_modules(root):
        found.append(id(module))
        found += map(id, module._parameters.values())
    return found


def _class(module: torch.nn.Module) -> type:
    """The class that the author wrote: `fully_shard` makes one of its own of it."""
    kinds = type(module).__mro__
    if "FSDPModule" in _classes(module):
        kinds = tuple(kind for kind in kinds[1:] if kind.__name__ != "FSDPModule")
    return kinds[0]


def _inner(module: torch.nn.Module) -> torch.nn.Module | None:
    """What a wrapper stands around."""
    for kind in _classes(module):
        child = module._modules.get(_WRAPPED.get(kind, ""))
        if child is not None:
            return child
    return None


def _modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module, under its author's path."""
    waiting, visited = [("", root)], set()
    while waiting:
        path, module = waiting.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        yield path, module
        inner = _inner(module)
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


def _leaves(root: torch.nn.Module) -> Iterator[_Leaf]:
    modules = list(_modules(root))
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


def _buffers(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in _modules(root):
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                yield (f"{path}.{leaf}" if path else leaf), buffer


# --- tensors ------------------------------------------------------------------------------------------


def _layout(tensor: torch.Tensor) -> str:
    """How it is spread over ranks."""
    placements = getattr(tensor, "placements", None)
    if placements is not None and not all(placement.is_replicate() for placement in placements):
        mesh: Any = getattr(tensor, "device_mesh", None)
        dims = sorted({placement.dim for placement in placements if placement.is_shard()})
        return f"sharded on dim {', '.join(map(str, dims))} over {mesh.size()} ranks"
    return ""


def _begin(tensor: torch.Tensor, seen: SeenParameter) -> int:
    """The flat index of the first element that this rank has of it; -1 where it has no range of them."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh: Any = getattr(tensor, "device_mesh", None)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if any(offsets[1:]):
        return -1
    return offsets[0] * (seen.numel // max(seen.shape[0], 1)) if offsets else 0


def _is_copy(tensor: torch.Tensor, parameter: torch.Tensor | None) -> bool:
    """Whether a parameter is this tensor, rounded."""
    if parameter is None or parameter is tensor or tensor.shape != parameter.shape:
        return False
    if tensor.device != parameter.device or tensor.dtype == parameter.dtype:
        return False
    return bool(torch.equal(tensor.detach().to(parameter.dtype), parameter.detach()))


def _varies(tensor: torch.Tensor) -> bool:
    """Whether it has values that say whose they are: no vector, no constant."""
    if tensor.dim() < 2 or not tensor.numel() or tensor.device.type == "meta":
        return False
    least, greatest = tensor.detach().aminmax()
    return bool(least < greatest)


_AS_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_CHUNK = 1 << 20


def _digest(tensor: torch.Tensor) -> int | None:
    """A number of its bits and their order; None of what has none."""
    if tensor.device.type == "meta" or not tensor.dtype.is_floating_point:
        return None
    bits = tensor.detach().reshape(-1).view(_AS_INTEGERS[tensor.dtype.itemsize])
    total = 0
    for begin in range(0, bits.numel(), _CHUNK):
        chunk = bits[begin : begin + _CHUNK].to(torch.int64)
        weights = torch.arange(begin, begin + chunk.numel(), device=chunk.device) * 2654435761 + 1
        total ^= int((chunk * (weights | 1)).sum()) + begin
    return total


def _reasons(seen: SeenParameter, world: int, optimized: bool) -> dict[Column, str]:
    """Why a cell would be empty."""
    whole = "one process" if world == 1 else "each rank has all of it" if not seen.layout else "none was seen"
    none = "" if seen.trained else "it is not trained"
    no_gradient = none or "no gradient arrived in the observed steps"
    return {
        "storage": "it was never between steps",
        "gather": whole,
        "compute": "no operation used it in the observed steps",
        "grad": no_gradient,
        "accumulate": no_gradient,
        "reduce": none or ("one process" if world == 1 else "no collective carried its gradient"),
        "master": none or "no optimizer that took a step has it",
        "state": none or "no optimizer that took a step has it" if not optimized else "none is kept",
        "export": "no file with it was written in the observed steps",
    }
