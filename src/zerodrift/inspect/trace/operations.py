"""The recorder of operations: calls a listener after every operation below autograd and autocast.

Everything that looks at operations stands on it: a watched run, our engine beside its plan, a dry run (which
also replaces how an operation is run), the count of flops.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

VIEWS = frozenset((
    "alias", "as_strided", "chunk", "contiguous", "detach", "expand", "lift_fresh", "permute", "reshape",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten",
    "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
))  # fmt: skip
"""Operations of aten whose result is the tensor itself."""

CASTS = frozenset(["_to_copy", "clone", "to"])
"""Operations whose result is a copy of the tensor, perhaps in another dtype."""

Listener = Callable[[Any, tuple[Any, ...], dict[str, Any] | None, Any], None]
"""Takes an operation, its arguments, and its result."""


def every_operation(
    called: Listener, compiled: bool = True, run: Callable[..., Any] | None = None
) -> TorchDispatchMode:
    """Return a context in which `called` hears of every operation, after it ran.

    `compiled` is whether anything inside may be compiled. `run` runs an operation instead of torch.
    """
    kind = OperationMode if compiled and "torch._dynamo" in sys.modules else _UncompiledMode
    return kind(called, run)


def anything_compiled() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"].get("ok"))


class OperationMode(TorchDispatchMode):
    """The one mode of torch's that records operations."""

    def __init__(self, called: Listener, run: Callable[..., Any] | None) -> None:
        super().__init__()
        self._called, self._run = called, run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._run is not None:
            out = self._run(func, args, kwargs or {})
        else:
            out = func(*args, **kwargs) if kwargs else func(*args)
        self._called(func, args, kwargs, out)
        return out


class _UncompiledMode(OperationMode):
    """The same without the wrapper by which torch keeps its compiler away from a mode.

    That wrapper's first call imports the compiler, which takes seconds. Private in torch (2.13, 2.15); with
    the wrapper a run is only slower.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    __torch_dispatch__ = inspect.unwrap(OperationMode.__torch_dispatch__)


def name_of(func: Any) -> str:
    name: str = func.overloadpacket.__name__
    return name


@functools.cache
def computing(func: Any) -> str:
    """Return the name of an operation that computes with values; empty for any other."""
    name = name_of(func)
    return name if func.namespace == "aten" and name not in VIEWS and not _COPIES.match(name) else ""


_COPIES = re.compile(r"copy_$|_foreach_copy|new_|.*_like$")
"""Operations that copy, or that take a shape and no values."""


def floating(args: Any, kwargs: Any, also_bytes: bool = False) -> Iterator[torch.Tensor]:
    """Yield floating tensors among arguments, in lists too."""
    for item in args:
        if isinstance(item, torch.Tensor):
            if item.is_floating_point() or (also_bytes and item.dtype in (torch.uint8, torch.int8)):
                yield item
        elif isinstance(item, (list, tuple)):
            yield from floating(item, None, also_bytes)
    if kwargs:
        yield from floating(kwargs.values(), None, also_bytes)


def flops_of(operation: Any, arguments: tuple[Any, ...], named: Mapping[str, Any] | None, result: Any) -> int:
    """Count one operation's flops, if torch has a formula for it or for its like."""
    packet = operation._overloadpacket
    if packet is torch.ops.aten._grouped_mm:
        left, right = arguments[0], arguments[1]  # each row meets one of the matrices
        return int(2 * left.numel() * right.shape[-1])
    formula = flop_registry.get(_LIKE.get(packet, packet))
    return 0 if formula is None else int(formula(*arguments, **(named or {}), out_val=result))


_FLASH = "_scaled_dot_product_flash_attention"
_LIKE = {
    getattr(torch.ops.aten, f"{_FLASH}_for_cpu{end}"): getattr(torch.ops.aten, f"{_FLASH}{end}")
    for end in ("", "_backward")
}
