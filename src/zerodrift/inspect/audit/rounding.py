"""Measure the rounding error of each operation of a forward, by repeating the operation in fp32.

The error times the gradient of the loss is, to first order, the part of the drift that begins at the
operation. Tensors without a gradient, such as a table of angles, have a shadow instead: the values that they
would have without any rounding.

Invariant: the forward keeps its bits. The repeated operations reach no tensor of the model, and operations
that draw random numbers are not repeated.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from zerodrift.engine import generators
from zerodrift.inspect.trace import ModulePaths, place_of_code, tensors_of

NOT_REPEATABLE = frozenset(("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"))
"""Operations whose result differs when they run again, though they draw no random number."""

NOT_ARITHMETIC = frozenset((
    "requires_grad_", "register_hook", "retain_grad", "backward", "set_", "resize_", "detach_",
    "share_memory_", "__set__", "__delete__", "numpy", "item", "tolist", "__len__", "size", "dim", "stride",
    "data_ptr", "is_floating_point", "is_contiguous", "storage_offset", "untyped_storage", "__repr__",
    "__format__",
))  # fmt: skip
"""Calls that compute nothing."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
NARROW = (torch.bfloat16, torch.float16, *_FLOAT8)  # dtypes that hold less than fp32

NARROWING_CALLS = frozenset(("half", "bfloat16"))  # casts with their dtype in their name

Key = tuple[str, str, str, str]  # module, operation, line and parameter


