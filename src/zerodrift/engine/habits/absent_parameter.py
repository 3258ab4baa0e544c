"""Parameters and gradients without values: an operation that needs the values is an error that names them.

Between uses a sharded parameter has a shape, a dtype and hooks, but no values. torch asks a tensor's class
before it computes with the tensor, so an absent parameter has a class of its own, and its usual class while
it is gathered, as torch's lazy parameters do. `CollectedGradient` does the same for `param.grad`
(`gradient_exposure.py`). If a state dict may be taken while values are absent, as with DeepSpeed, its entries
and `param.data` are `AbsentValue`s without memory.

Invariant: no number comes out of an absent parameter, and no write to one is lost silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zerodrift.errors import ModelError

_VALUES = ("T", "mT", "H", "mH", "real", "imag")
"""Attributes that need values."""

_SAME = ("detach", "data", "view_as")
"""Calls that return the same tensor, absent too. torch finds a parameter's node with `view_as`."""

_CASTS = {
    "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64
}  # fmt: skip

_MOVES = ("cpu", "cuda", "to", "type", *_CASTS)
"""Calls that move a tensor to a device or a dtype."""

STAYS = "_zerodrift_stays"
"""Attribute of parameters that stay absent in `module.cpu()`."""

_SUMS = ("add", "__add__", "__radd__", "__iadd__")
"""Sums with a collected gradient: the result is the other gradient, which the engine adds later."""

_NEED_NO_VALUES = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "__len__", "element_size", "get_device", "stride",
    "storage_offset", "data_ptr", "untyped_storage", "is_floating_point", "is_complex", "is_signed",
    "is_inference", "is_contiguous", "is_conj", "is_neg", "is_coalesced", "is_pinned", "is_shared",
    "__hash__", "has_names", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
    "grad", "backward", "_has_compatible_shallow_copy_type"
))  # fmt: skip

