"""Describe or build a model from any accepted form: a folder, a file, a function or a module.

`--model X` of the command line and every function of the Python API that takes a model call `describe`.
`build_runnable` is for code that calls the model. A function of the user is written
`package.module:callable`, and is called without arguments.

Invariant: anything else is refused by one error that lists the accepted forms. `sys.path` is unchanged after
a call, and an exception of the called code becomes a ModelError of one line.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerodrift import files
from zerodrift.errors import ModelError, did_you_mean, first_line, kind_of, nearest_path
from zerodrift.model import huggingface, safetensors
from zerodrift.model.huggingface import from_hf
from zerodrift.model.module import attempt, cause, from_module, on_meta
from zerodrift.model.safetensors import from_safetensors
from zerodrift.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn

ACCEPTED = (
    "a folder with `config.json`, or a config file",
    "a `.safetensors` file, a `.safetensors.index.json`, or a folder with either",
    "a function that returns a model, `package.module:callable`",
    "in Python, a torch.nn.Module or a ModelSpec",
)


def describe(model: str | os.PathLike[str] | nn.Module | ModelSpec) -> ModelSpec:
    """Describe the names, shapes, dtypes and module classes of a model, without its weights.

    `model` is a `torch.nn.Module`, a folder or file with a `transformers` config, safetensors files, or
    `package.module:function` for a function that returns a model.
    """
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, (str, os.PathLike)):
        return _from_text(model)
    # A module can only exist if torch has been imported.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return from_module(model)
    raise _refused("model", kind_of(model), "Give an instance of it." if isinstance(model, type) else "")


def _from_text(text: str | os.PathLike[str]) -> ModelSpec:
    try:
        path = Path(text).expanduser()
        folder, file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, or a home that does not exist
        raise _refused(str(text), first_line(error)) from None
    if folder:
        weights = safetensors.holds(path)
        if (path / huggingface.CONFIG).is_file() and (huggingface.is_installed() or not weights):
            return from_hf(text)
        if not weights:
            raise _refused(str(text), "a folder with neither a config nor safetensors files")
        spec = from_safetensors(text)
        if (path / huggingface.CONFIG).is_file():
            source = f"{text} (tensor headers only: transformers is not installed)"
            return replace(spec, source=source)
        return spec
    if file:
        if path.name.endswith((safetensors.SUFFIX, safetensors.INDEX_SUFFIX)):
            return from_safetensors(text)
        if path.suffix == ".json":
            return from_hf(text)
        raise _refused(str(text), f"a file that ends in {path.suffix!r}")
    if isinstance(text, str) and is_factory(text):
        return from_module(make(text, on_meta), text)
    todo = nearest_path(text)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(text)) and not path.parent.exists():
        command = f"hf download {text} --local-dir {path.name}"
        todo = f"zerodrift downloads nothing: run `{command}` and give that folder."
    raise _refused(str(text), files.kind(path) or "no such file or folder", todo)


def _refused(where: str, got: str, todo: str = "") -> ModelError:
    return ModelError(where, f"must be {'; or '.join(ACCEPTED)}", got=got, do=todo)


def build_runnable(text: str) -> nn.Module:
    """Build the model of a config or a function in training mode, with parameters without memory.

    Buffers have values. A model of `transformers` has the attention kernels that it would be trained with.
    """
    from zerodrift.model.empty_model import NoLargeMemory, empty

    path = Path(text).expanduser()
    config = path / huggingface.CONFIG if path.is_dir() else path
    if config.is_file() and config.suffix == ".json" and not config.name.endswith(safetensors.INDEX_SUFFIX):
        huggingface.require_installed(text)
        with huggingface.quiet(), empty(), NoLargeMemory():
            settings = huggingface.read_config(config)
            settings.use_cache = False
            return huggingface.instantiate(settings, config).train()
    if is_factory(text) and not path.exists():
        with empty(), NoLargeMemory():
            model = make(text)
        return model.train()
    must = "must be a model with code, a `transformers` config or `package.module:function`, to be run"
    raise ModelError(text, must, got="safetensors files, which hold tensors only")


# --- functions of the user ------------------------------------------------------------------------------

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_factory(text: str) -> bool:
    return _FORM.fullmatch(text) is not None


def make(text: str, run: Callable[..., Any] = attempt) -> nn.Module:
    """Return the model of the callable, with its weights unless `run` is `on_meta`."""
    from torch import nn

    module = call(text, "a model", run)
    if not isinstance(module, nn.Module):
        raise ModelError(text, "must return a torch.nn.Module", got=type(module).__qualname__)
    return module


def call(text: str, what: str, run: Callable[..., Any] = attempt) -> Any:
    """Return the result of the callable; `what` names it in messages."""
    if not is_factory(text):
        must = "must be written `package.module:callable`"
        raise ModelError(f"function of {what}", must, got=repr(text))
    # The working folder comes first, as with `python -m`.
    with importable("" if "" in sys.path else os.getcwd(), 0):
        return run(_find(text), text, f"must return {what} when it is called without arguments")


def _find(text: str) -> Callable[[], Any]:
    module_name, _, path = text.partition(":")
    if os.path.isfile(module_name):
        module_name = module_name.removesuffix(".py")
    importlib.invalidate_caches()
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        todo = "A name is looked up in the working folder and among installed packages."
        todo = todo if isinstance(error, ImportError) else _EXECUTED
        raise ModelError(text, f"`{module_name}` must be importable", got=cause(error), do=todo) from error
    for name in path.split("."):
        if not hasattr(target, name):
            do = did_you_mean(name, dir(target))
            raise ModelError(text, f"`{module_name}` must have `{path}`", got="none", do=do)
        target = getattr(target, name)
    kind = type(target).__qualname__
    if hasattr(target, "named_parameters") and not isinstance(target, type):
        raise ModelError(text, f"`{path}` must be a function that returns a model", got=kind, do=_EXECUTED)
    if not callable(target):
        raise ModelError(text, f"`{path}` must be callable", got=kind)
    return target


_EXECUTED = (
    "A file is executed when it is imported: put the model into a function, as in `train.py:make_model`, "
    'and the training under `if __name__ == "__main__":`.'
)


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
