"""A context in which models are built without memory for their parameters.

Modules run their own constructors. Buffers are computed as ever, since nothing could compute them again
later; a parameter goes to the meta device the moment it is registered. What a constructor or a reset
function does to its values is recorded meanwhile (see `model/recipe.py`), so that a parameter that no
checkpoint supplies can have them after all, where and when it has memory.

Invariant: outside of the context nothing is different, and inside it a parameter has the shape, dtype,
strides, ties and attributes that it would have had.

[Note: recording] A mode of torch sees every call on tensors. A call that writes in place is written down
with the views it wrote to, by the memory they share. Functions of `torch.nn.init` do nothing when told that
a tensor is on the meta device, so it is the question that is recorded, with the arguments of whoever asks.
A tensor that was computed rather than written (`torch.randn(3) * 0.1`) leaves no record: a small one keeps
its memory and its values, a large one has none unless a checkpoint has them. One that was computed on the
meta device, where a module asks for the device of its parameters, has no values to keep: how it was computed
is kept instead, and done when the parameter that it was written to is filled.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from zerodrift.model.recipe import ATTRIBUTE, Computed, InitRecipe, Operation, Window, replaced

SMALL = 1 << 16
"""Elements up to which a parameter that was computed keeps its memory."""

_FACTORIES: dict[str, Callable[..., tuple[Callable[..., Any], tuple[Any, ...]] | None]] = {
    "empty": lambda *size, **rest: None,
    "empty_like": lambda *args, **rest: None,
    "new_empty": lambda *args, **rest: None,
    "zeros": lambda *size, **rest: (torch.Tensor.zero_, ()),
    "zeros_like": lambda *args, **rest: (torch.Tensor.zero_, ()),
    "new_zeros": lambda *args, **rest: (torch.Tensor.zero_, ()),
    "ones": lambda *size, **rest: (torch.Tensor.fill_, (1,)),
    "ones_like": lambda *args, **rest: (torch.Tensor.fill_, (1,)),
    "new_ones": lambda *args, **rest: (torch.Tensor.fill_, (1,)),
    "full": lambda size, fill_value, **rest: (torch.Tensor.fill_, (fill_value,)),
    "full_like": lambda like, fill_value, **rest: (torch.Tensor.fill_, (fill_value,)),
    "rand": lambda *size, **rest: (torch.Tensor.uniform_, ()),
    "rand_like": lambda *args, **rest: (torch.Tensor.uniform_, ()),
    "randn": lambda *size, **rest: (torch.Tensor.normal_, ()),
    "randn_like": lambda *args, **rest: (torch.Tensor.normal_, ()),
}
"""A function that makes memory -> what writes the same values into memory that is there."""

_NO_WRITES = frozenset(("requires_grad_", "share_memory_", "detach_", "rename_", "retain_grad"))
"""Names that end like writes and are none."""


@contextlib.contextmanager
def empty(widen: torch.dtype | None = None) -> Iterator[None]:
    """Modules built inside have parameters without memory.

    With `widen`, floating parameters in a narrower dtype are declared in this one, and their first values
    drawn in it.
    """
    recorder = _Recorder(widen)
    # What a hook returns is what is registered, though torch declares that it returns nothing.
    hook = register_module_parameter_registration_hook(recorder.register)  # type: ignore[arg-type]
    try:
        with _kept_in_fp32(), _copies(recorder), recorder:
            yield
    finally:
        hook.remove()
        recorder.end()


LARGE = 1 << 30
"""Elements from which a tensor has no memory even for a moment, where nobody will ask for its values: a
system may refuse what it cannot hold, a stack of experts for one."""


class WithoutValues(TorchFunctionMode):
    """Inside of `empty`, for a model that is never filled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("empty", "zeros", "ones") and kwargs.get("device") is None:
            sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
            if math.prod(int(size) for size in sizes) >= LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class _Recorder(TorchFunctionMode):
    """See [Note: recording]. A mode is torch's way to see calls, and torch's modes are classes."""

    def __init__(self, widen: torch.dtype | None) -> None:
        super().__init__()
        self._widen = widen
        self._recipes: dict[int, tuple[StorageWeakRef, InitRecipe]] = {}
        """By memory. The reference keeps no memory, only its number from being given again."""
        self._made: dict[int, tuple[nn.Parameter, InitRecipe]] = {}
        """Parameters without memory, by identity."""
        self._computed: dict[int, tuple[torch.Tensor, int, Computed]] = {}
        """Other tensors without memory, by identity: (one, held so that no id comes again; its version;
        how it was made)."""
        self._random: dict[Computed, InitRecipe] = {}
        """What numbers were drawn for, and what it was written to."""
        self._own = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._own:
            return func(*args, **kwargs)
        if func == _IS_META:
            return self._answer(args[0])
        if func == _SET_DATA and id(args[0]) in self._made:
            return self._assign(*args)
        name = getattr(func, "__name__", "")
        out = _drawn_into(name, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        if name in _FACTORIES and kwargs.get("out") is None:
            self._begin(name, out, args, kwargs)
        elif name == "clone" and type(out) is torch.Tensor:
            source = self._find(args[0])
            if source is not None:
                self._hold(out, replace(source, operations=list(source.operations), window=_window(out)))
        else:
            self._write(func, _written(name, args, kwargs), args, kwargs)
        if type(out) is torch.Tensor and out.device.type == "meta":
            self._compute(func, out, args, kwargs)
        return out

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """What is registered instead of a parameter with memory."""
        if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.layout is not torch.strided:
            return None
        before = getattr(parameter, _INSTEAD, None)
        if before is not None:
            return before  # another name for the same parameter
        recipe = self._find(parameter)
        if (recipe is None or recipe.lost) and parameter.numel() <= SMALL:
            return None
        self._own = True
        try:
            instead = self._without_memory(parameter)
        finally:
            self._own = False
        window = _window(parameter)
        if recipe is None:
            recipe = InitRecipe(0, parameter.dtype, window, lost=_COMPUTED)
        self._hold(instead, replace(recipe, window=window, dtype=instead.dtype))
        self.made(instead)
        setattr(parameter, _INSTEAD, instead)
        return instead

    def _assign(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """`parameter.data = value`, which torch refuses between devices."""
        recipe = self._find(value)
        self._own = True
        try:
            if recipe is None and value.numel() <= SMALL and not value.is_meta:
                values = value.detach().clone().contiguous()
                recipe = InitRecipe(value.numel(), value.dtype, _window(values))
                recipe.operations.append(Operation(torch.Tensor.copy_, (recipe.window, values), {}))
            if value.is_meta:
                recipe = self._made[id(parameter)][1] if recipe is None else recipe
            elif recipe is None:
                recipe = InitRecipe(0, value.dtype, _window(value), lost=_COMPUTED)
            parameter.data = value if value.is_meta else torch.empty_like(value, device="meta")
        finally:
            self._own = False
        self._hold(parameter, recipe)
        self._made[id(parameter)] = (parameter, recipe)

    def _without_memory(self, parameter: nn.Parameter) -> nn.Parameter:
        dtype = parameter.dtype
        if self._widen is not None and dtype.is_floating_point and dtype.itemsize < self._widen.itemsize:
            dtype = self._widen
        numel = parameter.untyped_storage().nbytes() // parameter.itemsize
        flat = torch.empty(numel, dtype=dtype, device="meta")
        instead = nn.Parameter(_window(parameter).of(flat), parameter.requires_grad)
        instead.__dict__.update(parameter.__dict__)
        return instead

    def made(self, parameter: nn.Parameter) -> None:
        """There is one more parameter without memory."""
        recipe = self._find(parameter)
        if recipe is not None:
            self._made[id(parameter)] = (parameter, recipe)

    def end(self) -> None:
        """Give every parameter its recipe."""
        for parameter, recipe in self._made.values():
            recipe.version = parameter._version
            setattr(parameter, ATTRIBUTE, recipe)

    # --- what is computed without memory ----------------------------------------------------------------

    def _compute(self, func: Any, out: torch.Tensor, args: Any, kwargs: Any) -> None:
        """Keep how a tensor without memory was made, if all of it can be made again."""
        self._own = True
        try:
            call = Computed(func, *replaced((tuple(args), dict(kwargs)), self._made_of))
        except _LostError:
            self._computed.pop(id(out), None)
        else:
            self._computed[id(out)] = (out, out._version, call)
        finally:
            self._own = False

    def _made_of(self, value: Any) -> Any:
        """An argument as it is kept: how it was made, or its values."""
        if not isinstance(value, torch.Tensor):
            return value
        found = self._computation(value)
        if found is not None:
            return found
        if value.is_meta or value.numel() > SMALL:
            raise _LostError
        return value.detach().clone()

    def _computation(self, tensor: torch.Tensor) -> Computed | None:
        """How a tensor without memory was made, unless it was written to since."""
        there, version, call = self._computed.get(id(tensor), (None, -1, None))
        return call if there is tensor and tensor._version == version else None

    # --- what is known of memory ------------------------------------------------------------------------

    def _find(self, tensor: Any) -> InitRecipe | None:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        entry = self._recipes.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def _hold(self, tensor: torch.Tensor, recipe: InitRecipe) -> None:
        storage = tensor.untyped_storage()
        self._recipes[storage._cdata] = (StorageWeakRef(storage), recipe)

    def _begin(self, name: str, out: Any, args: Any, kwargs: Any) -> None:
        if type(out) is not torch.Tensor or out.layout is not torch.strided:
            return
        recipe = InitRecipe(out.untyped_storage().nbytes() // out.itemsize, out.dtype, _window(out))
        written = _FACTORIES[name](*args, **kwargs)
        if written is not None:
            call, rest = written
            recipe.operations.append(Operation(call, (recipe.window, *rest), {}))
        self._hold(out, recipe)

    # --- what is written --------------------------------------------------------------------------------

    def _write(self, func: Any, target: Any, args: Any, kwargs: Any) -> None:
        """Write down a call that wrote to memory that is known."""
        recipe = self._find(target)
        if recipe is None:
            return
        self._own = True
        try:
            call = Operation(
                func,
                tuple(self._seen(value, recipe) for value in args),
                {key: self._seen(value, recipe) for key, value in kwargs.items()},
            )
            recipe.operations.append(call)
        except _LostError as error:
            recipe.lost = f"`{getattr(func, '__name__', func)}` with {error}"
        finally:
            self._own = False

    def _seen(self, value: Any, recipe: InitRecipe) -> Any:
        """An argument as it is kept: a view of the same memory as its place, other tensors as values."""
        if isinstance(value, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in value):
            return type(value)(self._seen(item, recipe) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        if self._find(value) is recipe:
            return _window(value)
        if value.is_meta:
            return self._computed_for(value, recipe)
        if value.numel() > SMALL:
            raise _LostError(f"a tensor of {value.numel():,} computed values")
        return value.detach().clone()

    def _computed_for(self, value: torch.Tensor, recipe: InitRecipe) -> Computed:
        found = self._computation(value)
        if found is None:
            raise _LostError("a tensor that has no memory")
        # Each parameter draws its own numbers: what two share would be drawn twice.
        if any(self._random.setdefault(each, recipe) is not recipe for each in found.drawn()):
            raise _LostError("random numbers that another parameter has too")
        return found

    def _answer(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the meta device; a function of `torch.nn.init` that asks is written down."""
        asker = sys._getframe(2)
        if asker.f_globals.get("__name__") == nn.init.__name__ and self._find(tensor) is not None:
            function = getattr(nn.init, asker.f_code.co_name, None)
            if function is not None and tensor.is_meta:
                names = inspect.signature(function).parameters
                values = {name: asker.f_locals[name] for name in names if name in asker.f_locals}
                self._write(function, tensor, (), values)
        self._own = True
        try:
            return tensor.is_meta
        finally:
            self._own = False


class _LostError(Exception):
    """A write that cannot be done again."""


_COMPUTED = "values that were computed, not written in place"
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_INSTEAD = "_zerodrift_instead"
"""On a parameter that was not registered: what was."""


def _window(tensor: torch.Tensor) -> Window:
    return Window(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _drawn_into(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What a call returns that could change nothing and raise nothing: numbers drawn into what has no memory.

    torch's form of `normal_` for the meta device is written in Python and takes as long as a constructor. A
    tensor's method passes its tensor by place, the function of `torch.nn.init` by name.
    """
    if name != "normal_" or len(args) > 3 or not kwargs.keys() <= {"tensor", "mean", "std", "generator"}:
        return None
    given = dict(zip(("tensor", "mean", "std"), args, strict=False)) | kwargs
    target: Any = given.get("tensor")
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    if type(target) not in (torch.Tensor, nn.Parameter) or not target.is_meta:
        return None
    by_name = "tensor" in kwargs  # that function writes without gradients
    if not target.is_floating_point() or (not by_name and target.requires_grad and torch.is_grad_enabled()):
        return None
    fits = type(mean) in (int, float) and type(std) in (int, float) and std >= 0
    return target if fits else None


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor that a call of this name writes to, if any."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"):
        writes = True
    if not writes or name in _NO_WRITES:
        return None
    return args[0] if args else kwargs.get("tensor", kwargs.get("input"))


@contextlib.contextmanager
def _copies(recorder: _Recorder) -> Iterator[None]:
    """A deep copy of a parameter is none that is registered: its module's table is copied with it."""
    before = nn.Parameter.__deepcopy__

    def copied(self: nn.Parameter, memo: Any) -> nn.Parameter:
        out = before(self, memo)
        recorder.made(out)
        return out

    nn.Parameter.__deepcopy__ = copied  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Parameter.__deepcopy__ = before  # type: ignore[method-assign]


@contextlib.contextmanager
def _kept_in_fp32() -> Iterator[None]:
    """Models of `transformers` keep some tensors in fp32 whatever their config's dtype, but only when they
    are loaded. Here each is treated so when it has been built, since loading has nothing to build any more.

    `post_init` is what every model calls last. Tested with transformers 4.57 to 5.24.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    from zerodrift.model.huggingface import keep_in_fp32

    klass = modeling.PreTrainedModel
    before = klass.post_init

    def after_building(self: Any) -> None:
        before(self)
        keep_in_fp32(self)

    klass.post_init = after_building
    try:
        yield
    finally:
        klass.post_init = before
