"""What a forward computes beside its parameters' products, in another dtype: caches, softmax, tables, logits.

A key of the sampler's table is carried out where the model does the thing: at calls of torch's functions
inside of attention, and at the modules that make rotary tables and logits. The same walk, with no dtype asked
for, tells in what the model does them.

Invariant: a value is rounded and given back in the dtype that it had; what is not asked for is not touched.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerodrift.dtypes import DType
from zerodrift.inspect.trace.places import ModulePaths
from zerodrift.numerics.signals import LOSSES

_ATTENTION = re.compile(r"(.*\.)?[^.]*(attn|attention)[^.]*(\..*)?", re.IGNORECASE)
_ROTARY = re.compile(r"[Rr]otary|R[Oo][Pp][Ee]")
_PRODUCTS = frozenset(("matmul", "__matmul__", "bmm"))
_SOFTMAX = frozenset(("softmax", "_softmax"))


class Done:
    """In which dtypes a forward did each of the things, by key."""

    def __init__(self) -> None:
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def note(self, key: str, dtype: torch.dtype) -> None:
        self.dtypes.setdefault(key, set()).add(dtype)


class Activations(TorchFunctionMode):
    """Does them in the dtypes that are asked for."""

    def __init__(self, path: ModulePaths, asked: Mapping[str, DType], done: Done) -> None:
        super().__init__()
        self._path = path
        self._asked = {key: dtype.torch for key, dtype in asked.items()}
        self._done = done

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._attention(func, args, kwargs)
        if name in LOSSES:
            return self._loss(func, name, args, kwargs)
        if (name in _SOFTMAX or name in _PRODUCTS) and _ATTENTION.fullmatch(self._path.current):
            if name in _SOFTMAX:
                return self._softmax(func, args, kwargs)
            if _is_product_of_activations(args):
                return self._product(func, args, kwargs)
        return func(*args, **kwargs)

    def rounded(self, key: str, tensor: Tensor) -> Tensor:
        """As a place of that dtype would hold it."""
        self._done.note(key, tensor.dtype)
        dtype = self._asked.get(key)
        return tensor if dtype is None else tensor.to(dtype).to(tensor.dtype)

    def _attention(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given["key"] = self.rounded("kv", given["key"])
        given["value"] = self.rounded("kv", given["value"])
        self._done.note("softmax", torch.float32)  # inside of the kernel, whatever goes in
        dtype = self._asked.get("softmax")
        if dtype is None or dtype is torch.float32:
            return func(**given)
        return _attention_with(dtype, given)

    def _product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scores of keys before the softmax, sums of values behind it: what is cached is on the right."""
        return func(args[0], self.rounded("kv", args[1]), *args[2:], **kwargs)

    def _softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, inside = args[0], kwargs.get("dtype")
        self._done.note("softmax", inside or given.dtype)
        dtype = self._asked.get("softmax")
        if dtype is None:
            return func(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
        return func(given.to(dtype), *args[1:], **kwargs).to(inside or given.dtype)

    def _loss(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = args[0] if args else kwargs["input"]
        self._done.note("logprobs", given.dtype)
        dtype = self._asked.get("logprobs")
        if dtype is None or name != "cross_entropy":
            return func(*args, **kwargs)
        if args:
            return func(given.to(dtype), *args[1:], **kwargs)
        return func(**{**kwargs, "input": given.to(dtype)})


def _is_product_of_activations(args: tuple[Any, ...]) -> bool:
    pair = args[:2]
    return len(pair) == 2 and all(
        isinstance(tensor, Tensor) and tensor.dim() >= 3 and not isinstance(tensor, nn.Parameter)
        for tensor in pair
    )


def _attention_with(dtype: torch.dtype, given: dict[str, Any]) -> Tensor:
    """The same attention, step by step, with the softmax in a dtype."""
    query, key, value = given["query"], given["key"], given["value"]
    if given.get("enable_gqa"):
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scale = given.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-1, -2)) * scale
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = ones.tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.to(dtype).softmax(-1).to(query.dtype) @ value


@contextlib.contextmanager
def at_modules(model: nn.Module, head: str, key_of: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Hooks on the modules that make logits and rotary tables, for as long as the context lasts."""
    handles = []
    for path, module in model.named_modules():
        key = "logits" if path == head and head else "rotary" if _is_rotary(module) else ""
        if key:
            handles.append(module.register_forward_hook(_rounding(key, key_of)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_rotary(module: nn.Module) -> bool:
    return _ROTARY.search(type(module).__name__) is not None


def _rounding(key: str, key_of: Callable[[str, Tensor], Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return key_of(key, output) if output.is_floating_point() else None
        if isinstance(output, tuple):
            return tuple(
                key_of(key, item) if isinstance(item, Tensor) and item.is_floating_point() else item
                for item in output
            )
        return None

    return hook
