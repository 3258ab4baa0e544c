"""Round activations of a forward to the sampler's dtypes: caches, softmax, rotary tables, logits.

A key is carried out at calls of torch's functions inside attention, and at the modules that make rotary
tables and logits. The dtypes in which the model does each thing are recorded on the way.

Invariant: a value is rounded and returned in the dtype that it had; nothing else changes.
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
from zerodrift.inspect.audit.signals import LOSSES
from zerodrift.observer.places import ModulePaths

_ATTENTION = re.compile(r"(.*\.)?[^.]*(attn|attention)[^.]*(\..*)?", re.IGNORECASE)
_ROTARY = re.compile(r"[Rr]otary|R[Oo][Pp][Ee]")
_PRODUCTS = frozenset(("matmul", "__matmul__", "bmm"))
_SOFTMAX = frozenset(("softmax", "_softmax"))


class ActivationRounder:
    """Rounds activations, and records in `seen` the dtypes of each thing, by key."""

    def __init__(self, asked: Mapping[str, DType]) -> None:
        self.asked = {key: dtype.torch for key, dtype in asked.items()}
        self.seen: dict[str, set[torch.dtype]] = {}

    def see(self, key: str, dtype: torch.dtype) -> torch.dtype | None:
        """Record a dtype, and return the one that is asked for instead."""
        self.seen.setdefault(key, set()).add(dtype)
        return self.asked.get(key)

    def rounded(self, key: str, tensor: Tensor) -> Tensor:
        dtype = self.see(key, tensor.dtype)
        return tensor if dtype is None else tensor.to(dtype).to(tensor.dtype)

    @contextlib.contextmanager
    def around(self, path: ModulePaths) -> Iterator[None]:
        """Change the calls of a forward."""
        with torch.no_grad(), _Calls(path, self):
            yield

    @contextlib.contextmanager
    def hooks(self, model: nn.Module, head: str) -> Iterator[None]:
        """Change the outputs of the modules that make logits and rotary tables."""
        handles = []
        for path, module in model.named_modules():
            rotary = "rotary" if _ROTARY.search(type(module).__name__) else ""
            if key := "logits" if head and path == head else rotary:
                handles.append(module.register_forward_hook(self._hook(key)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, key: str) -> Callable[..., Any]:
        def rounded(item: Any) -> Any:
            floating = isinstance(item, Tensor) and item.is_floating_point()
            return self.rounded(key, item) if floating else item

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return tuple(map(rounded, output)) if isinstance(output, tuple) else rounded(output)

        return hook


class _Calls(TorchFunctionMode):
    def __init__(self, path: ModulePaths, rounder: ActivationRounder) -> None:
        super().__init__()
        self._path, self._rounder = path, rounder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name, rounder = kwargs or {}, getattr(func, "__name__", ""), self._rounder
        if name == "scaled_dot_product_attention":
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            given |= {key: rounder.rounded("kv", given[key]) for key in ("key", "value")}
            dtype = rounder.see("softmax", torch.float32)  # inside the kernel, whatever goes in
            return func(**given) if dtype in (None, torch.float32) else _attention(dtype, given)
        if name in LOSSES:
            logits = args[0] if args else kwargs["input"]
            dtype = rounder.see("logprobs", logits.dtype)
            if dtype is None or name != "cross_entropy":
                return func(*args, **kwargs)
            if args:
                return func(logits.to(dtype), *args[1:], **kwargs)
            return func(**{**kwargs, "input": logits.to(dtype)})
        if (name in _SOFTMAX or name in _PRODUCTS) and _ATTENTION.fullmatch(self._path.current):
            if name in _SOFTMAX:
                inside = kwargs.get("dtype") or args[0].dtype
                dtype = rounder.see("softmax", inside)
                if dtype is None:
                    return func(*args, **kwargs)
                kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
                return func(args[0].to(dtype), *args[1:], **kwargs).to(inside)
            if len(args) >= 2 and all(map(_is_activation, args[:2])):
                # Scores of keys before the softmax, sums of values after it: the cache is on the right.
                return func(args[0], rounder.rounded("kv", args[1]), *args[2:], **kwargs)
        return func(*args, **kwargs)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 3 and not isinstance(value, nn.Parameter)


def _attention(dtype: torch.dtype | None, given: dict[str, Any]) -> Tensor:
    """Attention step by step, with the softmax in a dtype."""
    query, key, value, scale = (given.get(name) for name in ("query", "key", "value", "scale"))
    assert query is not None and key is not None and value is not None and dtype is not None
    if given.get("enable_gqa"):
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = (query @ key.transpose(-1, -2)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.to(dtype).softmax(-1).to(query.dtype) @ value
