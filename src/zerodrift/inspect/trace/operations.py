"""Record operations below autograd and autocast, each with its module and its line of the script or the
model.

Everything that looks at operations stands on the one mode here: a watched run, our engine beside its plan, a
dry run (which also replaces how an operation is run), the count of flops. A cast at a boundary or a pin has
the line of the code that it casts for. A call that the engine or a library makes for itself has none.
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
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    """Return a context in which `called` hears of every operation, after it ran.

    `compiled` is whether anything inside may be compiled. `run` runs an operation instead of torch.
    """
    kind = OperationMode if compiled and "torch._dynamo" in sys.modules else _UncompiledMode
    return kind(called, run)


COMPILED = (
    "Code is compiled by torch.compile, which goes other ways where operations are watched: "
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


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


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


def flops_of(
    operation: Any, arguments: tuple[Any, ...], named: Mapping[str, Any] | None, result: Any
) -> int | None:
    """Count an operation's flops by torch's formula, 0 without one; None if the formula fails."""
    from torch.utils.flop_counter import flop_registry  # imports Triton, for a tenth of a second

    packet = operation._overloadpacket
    if packet is torch.ops.aten._grouped_mm:
        left, right = arguments[0], arguments[1]  # each row meets one of the matrices
        return int(2 * left.numel() * right.shape[-1])
    formula = flop_registry.get(_LIKE.get(packet, packet))
    if formula is None:
        return 0
    try:
        return int(formula(*arguments, **(named or {}), out_val=result))
    except (
        Exception
    ):  # a formula may refuse shapes that the operation takes, as torch 2.11's did grouped heads
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
"""Folders of packages in any path: those of a user, or of an environment below this one."""


class ModulePaths:
    """The path of the module whose forward is under way, known by hooks on every module."""

    def __init__(self, model: nn.Module) -> None:
        scripted = torch.jit.ScriptModule  # takes no hooks, and counts as part of its caller
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
    """Return True for code of the model, False for ours, None for frames between the two."""
    if file.startswith((_TORCH, _INSPECT, "<")) or file in _casts():
        return None
    if file.startswith(_PACKAGE):
        return False
    return None if os.path.basename(file) == "contextlib.py" else True


@functools.cache
def _is_script(file: str) -> bool | None:
    """Return True for a script, False for a library, None for frames between the two."""
    if file.startswith(("<", _HERE)):
        return None
    return not (file.startswith((_PACKAGE, *_LIBRARIES, *_targets())) or any(part in file for part in _SITES))


@functools.cache
def _targets() -> tuple[str, ...]:
    """Return the folders of `pip install --target` on the path, which have the names of no environment.

    Except the folder of the script: Python puts it on the path whatever lies there.
    """
    script = os.path.realpath(os.path.dirname(getattr(sys.modules["__main__"], "__file__", None) or ""))
    folders = (folder for folder in sys.path if folder and os.path.realpath(folder) != script)
    return tuple(folder + os.sep for folder in folders if glob.glob(f"{glob.escape(folder)}/*.dist-info"))


def _frames() -> Iterator[tuple[str, types.FrameType]]:
    """Yield the files and frames of the calls that are under way, the innermost first.

    The backward of a GPU runs in a thread of autograd, and its caller waits in the main thread.
    """
    yield from _outwards(sys._getframe(1))
    waiting = sys._current_frames().get(threading.main_thread().ident or 0)
    if waiting is not None and waiting.f_code.co_filename == torch.autograd.graph.__file__:
        yield from _outwards(waiting)


def _outwards(frame: types.FrameType | None) -> Iterator[tuple[str, types.FrameType]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame
        frame = frame.f_back


def _line(frame: types.FrameType, line: int | None = None) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno if line is None else line}"


def place_of_code() -> tuple[str, CastBy]:
    """Return `file:line` of the model's code that is under way, and who in the engine casts for it."""
    by: CastBy = ""
    for file, frame in _frames():
        by = by or _casts().get(file, "")
        is_models = _is_models(file)
        if is_models is not None:
            return (_line(frame) if is_models else ""), by
    return "", by


def line_of(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error in the model's code."""
    found, trace_back = "", error.__traceback__
    while trace_back is not None:
        if _is_models(trace_back.tb_frame.f_code.co_filename):
            found = _line(trace_back.tb_frame, trace_back.tb_lineno)
        trace_back = trace_back.tb_next
    return found


def is_from_script() -> bool:
    """Return True if a script, not a library for itself, makes the call that is under way."""
    known = (_is_script(file) for file, _ in _frames())
    return next((is_script for is_script in known if is_script is not None), False)


def line_of_script() -> str:
    """Return `file:line` of the innermost frame that is in no library; empty if there is none."""
    return next((_line(frame) for file, frame in _frames() if _is_script(file)), "")
