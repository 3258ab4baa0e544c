"""A model out of a function of the user's own, written `package.module:callable`.

The function is called without arguments: under the meta device to describe what it makes, so that a model
of any size costs no memory, or as it is to have the model. How a module is read is left to
`model/module.py`.

Invariant: `sys.path` is afterwards what it was before.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zerodrift.errors import ModelError, did_you_mean
from zerodrift.model.meta import attempt, on_meta
from zerodrift.model.module import from_module
from zerodrift.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_factory(text: str) -> bool:
    """Whether `text` has the form `package.module:callable`."""
    return _FORM.fullmatch(text) is not None


def from_factory(text: str) -> ModelSpec:
    """The model that the callable returns, described; it is built without memory."""
    return from_module(_made(text, on_meta), text)


def make(text: str) -> nn.Module:
    """The model that the callable returns, with its weights."""
    return _made(text, attempt)


def call(text: str, what: str, run: Callable[..., Any] = attempt) -> Any:
    """`what` the callable returns, called without arguments."""
    if not is_factory(text):
        must = "must be written `package.module:callable`"
        raise ModelError(f"function of {what}", must, got=repr(text))
    with _working_folder_importable():
        return run(_find(text), text, f"must return {what} when it is called without arguments")


def _made(text: str, run: Callable[..., Any]) -> nn.Module:
    from torch import nn

    module = call(text, "a model", run)
    if not isinstance(module, nn.Module):
        raise ModelError(text, "must return a torch.nn.Module", got=type(module).__qualname__)
    return module


def _find(text: str) -> Callable[[], Any]:
    """The callable that `text` names."""
    module_name, _, path = text.partition(":")
    todo = "A name is looked up in the working folder and among what is installed."
    importlib.invalidate_caches()
    target: Any = attempt(
        lambda: importlib.import_module(module_name), text, f"`{module_name}` must be importable", todo
    )
    for name in path.split("."):
        if not hasattr(target, name):
            raise ModelError(
                text, f"`{module_name}` must have `{path}`", got="none", do=did_you_mean(name, dir(target))
            )
        target = getattr(target, name)
    if not callable(target):
        raise ModelError(text, f"`{path}` must be callable", got=type(target).__qualname__)
    return target


@contextmanager
def importable(folder: str) -> Iterator[None]:
    """Searches another folder last: the one that a run was started in, for its functions."""
    added = bool(folder) and folder not in sys.path
    if added:
        sys.path.append(folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _working_folder_importable() -> Iterator[None]:
    """Searches the working folder first, as `python -m` does."""
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)
