"""Record operations below autograd and autocast, each with its module and its line of code.

Watched runs, observed engines, dry runs (which also replace how an operation runs) and the count of flops all
use the mode of this file. A cast at a boundary or a pin has the line of the code that it casts for. A call
that the engine or a library makes for itself has no line.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import inspect
import os
import re
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerodrift.plan import CastBy

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
    """Return a context in which `called` is called after every operation.

    `compiled` is whether code inside may be compiled. `run` runs an operation in the place of torch.
    """
    kind = OperationMode if compiled and "torch._dynamo" in sys.modules else _UncompiledMode
    return kind(called, run)


COMPILED = (
    "Code is compiled by torch.compile, which would run differently if its operations were watched: "
    "compute is not seen. Run it with TORCH_COMPILE_DISABLE=1 to see it."
)


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
    """The mode without the wrapper that keeps torch's compiler out of modes.

    The first call of the wrapper imports the compiler, which takes seconds. The hook is private in torch
    (2.13, 2.15). Without the hook a run is only slower.
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


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return the tensors in lists, tuples and dicts. This is faster than torch's pytree."""
    if isinstance(values, torch.Tensor):
        return [values]
    found: list[torch.Tensor] = []
    if isinstance(values, (list, tuple, dict)):
        for item in values.values() if isinstance(values, dict) else values:
            if isinstance(item, torch.Tensor):  # without a call for each of an operation's arguments
                found.append(item)
            elif isinstance(item, (list, tuple, dict)):
                found += tensors_of(item)
    return found


