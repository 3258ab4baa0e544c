"""Parameters and gradients whose values are not there: using their values is an error that names them.

Between uses a sharded parameter has its shape, its dtype and its hooks, and no values. Python asks a tensor's
class before anything is computed with it, so a parameter is of a class of its own while it is absent, and of
its usual class while it is gathered, as torch's lazy parameters are. `CollectedGradient` is the same for
`param.grad` (`gradient_exposure.py`). Where a state dict may be taken while values are absent, as with
DeepSpeed, its entries and `param.data` are `AbsentValue`s without any memory.

Invariant: no number comes out of an absent parameter, and nothing that is written to one is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zerodrift.errors import ModelError

_VALUES = ("T", "mT", "H", "mH", "real", "imag")
"""Attributes that are made of values; the others need none."""

_SAME = ("detach", "data", "view_as")
"""Calls that return the same tensor anew, absent too; torch finds a parameter's node with `view_as`."""

_CASTS = {
    "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64
}  # fmt: skip

_MOVES = ("cpu", "cuda", "to", "type", *_CASTS)
"""Calls that move to another device, where nothing is to be moved, or to a dtype."""

STAYS = "_zerodrift_stays"
"""The attribute of a parameter that `module.cpu()` passes by while it is absent."""

_SUMS = ("add", "__add__", "__radd__", "__iadd__")
"""Sums of a collected gradient and another, which the engine adds when the sum is assigned."""

_NEED_NO_VALUES = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "__len__", "element_size", "get_device", "stride",
    "storage_offset", "data_ptr", "untyped_storage", "is_floating_point", "is_complex", "is_signed",
    "is_inference", "is_contiguous", "is_conj", "is_neg", "is_coalesced", "is_pinned", "is_shared",
    "__hash__", "has_names", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
    "grad", "backward", "_has_compatible_shallow_copy_type"
))  # fmt: skip

_NEED_MEMORY = ("is_contiguous", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
"""Calls before a value's memory is read or written, beside those that torch names with an underscore at their
end. Addresses are read to find out what is shared."""


class AbsentParameter(nn.Parameter):
    """The class of a parameter while its values are elsewhere."""

    path: str
    kind: type = nn.Parameter
    """Its class while its values are there."""
    lost = False
    """Whether the values went with their engine."""
    advice: str
    borrow: Callable[[bool], bool] = staticmethod(lambda keep: False)
    """Gathers it, where that is possible: in a forward. Returns whether it did. If the argument is true, what
    was borrowed before it stays, because the same operation uses both."""
    cast: Callable[[Any, torch.dtype], torch.Tensor | None] = staticmethod(lambda parameter, dtype: None)
    """Returns a placeholder in another dtype, where the holder of its values will cast them if the parameter
    becomes that, as `module.half()` makes it; else None."""
    whole: Callable[[Any], torch.Tensor] | None = None
    """Gathers the values for a copy, on all ranks; None where an engine has them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, needs_values = _describe(func)
        if needs_values and (
            _borrow_all((args, kwargs)) or next(_instances(cls, (args, kwargs)), None) is None
        ):
            return func(*args, **(kwargs or {}))  # where one is absent, its class refuses
        # torch's page on subclasses uses it, and it is in `torch._C` for all that (2.13 to 2.15).
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
                same.__class__ = type(parameter)  # and no node of a graph, as `as_subclass` would leave
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
    """The gradient of a parameter while the engine has it: a shape and no values."""

    path: str
    cleared: bool
    """Whether user code has set it to zero, without effect on the engine."""
    materialize: Callable[[], object] | None
    """Makes this one, and those of its segment, plain tensors with values; None where a rank has not all of
    them."""

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
        raise ModelError(
            gradient.path,
            "its gradient must be read from the engine after a backward, which has collected it",
            got=f"`{name}` of `param.grad`",
            do=(
                "Clip with `gradient_clipping` in the config, read with `engine.parameter(name).gradient`, "
                "change by assigning to that, clear with `engine.zero_grad`."
            ),
        )

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
    """A state dict's entry for an absent parameter, its `data`, and what is made of those: a tensor without
    memory, with a shape, a dtype, a name and a device. Reading a number out of it, writing one into it, or
    copying it into a tensor or a file is an error."""

    absent: type[AbsentParameter]
    """The parameter's class, which knows its name."""
    home: torch.device
    """The device that it reports: torch's `meta`, or the parameter's for `data`, which loops move their
    inputs to. Code that saves a state dict reads the memory of tensors on other devices."""

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
                return _like(first, torch.Tensor.to(first, _wanted_dtype(args, given) or first.dtype))
            try:
                return _like(first, func(*_without_memory(args), **_without_memory(given)))
            except Exception as error:  # whatever torch raises where there are no numbers
                raise first.refusal(name) from error

    def assign_to(self, parameter: Any, setter: Callable[..., None]) -> None:
        """Serve `parameter.data = parameter.data.to(dtype)`: do nothing, or cast the values where they
        are."""
        same = self.absent is type(parameter) and self.shape == parameter.shape
        cast = parameter if self.dtype is parameter.dtype else self.absent.cast(parameter, self.dtype)
        if not same or cast is None or setter.__self__.__name__ != "data":  # type: ignore[attr-defined]
            raise self.refusal("data = ...")
        if cast is not parameter:
            setter(parameter, cast)

    def refusal(self, what: str) -> ModelError:
        return ModelError(
            self.absent.path,
            "must be gathered when its values are taken",
            got=f"`{what}` of what was taken between its uses",
            do=self.absent.advice,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refusal("pickle")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Value({list(self.shape)}, {self.dtype}, of `{self.absent.path}`, not gathered)"


def _without_memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_without_memory, value))
    if isinstance(value, dict):
        return {key: _without_memory(item) for key, item in value.items()}
    return value


def _like(first: AbsentValue, made: Any) -> Any:
    """Make results of an absent value absent values, also in what holds several."""
    if isinstance(made, torch.Tensor):
        value = made.as_subclass(AbsentValue)
        value.absent, value.home = first.absent, first.home
        return value
    if isinstance(made, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in made):
        return type(made)([_like(first, item) for item in made])
    return made


def _is_there(parameter: AbsentParameter, name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a parameter is on the device that a call of `_MOVES` names, so that nothing moves."""
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
    """Return the error for values that went with the engine that held them."""
    asks = f", and `{asked}` asks for them" if asked else ""
    return ModelError(
        path,
        "must hold values",
        got=f"one that was sharded when its engine was destroyed{asks}",
        do=(
            "Call `destroy` inside `engine.gathered()` to keep them, or build the model anew and load "
            "what was saved."
        ),
    )


def _refusal(parameter: AbsentParameter, what: str) -> ModelError:
    if parameter.lost:
        return lost_error(parameter.path, what)
    return ModelError(
        parameter.path,
        "must be gathered when its values are read or written",
        got=f"`{what}` between its uses",
        do=parameter.advice,
    )


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
            if absent.kind is not kind:  # Python forgets what it knows of a class that is written to
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
    """Gather the absent parameters of an operation, each of its own unit; return whether all are there."""
    keep = False
    while (parameter := next(_instances(AbsentParameter, given), None)) is not None:
        kind = type(parameter)
        if kind.lost or not kind.borrow(keep) or type(parameter) is kind:  # detached while it was absent
            return False
        keep = True
    return True


def _describe(func: Any) -> tuple[str, bool]:
    """Return the name of a call of torch, and whether it needs a tensor's values."""
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