_NEED_MEMORY = ("is_contiguous", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
"""Calls that read or write memory, beside those with an underscore at the end of their name. `data_ptr` is
none of them, because code compares addresses to find shared memory."""


class AbsentParameter(nn.Parameter):
    """The class of a parameter while it has no values."""

    path: str
    kind: type = nn.Parameter
    """The parameter's class while it is gathered."""
    lost = False
    """Whether the engine that held the values was destroyed."""
    advice: str
    borrow: Callable[[bool], bool] = staticmethod(lambda keep: False)
    """Gathers the parameter in a forward; returns whether it did. If the argument is true, parameters that
    were borrowed before stay gathered, because the same operation uses them."""
    cast: Callable[[Any, torch.dtype], torch.Tensor | None] = staticmethod(lambda parameter, dtype: None)
    """Returns a placeholder in another dtype for calls such as `module.half()`, if the holder of the values
    can cast them; else None."""
    whole: Callable[[Any], torch.Tensor] | None = None
    """Gathers the values for a copy, on all ranks; None in a model with an engine."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, needs_values = _describe(func)
        if needs_values and (
            _borrow_all((args, kwargs)) or next(_instances(cls, (args, kwargs)), None) is None
        ):
            return func(*args, **(kwargs or {}))  # the class of a parameter that is still absent refuses
        # In torch's page on subclasses, although it is in `torch._C` (2.13 to 2.15).
        with torch._C.DisableTorchFunctionSubclass():
            if not needs_values:
                if name == "__set__" and isinstance(args[1], AbsentValue):
                    return args[1].assign_to(args[0], func)
                return func(*args, **(kwargs or {}))
            parameter = next(_instances(cls, (args, kwargs)))
            if name in ("detach", "data") and STAYS in vars(parameter):
                return AbsentValue.of(parameter, parameter.device)
            if name in _SAME:
                same = func(*args, **(kwargs or {}))
                same.__class__ = type(parameter)  # `as_subclass` would add a node to the graph
                return same
            if name in _MOVES and (
                STAYS in vars(parameter) or _is_there(parameter, name, args, kwargs or {})
            ):
                wanted = _CASTS.get(name) or _wanted_dtype(args, kwargs or {}) or parameter.dtype
                cast = parameter if wanted is parameter.dtype else cls.cast(parameter, wanted)
                if cast is not None:
                    return cast
        raise _refusal(parameter, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        gather = type(self).whole
        if gather is not None and id(self) not in memo:
            memo[id(self)] = type(self).kind(gather(self), self.requires_grad)
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self, "pickle")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter({list(self.shape)}, {self.dtype}, not gathered: see it inside `engine.gathered()`)"


class CollectedGradient(torch.Tensor):
    """The gradient of a parameter that the engine has collected: a shape without values."""

    path: str
    cleared: bool
    """Whether user code has set the gradient to zero, without effect on the engine."""
    materialize: Callable[[], object] | None
    """Gives values to the gradients of the whole segment; None if a rank does not have all of them."""

    @classmethod
    def of(cls, parameter: torch.Tensor, path: str) -> CollectedGradient:
        dtype = parameter.grad_dtype or parameter.dtype
        nothing = torch.full((), float("nan"), dtype=dtype, device=parameter.device)
        collected = nothing.expand(parameter.shape).as_subclass(cls)
        collected.path, collected.cleared, collected.materialize = path, False, None
        return collected

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, needs_values = _describe(func)
        with torch._C.DisableTorchFunctionSubclass():
            if not needs_values:
                return func(*args, **(kwargs or {}))
            gradient = next(_instances(cls, (args, kwargs)))
            if gradient.materialize is None and name in _SAME:
                return gradient
        if gradient.materialize is not None:
            gradient.materialize()
            return func(*args, **(kwargs or {}))
        if name in ("zero_", "_foreach_zero_"):
            for cleared_gradient in _instances(cls, args):
                cleared_gradient.cleared = True
            return gradient
        if name in _SUMS and len(args) == 2 and not kwargs:
            return args[1] if args[0] is gradient else args[0]
        must = "its gradient must be read from the engine after a backward, which has collected it"
        got = f"`{name}` of `param.grad`"
        do = "Clip with `gradient_clipping` in the config, read with `engine.parameter(name).gradient`, "
        do += "change by assigning to that, clear with `engine.zero_grad`."
        raise ModelError(gradient.path, must, got=got, do=do)

    def become(self, values: torch.Tensor) -> None:
        """Turn into a plain tensor of these values."""
        with torch._C.DisableTorchFunctionSubclass():
            self.data = values
            self.__class__ = torch.Tensor  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.clone(self)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gradient({list(self.shape)}, {self.dtype}, collected: see `engine.parameter`)"


class AbsentValue(torch.Tensor):
    """A tensor without memory for an absent parameter: its entry in a state dict, its `data`, and results
    computed from them. Reading, writing or copying its values is an error."""

    absent: type[AbsentParameter]
    """The parameter's class, which has its name."""
    home: torch.device
    """The device that the value reports: the parameter's for `data`, because loops move inputs there, else
    `meta`. Code that saves a state dict reads the memory of tensors on other devices."""

    @classmethod
    def of(cls, parameter: AbsentParameter, home: torch.device) -> AbsentValue:
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").as_subclass(cls)
        value.absent, value.home = type(parameter), home
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", str(func)), kwargs or {}
        first = next(_instances(cls, (args, given)))
        if name == "__deepcopy__":
            return first
        writes = name.endswith("_") and not name.endswith("__") and name not in _NEED_NO_VALUES
        sends = str(getattr(func, "__module__", "")).startswith("torch.distributed")
        if name in _NEED_MEMORY or "out" in given or writes or sends:
            raise first.refusal(name)
        if name == "__get__" and func.__self__.__name__ in ("device", "is_cpu", "is_cuda", "is_meta"):
            asked = func.__self__.__name__
            return first.home if asked == "device" else first.home.type == asked.removeprefix("is_")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _MOVES:
                return first.like(torch.Tensor.to(first, _wanted_dtype(args, given) or first.dtype))
            try:
                on_meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, given))
                result = func(*on_meta[0], **on_meta[1])
                # torch's tree map would make a tuple of a `torch.Size`.
                is_size = isinstance(result, torch.Size)
                return result if is_size else tree_map_only(torch.Tensor, first.like, result)
            except Exception as error:  # torch raises various errors for tensors without numbers
                raise first.refusal(name) from error

    def like(self, result: torch.Tensor) -> AbsentValue:
        """Make a result of this value an absent value."""
        value = result.as_subclass(AbsentValue)
        value.absent, value.home = self.absent, self.home
        return value

    def assign_to(self, parameter: Any, setter: Callable[..., None]) -> None:
        """Run `parameter.data = parameter.data.to(dtype)`: do nothing, or let the holder cast the values."""
        same = self.absent is type(parameter) and self.shape == parameter.shape
        cast = parameter if self.dtype is parameter.dtype else self.absent.cast(parameter, self.dtype)
        if not same or cast is None or setter.__self__.__name__ != "data":  # type: ignore[attr-defined]
            raise self.refusal("data = ...")
        if cast is not parameter:
            setter(parameter, cast)

    def refusal(self, what: str) -> ModelError:
        must = "must be gathered when its values are read"
        got = f"`{what}` of a tensor that was taken while it was sharded"
        do = self.absent.advice
        return ModelError(self.absent.path, must, got=got, do=do)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refusal("pickle")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Value({list(self.shape)}, {self.dtype}, of `{self.absent.path}`, not gathered)"


