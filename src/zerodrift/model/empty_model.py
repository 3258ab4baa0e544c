"""Build models without memory for their parameters.

Modules run their own constructors, and buffers are computed as usual. A parameter moves to the meta device
when it is registered. The operations that write parameters are recorded (see `model/recipe.py`), so that a
parameter that no checkpoint holds gets its initial values once it has memory.

Invariant: nothing changes outside of the context. Inside the context, parameters keep their shapes, dtypes,
strides, ties and attributes.

[Note: recording] A torch function mode receives every call on tensors. An in-place write is recorded with the
views of its target, which are identified by their storage. Functions of `torch.nn.init` skip meta tensors;
when one of them reads `is_meta`, the recorder records that function with its arguments. A small tensor that
was computed and not written in place (`torch.randn(3) * 0.1`) keeps its memory and values; a large one has no
values unless a checkpoint has them. A computation on the meta device is recorded, and runs when the parameter
that it was written to is filled.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from zerodrift.model.recipe import ATTRIBUTE, InitRecipe, RecordedCall, Window, replace_items

SMALL = 1 << 16
"""Most elements of a computed parameter that keeps its memory."""

_FILLS: dict[str, tuple[Any, ...]] = {
    "empty": (),
    "zeros": (torch.Tensor.zero_,),
    "ones": (torch.Tensor.fill_, 1),
    "full": (torch.Tensor.fill_,),
    "rand": (torch.Tensor.uniform_,),
    "randn": (torch.Tensor.normal_,),
}
"""A function that allocates a tensor -> the write that stores the same values in existing memory."""

_FACTORIES = {
    **{name: fill for base, fill in _FILLS.items() for name in (base, f"{base}_like")},
    **{f"new_{base}": _FILLS[base] for base in ("empty", "zeros", "ones")},
}

_NOT_WRITES = frozenset(("requires_grad_", "share_memory_", "detach_", "rename_", "retain_grad"))
"""Methods with the names of in-place writes that write no values."""

_OPERATORS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__")


@contextlib.contextmanager
def empty(widen: torch.dtype | None = None) -> Iterator[None]:
    """Build modules inside with parameters without memory.

    Floating parameters with a narrower dtype than `widen` get that dtype, and so do their initial values.
    """
    recorder = _Recorder(widen)
    # The hook's result is registered, although torch declares that a hook returns nothing.
    hook = register_module_parameter_registration_hook(recorder.register)  # type: ignore[arg-type]
    try:
        with _kept_in_fp32(), _copies(recorder), recorder:
            yield
    finally:
        hook.remove()
        recorder.end()


LARGE = 1 << 30
"""Elements from which on `NoLargeMemory` allocates no memory for a tensor."""


class NoLargeMemory(TorchFunctionMode):
    """A mode inside of `empty` that allocates no large tensor, for models that are never filled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("empty", "zeros", "ones") and kwargs.get("device") is None:
            sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
            if math.prod(int(size) for size in sizes) >= LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class _Recorder(TorchFunctionMode):
    """Records the writes to parameters; see [Note: recording]."""

    def __init__(self, widen: torch.dtype | None) -> None:
        super().__init__()
        self._widen = widen
        self._recipes: dict[int, tuple[StorageWeakRef, InitRecipe]] = {}
        """Recipes by storage. The weak reference keeps the address from being reused, and no memory alive."""
        self._parameters: dict[int, tuple[nn.Parameter, InitRecipe]] = {}
        self._computed: dict[int, tuple[torch.Tensor, int, RecordedCall]] = {}
        """Other tensors without memory, by id: (tensor, kept so that its id is not reused; version; call)."""
        self._random_owners: dict[RecordedCall, InitRecipe | None] = {}
        """Call that drew random numbers -> the recipe that uses them."""
        self._is_internal = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_internal:
            return func(*args, **kwargs)
        if func == _IS_META:
            return self._is_meta(args[0])
        if func == _SET_DATA and id(args[0]) in self._parameters:
            return self._assign(*args)
        name = getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        if name in _FACTORIES and kwargs.get("out") is None:
            self._start_recipe(name, out, args, kwargs)
        elif name == "clone" and type(out) is torch.Tensor:
            source = self._find(args[0])
            if source is not None:
                copy = replace(source, operations=list(source.operations), window=_window(out))
                self._set_recipe(out, copy)
        else:
            self._write(func, _write_target(name, args, kwargs), args, kwargs)
        if type(out) is torch.Tensor and out.device.type == "meta":
            self._compute(func, out, args, kwargs)
        return out

    @contextlib.contextmanager
    def _unrecorded(self) -> Iterator[None]:
        self._is_internal = True
        try:
            yield
        finally:
            self._is_internal = False

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Return the parameter without memory that is registered in place of `parameter`."""
        if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.layout is not torch.strided:
            return None
        before = getattr(parameter, _REPLACEMENT, None)
        if before is not None:
            return before  # another name for the same parameter
        recipe = self._find(parameter)
        if (recipe is None or recipe.obstacle) and parameter.numel() <= SMALL:
            return None
        with self._unrecorded():
            replacement = self._without_memory(parameter)
        window = _window(parameter)
        if recipe is None:
            recipe = InitRecipe(0, parameter.dtype, window, obstacle=_NOT_WRITTEN)
        self._set_recipe(replacement, replace(recipe, window=window, dtype=replacement.dtype))
        self.add_parameter(replacement)
        setattr(parameter, _REPLACEMENT, replacement)
        return replacement

    def _assign(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Assign `parameter.data = value`, which torch refuses between devices."""
        recipe = self._find(value)
        with self._unrecorded():
            if recipe is None and value.is_meta:
                recipe = self._parameters[id(parameter)][1]
            elif recipe is None and value.numel() <= SMALL:
                values = value.detach().clone().contiguous()
                recipe = InitRecipe(value.numel(), value.dtype, _window(values))
                recipe.operations.append(RecordedCall(torch.Tensor.copy_, (recipe.window, values), {}))
            elif recipe is None:
                recipe = InitRecipe(0, value.dtype, _window(value), obstacle=_NOT_WRITTEN)
            parameter.data = value if value.is_meta else torch.empty_like(value, device="meta")
        self._set_recipe(parameter, recipe)
        self._parameters[id(parameter)] = (parameter, recipe)

    def _without_memory(self, parameter: nn.Parameter) -> nn.Parameter:
        dtype = parameter.dtype
        if self._widen is not None and dtype.is_floating_point and dtype.itemsize < self._widen.itemsize:
            dtype = self._widen
        numel = parameter.untyped_storage().nbytes() // parameter.itemsize
        flat = torch.empty(numel, dtype=dtype, device="meta")
        replacement = nn.Parameter(_window(parameter).of(flat), parameter.requires_grad)
        replacement.__dict__.update(parameter.__dict__)
        return replacement

    def add_parameter(self, parameter: nn.Parameter) -> None:
        recipe = self._find(parameter)
        if recipe is not None:
            self._parameters[id(parameter)] = (parameter, recipe)

    def end(self) -> None:
        for parameter, recipe in self._parameters.values():
            recipe.version = parameter._version
            setattr(parameter, ATTRIBUTE, recipe)

    def _compute(self, func: Any, out: torch.Tensor, args: Any, kwargs: Any) -> None:
        """Record the call that computed a tensor without memory, if the call can be replayed."""
        with self._unrecorded():
            try:
                self._computed[id(out)] = (out, out._version, self._recorded(func, args, kwargs, None))
            except _NotReplayableError:
                self._computed.pop(id(out), None)

    def _computation(self, tensor: torch.Tensor) -> RecordedCall | None:
        """Return the call that computed a tensor without memory, unless the tensor was written since."""
        there, version, call = self._computed.get(id(tensor), (None, -1, None))
        return call if there is tensor and tensor._version == version else None

    def _find(self, tensor: Any) -> InitRecipe | None:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        entry = self._recipes.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def _set_recipe(self, tensor: torch.Tensor, recipe: InitRecipe) -> None:
        storage = tensor.untyped_storage()
        self._recipes[storage._cdata] = (StorageWeakRef(storage), recipe)

    def _start_recipe(self, name: str, out: Any, args: Any, kwargs: Any) -> None:
        if type(out) is not torch.Tensor or out.layout is not torch.strided:
            return
        recipe = InitRecipe(out.untyped_storage().nbytes() // out.itemsize, out.dtype, _window(out))
        if _FACTORIES[name]:
            call, *rest = _FACTORIES[name]
            if name in ("full", "full_like"):
                rest = [kwargs["fill_value"] if "fill_value" in kwargs else args[1]]
            recipe.operations.append(RecordedCall(call, (recipe.window, *rest), {}))
        self._set_recipe(out, recipe)

    def _write(self, func: Any, target: Any, args: Any, kwargs: Any) -> None:
        recipe = self._find(target)
        if recipe is None:
            return
        with self._unrecorded():
            try:
                recipe.operations.append(self._recorded(func, args, kwargs, recipe))
            except _NotReplayableError as error:
                recipe.obstacle = f"`{getattr(func, '__name__', func)}` with {error}"

    def _recorded(self, func: Any, args: Any, kwargs: Any, recipe: InitRecipe | None) -> RecordedCall:
        """Return a call that can be replayed: a view of the recipe's memory becomes a window, a tensor
        without memory the call that computed it, and any other tensor a copy."""

        def record(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if recipe is not None and self._find(value) is recipe:
                return _window(value)
            found = self._computation(value)
            if found is not None:
                # Each parameter draws its own numbers, so shared numbers would be drawn twice.
                for each in found.drawn() if recipe is not None else ():
                    if self._random_owners.setdefault(each, recipe) is not recipe:
                        raise _NotReplayableError("random numbers that another parameter has too")
                return found
            if value.is_meta:
                raise _NotReplayableError("a tensor that has no memory")
            if value.numel() > SMALL:
                raise _NotReplayableError(f"a tensor of {value.numel():,} computed values")
            return value.detach().clone()

        return RecordedCall(func, *replace_items((tuple(args), dict(kwargs)), record))

    def _is_meta(self, tensor: torch.Tensor) -> bool:
        """Return `tensor.is_meta`, and record a calling function of `torch.nn.init`."""
        asker = sys._getframe(2)
        if asker.f_globals.get("__name__") == nn.init.__name__ and self._find(tensor) is not None:
            function = getattr(nn.init, asker.f_code.co_name, None)
            if function is not None and tensor.is_meta:
                names = inspect.signature(function).parameters
                values = {name: asker.f_locals[name] for name in names if name in asker.f_locals}
                self._write(function, tensor, (), values)
        with self._unrecorded():
            return tensor.is_meta


class _NotReplayableError(Exception):
    """An error about a write that cannot be replayed."""


_NOT_WRITTEN = "values that were computed, not written in place"
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_REPLACEMENT = "_zerodrift_replacement"
"""Attribute of a parameter that holds the one that was registered in its place."""


def _window(tensor: torch.Tensor) -> Window:
    return Window(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _write_target(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("out") is not None:
        return kwargs["out"]
    writes = name in _OPERATORS or (name.endswith("_") and not name.endswith("__"))
    if not writes or name in _NOT_WRITES:
        return None
    return args[0] if args else kwargs.get("tensor", kwargs.get("input"))


@contextlib.contextmanager
def _copies(recorder: _Recorder) -> Iterator[None]:
    """Record deep copies of parameters. They are not registered, since their module's dict is copied."""
    before = nn.Parameter.__deepcopy__

    def deep_copy(self: nn.Parameter, memo: Any) -> nn.Parameter:
        out = before(self, memo)
        recorder.add_parameter(out)
        return out

    nn.Parameter.__deepcopy__ = deep_copy  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Parameter.__deepcopy__ = before  # type: ignore[method-assign]


@contextlib.contextmanager
def _kept_in_fp32() -> Iterator[None]:
    """Cast the tensors to fp32 that `transformers` casts only when it loads a model.

    The cast follows `post_init`, which every model calls last. Tested with transformers 4.57 to 5.24.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    from zerodrift.model.huggingface import keep_in_fp32

    klass = modeling.PreTrainedModel
    before = klass.post_init

    def finish_building(self: Any) -> None:
        before(self)
        keep_in_fp32(self)

    klass.post_init = finish_building
    try:
        yield
    finally:
        klass.post_init = before
