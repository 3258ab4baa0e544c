"""What one operation rounds: its result beside the same computed in fp32 from the same inputs.

A run as planned is looked at from above autograd. Every operation that takes or leaves numbers narrower than
fp32 is computed once more in fp32, and the difference, times the gradient of what the run is judged by, says
how much of the drift begins there, to first order. Numbers that need no gradient, such as a table of angles,
have a shadow instead: what they would be if nothing had been rounded since they were made.

Invariant: a forward leaves the bits that it leaves without this. Nothing that is computed beside it reaches
the model, draws a random number or writes into a tensor of the run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from zerodrift.inspect.trace.places import ModulePaths, place_of_code

DRAWS = frozenset((
    "dropout", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "dropout1d", "dropout2d",
    "dropout3d", "rrelu", "gumbel_softmax", "bernoulli", "bernoulli_", "multinomial", "normal", "normal_",
    "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_", "randn_like", "rand_like",
    "randint_like", "rand", "randn", "randint", "randperm", "poisson", "binomial", "dropout_",
    "native_dropout", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided",
))  # fmt: skip
"""Operations that would leave other numbers if they ran again."""

NO_OPERATION = frozenset((
    "requires_grad_", "register_hook", "retain_grad", "backward", "set_", "resize_", "detach_",
    "share_memory_", "__set__", "__delete__", "numpy", "item", "tolist", "__len__", "size", "dim", "stride",
    "data_ptr", "is_floating_point", "is_contiguous", "storage_offset", "untyped_storage", "__repr__",
    "__format__",
))  # fmt: skip
"""Calls that compute nothing that could be rounded."""

HALF = (
    *(torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
"""What holds less than fp32."""

NARROWS = frozenset(("half", "bfloat16"))
"""Casts that say so in their name, whatever dtype they are given."""


Key = tuple[str, str, str, str]
"""Module, operation, line and parameter."""


@dataclass(slots=True)
class Rounding:
    """What is rounded at one place."""

    module: str
    """Path of the module."""
    operation: str
    """torch's name."""
    line: str
    """Of the model's code."""
    parameter: str = ""
    """The matrix that it computes with, by its first name; empty where it computes without."""
    dtype: str = ""
    """Of what comes out."""
    calls: int = 0
    square: float = 0.0
    """Sum over the elements of (gradient x error)^2."""
    signed: float = 0.0
    """Sum of gradient x error."""
    error: float = 0.0
    """Sum of the squares of the errors."""
    size: float = 0.0
    """Sum of the squares of what should come out."""
    saturated: int = 0
    """Elements that are not finite, and are in fp32."""
    vanished: int = 0
    """Elements that are zero, and are not in fp32."""
    numel: int = 0
    constant: bool = False
    """Whether it is about numbers that need no gradient."""

    @property
    def key(self) -> Key:
        return self.module, self.operation, self.line, self.parameter

    @property
    def relative(self) -> float:
        """Size of the errors beside what should come out."""
        return math.sqrt(self.error / self.size) if self.size else 0.0

    @property
    def typical(self) -> float:
        """Root of the mean square of what should come out."""
        return math.sqrt(self.size / self.numel) if self.numel else 0.0


@dataclass(slots=True)
class Roundings:
    """By place, over all micro-batches of a rank."""

    places: dict[Key, Rounding] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    """Parameters that some operation was given whose result has a gradient."""
    ran: set[str] = field(default_factory=set)
    """Modules that did something."""

    def at(self, module: str, operation: str, line: str, parameter: str) -> Rounding:
        key = (module, operation, line, parameter)
        if key not in self.places:
            self.places[key] = Rounding(module, operation, line, parameter)
        return self.places[key]