def _is_there(parameter: AbsentParameter, name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a call of `_MOVES` names the device on which the parameter is."""
    wanted: Any = {"cpu": "cpu", "cuda": "cuda"}.get(name)
    if name in ("to", "cuda"):
        given = (getattr(value, "device", value) for value in (*args[1:], *kwargs.values()))
        kinds = (str, int, torch.device)
        wanted = next((it for it in given if isinstance(it, kinds) and not isinstance(it, bool)), wanted)
    if parameter.lost or kwargs.get("copy"):
        return False
    device, home = torch.device(parameter.device if wanted is None else wanted), parameter.device
    return device.type == home.type and device.index in (None, home.index)


def _wanted_dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    wanted = (getattr(value, "dtype", value) for value in (*args[1:], *kwargs.values()))
    return next((value for value in wanted if isinstance(value, torch.dtype)), None)


def lost_error(path: str, asked: str = "") -> ModelError:
    """Return the error for values whose engine was destroyed."""
    asks = f", and `{asked}` asks for them" if asked else ""
    must = "must hold values"
    got = f"one that was sharded when its engine was destroyed{asks}"
    do = "Call `destroy` inside `engine.gathered()`, or build the model again and load a checkpoint."
    return ModelError(path, must, got=got, do=do)


def _refusal(parameter: AbsentParameter, what: str) -> ModelError:
    if parameter.lost:
        return lost_error(parameter.path, what)
    must = "must be gathered when its values are read or written"
    got = f"`{what}` while it was sharded"
    do = parameter.advice
    return ModelError(parameter.path, must, got=got, do=do)


GATHER = (
    "Do so inside `engine.gathered()`, with `write=True` to change it, or in the module that it belongs to."
)


def absent_class(path: str, advice: str = GATHER) -> type[AbsentParameter]:
    """Make the class of a parameter while it is absent."""
    return type("AbsentParameter", (AbsentParameter,), {"path": path, "advice": advice})


def mark_absent(parameters: Iterable[Any], classes: Iterable[Any]) -> None:
    for parameter, absent in zip(parameters, classes, strict=True):
        kind = type(parameter)
        if kind is not absent:
            if absent.kind is not kind:  # writing to a class clears Python's caches for it
                absent.kind = kind
            parameter.__class__ = absent


def mark_gathered(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        kind: Any = type(parameter)
        if kind.__base__ is AbsentParameter:
            parameter.__class__ = kind.kind


def gathered_class(parameter: Any) -> type:
    """Return the class of a parameter while its values are there."""
    kind = type(parameter)
    return kind.kind if issubclass(kind, AbsentParameter) else kind


def set_gathered_class(parameter: Any, kind: type) -> None:
    """Set the class of a parameter while its values are there."""
    current = type(parameter)
    if issubclass(current, AbsentParameter):
        current.kind = kind
    else:
        parameter.__class__ = kind


def _borrow_all(given: Any) -> bool:
    """Gather the units of an operation's absent parameters; return whether all parameters are there."""
    keep = False
    while (parameter := next(_instances(AbsentParameter, given), None)) is not None:
        kind = type(parameter)
        if kind.lost or not kind.borrow(keep) or type(parameter) is kind:  # detached while it was absent
            return False
        keep = True
    return True


def _describe(func: Any) -> tuple[str, bool]:
    """Return the name of a torch function or attribute, and whether it needs a tensor's values."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = func.__self__.__name__
        return name, name in (*_VALUES, *_SAME)
    return name, name not in ("__set__", "__delete__") and name not in _NEED_NO_VALUES


def _instances(kind: type, value: Any) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _instances(kind, item)
    elif isinstance(value, dict):
        yield from _instances(kind, list(value.values()))