@dataclass(slots=True)
class Rounding:
    """Sums over all elements that one place of the model's code rounds."""

    module: str
    operation: str
    line: str
    parameter: str = ""  # first name of the largest parameter among the inputs, or `""`
    dtype: str = ""  # dtype of the result
    calls: int = 0
    square: float = 0.0  # sum of (gradient x error)^2
    signed: float = 0.0  # sum of gradient x error
    error: float = 0.0  # sum of error^2
    size: float = 0.0  # sum of exact^2
    saturated: int = 0  # elements that are finite only in fp32
    vanished: int = 0  # elements that are zero, but not in fp32
    numel: int = 0
    constant: bool = False  # True if the tensors need no gradient

    @property
    def key(self) -> Key:
        return self.module, self.operation, self.line, self.parameter

    @property
    def relative(self) -> float:
        """Norm of the errors over the norm of the exact results."""
        return math.sqrt(self.error / self.size) if self.size else 0.0

    @property
    def typical(self) -> float:
        """Root mean square of the exact results."""
        return math.sqrt(self.size / self.numel) if self.numel else 0.0

    def add(self, other: Rounding) -> None:
        for name in ("calls", "square", "signed", "error", "size", "saturated", "vanished", "numel"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def measure(self, out: Tensor, exact: Tensor) -> Tensor | None:
        """Add the errors of a result and return them, or None if there are none."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            result = out.detach().float()
            finite = exact.isfinite()
            bad = ~result.isfinite() & finite
            self.saturated += int(bad.sum())
            self.vanished += int(((result == 0) & (exact != 0)).sum())
            self.numel += out.numel()
            error = torch.where(finite & ~bad, result - exact, 0.0)
            square = float(error.square().sum())
            self.error += square
            self.size += float(torch.where(finite, exact, 0.0).square().sum())
            return error.to(torch.bfloat16) if square else None

    def charge(self, out: Tensor, error: Tensor) -> None:
        """Add the worth of errors when the backward reaches `out`."""

        def add(gradient: Tensor) -> None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                effect = gradient.detach().float() * error
                self.square += float(effect.square().sum())
                self.signed += float(effect.sum())

        out.register_hook(add)


@dataclass(slots=True)
class Roundings:
    """Roundings of all micro-batches of a rank, by place."""

    places: dict[Key, Rounding] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # parameters that went into a result with a gradient
    ran: set[str] = field(default_factory=set)  # modules that ran an operation

    def at(self, module: str, operation: str, line: str, parameter: str) -> Rounding:
        key = (module, operation, line, parameter)
        return self.places.setdefault(key, Rounding(*key))


class RoundingRecorder(TorchFunctionMode):
    """Measures the rounding error of every operation of a forward."""

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[int, str],
        path: ModulePaths,
        found: Roundings,
        constants: Mapping[int, Tensor],
    ) -> None:
        """`names` has the names of parameters by id, `constants` the exact values of buffers by id."""
        super().__init__()
        self._names, self._path, self._found = names, path, found
        self._generators = generators(next(model.parameters()).device)
        self._shadows: dict[int, tuple[Any, Tensor, Rounding]] = {}
        for name, buffer in model.named_buffers():
            exact = constants.get(id(buffer))
            if exact is not None and buffer.is_floating_point():
                place = found.at(name.rpartition(".")[0], "buffer", "", name)
                place.constant = True
                place.measure(buffer, exact.to(buffer.device))
                self._remember(buffer, exact.float().to(buffer.device), place)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        line = "" if name in NOT_ARITHMETIC or name in NOT_REPEATABLE else place_of_code()[0]
        if not line:
            return func(*args, **kwargs)
        given = tensors_of((args, kwargs))
        # A parameter that is not here has no elements.
        is_absent = any(type(t) is nn.Parameter and t.is_floating_point() and not t.numel() for t in given)
        inputs = self._copied((args, kwargs)) if _writes(name) and not is_absent else (args, kwargs)
        before = [generator.get_state() for generator in self._generators]
        result = func(*args, **kwargs)
        # Dropout, by itself or within attention, draws other numbers when it runs again.
        draws = kwargs.get("generator") is not None or not all(
            torch.equal(generator.get_state(), state)
            for generator, state in zip(self._generators, before, strict=True)
        )
        self._found.ran.add(self._path.current)
        outputs = tensors_of(result)
        if any(out.requires_grad for out in outputs):
            self._found.used.update(self._names[id(one)] for one in given if id(one) in self._names)
        for number, out in enumerate(tensors_of(args[0]) if name == "__setitem__" else outputs):
            if out.is_floating_point() and not (is_absent or draws):
                self._measure(func, line, inputs, given, out, number)
        return result

    def _copied(self, inputs: Any) -> Any:
        """Copy the inputs of an in-place operation."""

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            copy = leaf.detach().clone()
            if (shadow := self._shadows.get(id(leaf))) is not None:
                self._remember(copy, shadow[1], shadow[2])
            return copy

        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return tree_map(copied, inputs)

    def _measure(
        self, func: Any, line: str, inputs: Any, given: list[Tensor], out: Tensor, number: int
    ) -> None:
        name = _name(func)
        shadowed = [self._shadows[id(tensor)] for tensor in given if id(tensor) in self._shadows]
        is_narrow = any(tensor.dtype in NARROW for tensor in (out, *given))
        if not shadowed and (not is_narrow or (not _writes(name) and _is_view(out, given))):
            return
        exact = self._repeat(func, inputs, number, shadows=False)
        if exact is None or exact.shape != out.shape:
            return
        parameter, size = "", 0  # the largest, or a view of it, that goes in
        for tensor in given:
            base = tensor if tensor._base is None else tensor._base
            known = self._names.get(id(tensor)) or self._names.get(id(base))
            if known and tensor.numel() > size:
                parameter, size = known, tensor.numel()
        place = self._found.at(self._path.current, name, line, parameter)
        if not place.calls:
            place.dtype = str(out.dtype).removeprefix("torch.")
        place.calls += 1
        error = place.measure(out, exact)
        true = self._repeat(func, inputs, number, shadows=True) if shadowed else exact
        if out.requires_grad:
            if error is not None:
                place.charge(out, error)
            if shadowed and true is not None and true.shape == exact.shape:
                shadowed[0][2].charge(out, exact - true)
        else:
            place.constant = True
            if true is not None and (error is not None or shadowed):
                self._remember(out, true, shadowed[0][2] if shadowed else place)

    def _repeat(self, func: Any, inputs: Any, number: int, *, shadows: bool) -> Tensor | None:
        """Compute output `number` of an operation in fp32. Return None if the operation does not run in
        fp32."""
        name = _name(func)

        def wide(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return _wide(leaf)
            shadow = self._shadows.get(id(leaf)) if shadows else None
            plain = _wide(leaf.detach() if shadow is None else shadow[1])
            return plain.clone() if _writes(name) else plain

        device = next((tensor.device.type for tensor in tensors_of(inputs)), "cpu")
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), torch.autocast(device, enabled=False):
            args, kwargs = tree_map(wide, inputs)
            try:
                result = args[0].float() if name in NARROWING_CALLS else func(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                return None
        outputs = tensors_of(args[0] if name == "__setitem__" else result)
        if len(outputs) <= number or not outputs[number].is_floating_point():
            return None
        return outputs[number].float()

    def _remember(self, tensor: Tensor, true: Tensor, cause: Rounding) -> None:
        key = id(tensor)
        forget = weakref.ref(tensor, lambda _: self._shadows.pop(key, None))
        self._shadows[key] = (forget, true, cause)


class Widener(TorchFunctionMode):
    """Runs in fp32 what the model's own code narrows, at places by module and line."""

    def __init__(self, path: ModulePaths, places: frozenset[tuple[str, str]]) -> None:
        super().__init__()
        self._path, self._places = path, places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name(func)
        if name in NOT_ARITHMETIC or (self._path.current, place_of_code()[0]) not in self._places:
            return func(*args, **kwargs)
        if name in NARROWING_CALLS:
            return args[0].float()
        tensors = tensors_of((args, kwargs))
        wide = tree_map(_wide, (args, kwargs))
        with torch.autocast(tensors[0].device.type if tensors else "cpu", enabled=False):
            return func(*wide[0], **wide[1])


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.float() if leaf.dtype in NARROW else leaf
    return torch.float32 if isinstance(leaf, torch.dtype) and leaf in NARROW else leaf


def _is_view(out: Tensor, given: list[Tensor]) -> bool:
    base = out._base
    if base is None:
        return any(tensor is out for tensor in given)
    return any(tensor is base or tensor._base is base for tensor in given)


def _writes(name: str) -> bool:
    """Return True if an operation writes into its first argument: `add_`, `__setitem__`, `__iadd__`."""
    if name.startswith("__"):
        return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
    return name.endswith("_")


def _name(func: Any) -> str:
    named = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", named) if named == "__get__" else str(named)
