"""Every operation below autograd and autocast, as long as a context lasts; and what one computes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

VIEWS = frozenset(
    [
        *("alias", "as_strided", "chunk", "contiguous", "detach", "expand", "lift_fresh", "permute"),
        *("reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"),
        *("unflatten", "unsqueeze", "view", "_reshape_alias", "_unsafe_view"),
    ]
)
"""Operations of aten whose result is the tensor itself."""

CASTS = frozenset(["_to_copy", "clone", "to"])
"""Those whose result is a copy of it, perhaps in another dtype."""

Called = Callable[[Any, tuple[Any, ...], dict[str, Any] | None, Any], None]
"""Takes an operation, its arguments, and what it returned."""


def every_operation(called: Called, compiled: bool = True) -> TorchDispatchMode:
    """A context in which `called` is told of every operation, after it ran. `compiled` is whether anything in
    it may be compiled."""
    return _Mode(called) if compiled and "torch._dynamo" in sys.modules else _ModeUncompiled(called)


def anything_compiled() -> bool:
    """Whether torch has compiled code in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"].get("ok"))


class _Mode(TorchDispatchMode):
    def __init__(self, called: Called) -> None:
        super().__init__()
        self._called = called

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        self._called(func, args, kwargs, out)
        return out


class _ModeUncompiled(_Mode):
    """The same where no compiler is: torch keeps its own away from a mode by a wrapper whose first call
    imports it, which takes seconds. Private in torch (2.13, 2.15), and without it only slower."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    __torch_dispatch__ = inspect.unwrap(_Mode.__torch_dispatch__)


def flops_of(operation: Any, arguments: tuple[Any, ...], named: Mapping[str, Any] | None, result: Any) -> int:
    """Of one operation, where torch has a formula for it or for its like."""
    packet = operation._overloadpacket
    if packet is torch.ops.aten._grouped_mm:
        left, right = arguments[0], arguments[1]  # each row meets one of the matrices
        return int(2 * left.numel() * right.shape[-1])
    formula = flop_registry.get(_LIKE.get(packet, packet))
    return 0 if formula is None else int(formula(*arguments, **(named or {}), out_val=result))


_LIKE = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