class Watch(TorchFunctionMode):
    """Sees every operation of a forward, and what it rounds."""

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[int, str],
        path: ModulePaths,
        found: Roundings,
        constants: Mapping[int, torch.Tensor],
    ) -> None:
        """`names` has parameters by id; `constants` what buffers would be without rounding, by id."""
        super().__init__()
        self._names, self._path, self._found = names, path, found
        self._shadows: dict[int, tuple[Any, torch.Tensor, Rounding]] = {}
        for name, buffer in model.named_buffers():
            true = constants.get(id(buffer))
            if true is not None and buffer.is_floating_point():
                place = found.at(name.rpartition(".")[0], "buffer", "", name)
                place.constant = True
                _note(place, buffer, true.to(buffer.device))
                self._remember(buffer, true.float().to(buffer.device), place)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        line = "" if name in NO_OPERATION or name in DRAWS else place_of_code()[0]
        if not line:
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        floating = [tensor for tensor in given if tensor.is_floating_point()]
        before = self._copies(name, (args, kwargs), floating)
        result = func(*args, **kwargs)
        self._found.ran.add(self._path.current)
        if any(out.requires_grad for out in _tensors(result)):
            self._found.used.update(self._names[id(one)] for one in given if id(one) in self._names)
        for place, out in enumerate(_tensors(args[0] if name == "__setitem__" else result)):
            if out.is_floating_point() and before is not None:
                self._look((func, name, line), before, given, out, place)
        return result

    def _copies(self, name: str, inputs: Any, floating: list[torch.Tensor]) -> Any:
        """Inputs as they were, of an operation that writes into one of them."""
        if any(type(tensor) is nn.Parameter and not tensor.numel() for tensor in floating):
            return None
        if _writes(name):
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                return _mapped(inputs, lambda tensor: tensor.detach().clone(), self._same)
        return inputs

    def _same(self, old: torch.Tensor, new: torch.Tensor) -> None:
        held = self._shadows.get(id(old))
        if held is not None:
            self._remember(new, held[1], held[2])

    def _look(
        self,
        call: tuple[Any, str, str],
        inputs: Any,
        given: list[torch.Tensor],
        out: torch.Tensor,
        number: int,
    ) -> None:
        func, name, line = call
        shadowed = [self._shadows[id(tensor)] for tensor in given if id(tensor) in self._shadows]
        narrow = out.dtype in HALF or any(tensor.dtype in HALF for tensor in given)
        if not narrow and not shadowed:
            return
        if not shadowed and not _writes(name) and _is_view(out, given):
            return
        exact = self._again(func, inputs, number, shadows=False)
        if exact is None or exact.shape != out.shape:
            return
        place = self._found.at(self._path.current, name, line, self._parameter(given))
        if not place.calls:
            place.dtype = str(out.dtype).removeprefix("torch.")
        place.calls += 1
        if out.requires_grad:
            error = _note(place, out, exact)
            if error is not None:
                _charge(out, error, place)
            for _, _, cause in shadowed[:1]:
                true = self._again(func, inputs, number, shadows=True)
                if true is not None and true.shape == exact.shape:
                    _charge(out, exact - true, cause)
        else:
            place.constant = True
            true = self._again(func, inputs, number, shadows=True) if shadowed else exact
            error = _note(place, out, exact)
            if true is None or (error is None and not shadowed):
                return
            cause = shadowed[0][2] if shadowed else place
            self._remember(out, true, cause)

    def _again(self, func: Any, inputs: Any, number: int, *, shadows: bool) -> torch.Tensor | None:
        """The same operation on the same numbers in fp32."""

        name = _name(func)

        def wide(tensor: torch.Tensor) -> torch.Tensor:
            held = self._shadows.get(id(tensor)) if shadows else None
            plain = tensor.detach() if held is None else held[1]
            plain = plain.float() if plain.dtype in HALF else plain
            return plain.clone() if _writes(name) else plain

        device = next((t.device.type for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)), "cpu")
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), torch.autocast(device, enabled=False):
            args, kwargs = _wide_dtypes(_mapped(inputs, wide, None))
            try:
                result = args[0].float() if name in NARROWS else func(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                return None  # it has no form in fp32, or of these inputs together
        tensors = list(_tensors(args[0] if name == "__setitem__" else result))
        if len(tensors) <= number:
            return None
        out = tensors[number]
        return out.float() if out.is_floating_point() else None

    def _parameter(self, given: list[torch.Tensor]) -> str:
        """The largest parameter, or view of one, that goes in."""
        best, size = "", 0
        for tensor in given:
            base = tensor if tensor._base is None else tensor._base
            name = self._names.get(id(tensor)) or self._names.get(id(base))
            if name and tensor.numel() > size:
                best, size = name, tensor.numel()
        return best

    def _remember(self, tensor: torch.Tensor, true: torch.Tensor, cause: Rounding) -> None:
        key = id(tensor)
        forget = weakref.ref(tensor, lambda _: self._shadows.pop(key, None))
        self._shadows[key] = (forget, true, cause)


class Widened(TorchFunctionMode):
    """Leaves out what the model's own code narrows, at places by module and line."""

    def __init__(self, path: ModulePaths, places: frozenset[tuple[str, str]]) -> None:
        super().__init__()
        self._path, self._places = path, places

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, _name(func)
        if name in NO_OPERATION or (self._path.current, place_of_code()[0]) not in self._places:
            return func(*args, **kwargs)
        if name in NARROWS:
            return args[0].float()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        wide = tree_map(_wide, (args, kwargs))
        with torch.autocast(tensors[0].device.type if tensors else "cpu", enabled=False):
            return func(*wide[0], **wide[1])


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.float() if leaf.dtype in HALF else leaf
    return torch.float32 if isinstance(leaf, torch.dtype) and leaf in HALF else leaf


def _note(place: Rounding, out: torch.Tensor, exact: torch.Tensor) -> torch.Tensor | None:
    """Add an error up; None where there is none."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        had = out.detach().float()
        error = had - exact
        finite = exact.isfinite()
        bad = ~had.isfinite() & finite
        place.saturated += int(bad.sum())
        place.vanished += int(((had == 0) & (exact != 0)).sum())
        place.numel += out.numel()
        error = torch.where(finite & ~bad, error, torch.zeros_like(error))
        square = float(error.square().sum())
        place.error += square
        place.size += float(torch.where(finite, exact, torch.zeros_like(exact)).square().sum())
        return error.to(torch.bfloat16) if square else None


def _charge(out: torch.Tensor, error: torch.Tensor, place: Rounding) -> None:
    """When the gradient of a result comes, what its errors are worth."""

    def came(gradient: torch.Tensor) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            effect = gradient.detach().float() * error
            place.square += float(effect.square().sum())
            place.signed += float(effect.sum())

    out.register_hook(came)


def _mapped(inputs: Any, change: Any, seen: Any) -> Any:
    def each(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        new = change(leaf)
        if seen is not None:
            seen(leaf, new)
        return new

    return tree_map(each, inputs)


def _wide_dtypes(inputs: Any) -> Any:
    """Arguments that ask for a narrow dtype ask for fp32."""
    return tree_map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else _wide(leaf), inputs)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))


def _is_view(out: torch.Tensor, given: list[torch.Tensor]) -> bool:
    """Whether it is an input, or part of one, as it was."""
    if out._base is not None:
        base = out._base
        return any(tensor is base or tensor._base is base for tensor in given)
    return any(tensor is out for tensor in given)


def _writes(name: str) -> bool:
    """Whether it writes into its first argument: `add_`, `__setitem__`, `__iadd__`."""
    if name.startswith("__"):
        return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
    return name.endswith("_")


def _name(func: Any) -> str:
    named = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", named) if named == "__get__" else str(named)