def floating(values: Any, named: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    given = (*values, *named.values()) if named else values
    return [tensor for tensor in tensors_of(given) if tensor.is_floating_point()]


def flops_of(
    operation: Any, arguments: tuple[Any, ...], named: Mapping[str, Any] | None, result: Any
) -> int | None:
    """Count an operation's flops by torch's formula, 0 without one; None if the formula fails."""
    from torch.utils.flop_counter import flop_registry  # imports Triton, for a tenth of a second

    packet = operation._overloadpacket
    if packet is torch.ops.aten._grouped_mm:
        left, right = arguments[0], arguments[1]  # each row is multiplied by one of the matrices
        return int(2 * left.numel() * right.shape[-1])
    formula = flop_registry.get(_LIKE.get(packet, packet))
    if formula is None:
        return 0
    try:
        return int(formula(*arguments, **(named or {}), out_val=result))
    except Exception:  # a formula may refuse valid shapes, as torch 2.11 refused grouped heads
        return None


_FLASH = "_scaled_dot_product_flash_attention"
_LIKE = {
    getattr(torch.ops.aten, f"{_FLASH}_for_cpu{end}"): getattr(torch.ops.aten, f"{_FLASH}{end}")
    for end in ("", "_backward")
}


@contextlib.contextmanager
def forward_flops(model: nn.Module) -> Iterator[list[tuple[str, int | None]]]:
    """Yield a list that gets the name and the flops of each operation of a module's first forward."""
    counts: list[tuple[str, int | None]] = []

    def count(operation: Any, *called: Any) -> None:
        counts.append((name_of(operation), flops_of(operation, *called)))

    mode = every_operation(count, compiled=False)
    running = contextlib.ExitStack()

    def start(*_: Any) -> None:
        begin.remove()
        running.enter_context(mode)

    begin = model.register_forward_pre_hook(start)
    end = model.register_forward_hook(lambda *_: running.close(), always_call=True)
    try:
        yield counts
    finally:
        begin.remove()
        end.remove()


_HERE = os.path.dirname(__file__) + os.sep
_INSPECT = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARY_KEYS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = tuple(os.path.realpath(sysconfig.get_paths()[key]) + os.sep for key in _LIBRARY_KEYS)
_SITES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of packages in any environment, a user's included."""


class ModulePaths:
    """The path of the module whose forward is under way, known by hooks on every module."""

    def __init__(self, model: nn.Module) -> None:
        scripted = torch.jit.ScriptModule  # takes no hooks; its operations count for its caller
        self._modules = [each for each in model.named_modules() if not isinstance(each[1], scripted)]
        self._stack: list[tuple[str, int]] = []
        self._calls: dict[str, int] = {}
        self.failed = ""  # path of the innermost module that raised

    @property
    def current(self) -> str:
        """Path of the innermost module; empty in the model itself, and outside of it."""
        return self.call[0]

    @property
    def call(self) -> tuple[str, int]:
        """The innermost module's path, and the number of its calls before."""
        return self._stack[-1] if self._stack else ("", 0)

    @property
    def inside(self) -> bool:
        return bool(self._stack)

    def enter(self) -> Iterator[Any]:
        """Register hooks that run before all others of a module."""
        for path, module in self._modules:
            yield module.register_forward_pre_hook(functools.partial(self._enter, path), prepend=True)

    def leave(self) -> Iterator[Any]:
        """Register hooks that run after those that a module has."""
        for path, module in self._modules:
            yield module.register_forward_hook(functools.partial(self._leave, path), always_call=True)

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        self.failed = ""
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        self._stack.append((path, call))

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if sys.exc_info()[0] is not None and not self.failed:
            self.failed = path
        self._stack.pop()


@contextlib.contextmanager
def paths_in(model: nn.Module) -> Iterator[ModulePaths]:
    """Track the module that runs, until the context ends."""
    paths = ModulePaths(model)
    handles = [*paths.enter(), *paths.leave()]
    try:
        yield paths
    finally:
        for handle in handles:
            handle.remove()


@functools.cache
def _casts() -> dict[str, CastBy]:
    """Return the engine's files that cast, by path."""
    from zerodrift.engine import compute, nested, pins

    return {compute.__file__: "a boundary", pins.__file__: "a pin", nested.__file__: ""}


@functools.cache
def _is_models(file: str) -> bool | None:
    """Return True for the model's code, False for zerodrift's, None for frames that do not decide."""
    if file.startswith((_TORCH, _INSPECT, "<")) or file in _casts():
        return None
    if file.startswith(_PACKAGE):
        return False
    return None if os.path.basename(file) == "contextlib.py" else True


@functools.cache
def _is_script(file: str) -> bool | None:
    """Return True for a script, False for a library, None for frames that do not decide."""
    if file.startswith(("<", _HERE)):
        return None
    return not (file.startswith((_PACKAGE, *_LIBRARIES, *_targets())) or any(part in file for part in _SITES))


@functools.cache
def _targets() -> tuple[str, ...]:
    """Return the folders of `pip install --target` on the path, except the folder of the script."""
    script = os.path.realpath(os.path.dirname(getattr(sys.modules["__main__"], "__file__", None) or ""))
    folders = (folder for folder in sys.path if folder and os.path.realpath(folder) != script)
    return tuple(folder + os.sep for folder in folders if glob.glob(f"{glob.escape(folder)}/*.dist-info"))


def _frames() -> Iterator[types.FrameType]:
    """Yield the frames of the calls that are under way, the innermost first.

    On a GPU, a backward runs in a thread of autograd while its caller waits in the main thread.
    """
    yield from (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    waiting = sys._current_frames().get(threading.main_thread().ident or 0)
    if waiting is not None and waiting.f_code.co_filename == torch.autograd.graph.__file__:
        yield from (frame for frame, _ in traceback.walk_stack(waiting))


def is_in_function() -> bool:
    """Return True in the backward of a `torch.autograd.Function`, as of a layer that is cut over ranks."""
    files = (frame.f_code.co_filename for frame in _frames())
    around = (torch.autograd.graph.__file__, torch.autograd.function.__file__)
    return next((file == around[1] for file in files if file in around), False)


def _line(frame: types.FrameType, line: int | None = None) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno if line is None else line}"


def line_of_function(function: Any) -> str:
    """Return `file:line` of a function's first line; empty if it is not written in Python."""
    code = getattr(function, "__code__", None)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""


def place_of_code() -> tuple[str, CastBy]:
    """Return `file:line` of the model's code that is under way, and who in the engine casts for it."""
    by: CastBy = ""
    for frame in _frames():
        by = by or _casts().get(frame.f_code.co_filename, "")
        is_models = _is_models(frame.f_code.co_filename)
        if is_models is not None:
            return (_line(frame) if is_models else ""), by
    return "", by


def line_of(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error in the model's code."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [_line(frame, line) for frame, line in frames if _is_models(frame.f_code.co_filename)]
    return lines[-1] if lines else ""


def is_from_script() -> bool:
    """Return True if a script, not a library, makes the call that is under way."""
    known = (_is_script(frame.f_code.co_filename) for frame in _frames())
    return next((is_script for is_script in known if is_script is not None), False)


def line_of_script() -> str:
    """Return `file:line` of the innermost frame that is in no library; empty if there is none."""
    return next((_line(frame) for frame in _frames() if _is_script(frame.f_code.co_filename)), "")
