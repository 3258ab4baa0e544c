"""Call a function of the user that returns a model, written `package.module:callable`.

The function is called without arguments. To describe a model of any size without memory, the call runs
under the meta device. `on_meta` and `attempt` also run other code that builds models, such as `transformers`.

Invariant: `sys.path` is unchanged afterwards, and an exception of the called code becomes a ModelError of one
line.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from zerodrift.errors import ModelError, did_you_mean
from zerodrift.model.module import from_module
from zerodrift.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

CAUSE_SHOWN = 600

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def on_meta(make: Callable[[], T], where: str, must: str, todo: str = "") -> T:
    """Return the result of `make`, called with the meta device as the default device."""
    import torch

    def build() -> T:
        with torch.device("meta"):
            return make()

    return attempt(build, where, must, todo)


def attempt(make: Callable[[], T], where: str, must: str, todo: str = "") -> T:
    """Return the result of `make`; turn an exception into a ModelError of one line, with its cause."""
    try:
        return make()
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(where, must, got=cause(error), do=todo) from error


def cause(error: BaseException) -> str:
    """Describe an exception in one line: its class and its message."""
    message = " ".join(str(error).split())
    if len(message) > CAUSE_SHOWN:
        message = message[:CAUSE_SHOWN] + " ..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def is_factory(text: str) -> bool:
    return _FORM.fullmatch(text) is not None


def from_factory(text: str) -> ModelSpec:
    """Describe the model that the callable returns, which is built without memory."""
    return from_module(_made(text, on_meta), text)


def make(text: str) -> nn.Module:
    """Return the model of the callable, with its weights."""
    return _made(text, attempt)


def call(text: str, what: str, run: Callable[..., Any] = attempt) -> Any:
    """Return the result of the callable, which messages call `what`."""
    if not is_factory(text):
        must = "must be written `package.module:callable`"
        raise ModelError(f"function of {what}", must, got=repr(text))
    # The working folder comes first, as with `python -m`.
    with importable("" if "" in sys.path else os.getcwd(), 0):
        return run(_find(text), text, f"must return {what} when it is called without arguments")


def _made(text: str, run: Callable[..., Any]) -> nn.Module:
    from torch import nn

    module = call(text, "a model", run)
    if not isinstance(module, nn.Module):
        raise ModelError(text, "must return a torch.nn.Module", got=type(module).__qualname__)
    return module


def _find(text: str) -> Callable[[], Any]:
    module_name, _, path = text.partition(":")
    todo = "A name is looked up in the working folder and among installed packages."
    importlib.invalidate_caches()
    target: Any = attempt(
        lambda: importlib.import_module(module_name), text, f"`{module_name}` must be importable", todo
    )
    for name in path.split("."):
        if not hasattr(target, name):
            do = did_you_mean(name, dir(target))
            raise ModelError(text, f"`{module_name}` must have `{path}`", got="none", do=do)
        target = getattr(target, name)
    if not callable(target):
        raise ModelError(text, f"`{path}` must be callable", got=type(target).__qualname__)
    return target


@contextmanager
def importable(folder: str, place: int | None = None) -> Iterator[None]:
    """Search one more folder for modules, after all others or at a place in `sys.path`."""
    added = bool(folder) and folder not in sys.path
    if added:
        sys.path.insert(len(sys.path) if place is None else place, folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)
