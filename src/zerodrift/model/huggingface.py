"""Build the model of a `config.json` with `transformers`, without weights, and describe it.

The model is that of `from_pretrained(folder, dtype="auto")`: it has the config's class and dtype, and fp32
for parameters that the architecture keeps in fp32. A quantized checkpoint is described in the dtypes of
training; `ModelSpec.checkpoint` has the dtypes and names in the files. Importing torch and `transformers`
takes seconds, so descriptions are cached on disk, by config, interpreter and installed packages.

Invariant: nothing is downloaded, no code beside the config is run, and nothing is written to stderr. A cached
description equals the one that would be computed. It is not used if an imported file has changed since, nor
in a process that has imported either package, since code may have altered them.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerodrift.dtypes import DType
from zerodrift.errors import ModelError, Problems, did_you_mean
from zerodrift.files import cache_folder
from zerodrift.model import safetensors
from zerodrift.model.document import StoredTensor, read
from zerodrift.model.module import attempt, from_module, on_meta
from zerodrift.model.spec import ModelSpec
from zerodrift.record import decode, encode

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


CONFIG = "config.json"


def is_installed() -> bool:
    """Return True if `transformers` can be imported, without an import."""
    return importlib.util.find_spec("transformers") is not None


def require_installed(path: str | os.PathLike[str], what: str = "a model's config") -> None:
    if not is_installed():
        must, do = f"`transformers` must be installed to read {what}", "Run `pip install 'zerodrift[hf]'`."
        raise ModelError(str(path), must, got="no such package", do=do)


def from_hf(path: str | os.PathLike[str]) -> ModelSpec:
    """Describe the model of a folder with a `config.json`, or of a config file alone."""
    given = Path(path).expanduser()
    file = given / CONFIG if given.is_dir() else given
    problems = Problems()
    document = read(file, problems)
    problems.raise_as(ModelError)
    require_installed(path)
    assert document is not None, "`raise_as` has raised"
    tensors: tuple[StoredTensor, ...] = ()
    if given.is_dir() and safetensors.holds(given):
        tensors = safetensors.list_tensors(given)
    dtypes = [stored.dtype for stored in tensors if stored.dtype.is_floating and stored.dtype.size > 1]
    dtype = dtypes[0] if dtypes else None
    entry = entry_of(document, dtype)
    spec = entry and read_description(entry)
    if not spec:
        was_enabled = gc.isenabled()
        gc.disable()  # collection would take a fifth of the time of the imports
        try:
            spec = _described(file, document, dtype)
        finally:
            if was_enabled:
                gc.enable()
        if entry:
            write_description(entry, spec)
    names = [name for parameter in spec.parameters for name in parameter.names]
    _, checkpoint, formats = safetensors.stored_as(tensors, names)
    return replace(spec, source=f"{path} ({spec.source})", checkpoint=checkpoint, formats=formats)


def _described(file: Path, document: Mapping[str, Any], dtype: DType | None) -> ModelSpec:
    """Describe the model of a config file, with the name of its class as the source."""
    must = "`transformers` must be installed to read a model's config"
    attempt(lambda: importlib.import_module("transformers"), str(file), must)
    with quiet():
        from transformers import CONFIG_MAPPING

        model_type, known = document.get("model_type"), list(CONFIG_MAPPING.keys())
        if model_type not in known:
            must = "`model_type` must be one that the installed `transformers` knows"
            got = "no such key" if model_type is None else repr(model_type)
            do = "Is it the config of a model?"
            if isinstance(model_type, str):
                upgrade = "Upgrade `transformers`; code in a model's folder is not run."
                do = did_you_mean(model_type, known) or upgrade
            raise ModelError(str(file), must, got=got, do=do)
        model = build(file, dtype)
        return from_module(model, type(model).__name__)


def build(file: Path, dtype: DType | None = None) -> PreTrainedModel:
    """Build the model of a config file on the meta device; `dtype` is the default of a config without one."""
    config = read_config(file, dtype)
    # Parameters do not depend on the attention kernel, and another one may need a package or a device.
    config._attn_implementation = "eager"
    model = instantiate(config, file, on_meta)
    keep_in_fp32(model)
    return model


def read_config(file: Path, dtype: DType | None = None) -> PretrainedConfig:
    """Read a config file by `transformers`, without running code beside the file."""
    from transformers import AutoConfig

    def read_file() -> PretrainedConfig:
        return AutoConfig.from_pretrained(str(file), trust_remote_code=False, local_files_only=True)

    config = attempt(read_file, str(file), "must be a config that `transformers` can read")
    if getattr(config, "dtype", None) is None:
        config.dtype = (dtype or DType.FP32).torch
    return config


def instantiate(config: PretrainedConfig, file: Path, run: Callable[..., Any] = attempt) -> PreTrainedModel:
    """Build the model of a config with tied weights; `run` is `attempt` or `on_meta`."""
    from transformers import modeling_utils

    # Version 4 initializes on the meta device: minutes for thousands of experts.
    with getattr(modeling_utils, "no_init_weights", nullcontext)():
        model = run(lambda: _make(config), str(file), "must be a config that a model can be built from")
    model.tie_weights()
    return model


def architecture(model: object) -> str:
    """Return the name of a model's class for its config, without the prefix that `fully_shard` adds."""
    return type(model).__name__.removeprefix("FSDP")


def _make(config: PretrainedConfig) -> PreTrainedModel:
    """Build the config's class, else the causal language model of its type, else the base model."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        klass: Any = getattr(transformers, name, None)
        models = isinstance(klass, type) and issubclass(klass, transformers.PreTrainedModel)
        if models and klass.config_class is type(config):
            # Private; the auto classes call it too. Tested with transformers 4.57 to 5.24.
            return klass._from_config(config)
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    return auto.from_config(config, trust_remote_code=False)


def keep_in_fp32(model: PreTrainedModel) -> None:
    """Cast the parameters that the architecture keeps in fp32, as loading does and building does not."""
    import torch

    low = (torch.float16, torch.bfloat16)
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.dtype in low), None)
    if dtype is None:
        return
    kept = {re.compile(pattern): wide for pattern, wide in _kept(model, dtype).items()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        wide = next((wide for pattern, wide in kept.items() if pattern.search(name)), None)
        if wide is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(wide)


def _kept(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Map regular expressions on names to the dtypes in which the loader keeps those parameters.

    Every branch is private; tested with transformers 4.57 to 5.24.
    """
    import torch
    import transformers

    if hasattr(model, "_get_dtype_plan"):
        plan = model._get_dtype_plan(dtype)
    elif hasattr(model, "dtype_plan"):  # 5.0: the same for every dtype
        plan = model.dtype_plan
    elif hasattr(model, "_keep_in_fp32_modules_strict"):  # 4.57: whole parts of a name
        half = model._keep_in_fp32_modules if dtype is torch.float16 else None
        parts = (*(model._keep_in_fp32_modules_strict or ()), *(half or ()))
        return {rf"(^|\.){part}($|\.)": torch.float32 for part in parts}
    else:
        must = "must name the parameters that it keeps in fp32, by `_get_dtype_plan`"
        do = "Install a version that docs/support.md names."
        raise ModelError(f"transformers {transformers.__version__}", must, got="no such method", do=do)
    return {pattern.replace("*", ".*"): wide for pattern, wide in plan.items()}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, logs and progress bars while a model is built or read. Errors are raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging as transformers_logging

        before, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity(logging.CRITICAL)
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(before)
            if bars:
                transformers_logging.enable_progress_bar()


CACHED = 32
"""Entries on disk; the oldest ones beyond are removed."""


def entry_of(config: Mapping[str, Any], dtype: DType | None) -> Path | None:
    """Return the cache file of a description, which may not exist; None if this process must not use any."""
    folder = cache_folder() if _is_fresh() else None
    if folder is None:
        return None
    known = [config, encode(dtype), sys.version, sys.path, _installed()]
    name = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
    return folder / "models" / f"{name}.json"


def read_description(entry: Path) -> ModelSpec | None:
    """Return the cached description, or None if there is none or an imported file has changed since."""
    try:
        document = json.loads(entry.read_bytes())
        if document["stamp"] != _stamp(document["files"]):
            return None
        return decode(ModelSpec, document["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_description(entry: Path, spec: ModelSpec) -> None:
    """Write a description and the list of files that this process has imported. A full disk is no error."""
    files, new = _imported(), entry.with_suffix(f".{os.getpid()}.new")
    try:
        document = {"files": files, "stamp": _stamp(files), "model": encode(spec)}
        entry.parent.mkdir(exist_ok=True)
        new.write_text(json.dumps(document))
        new.replace(entry)
        entries = sorted(entry.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in entries[:-CACHED]:
            old.unlink()
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()


def _is_fresh() -> bool:
    """Return True if this process has imported neither package."""
    return not {"torch", "transformers"} & sys.modules.keys()


def _installed() -> list[list[str]]:
    """List the installed distributions, with their versions, by folder of `sys.path`."""
    found = []
    for folder in sys.path:
        with contextlib.suppress(OSError):
            names = os.listdir(folder or os.curdir)
            found.append(sorted(name for name in names if name.endswith((".dist-info", ".egg-info", ".pth"))))
    return found


def _imported() -> list[str]:
    """Return the source files of imported modules, without Python's own and, except layers, torch's. A module
    that was generated names no file, such as `<stdin>`."""
    files = set()
    for name, module in list(sys.modules.items()):
        package, path = name.partition(".")[0], getattr(module, "__file__", None)
        is_versioned = package in sys.stdlib_module_names or package == "torch"
        if not path or os.path.basename(path).startswith("<"):
            continue
        if not is_versioned or name.startswith("torch.nn.modules"):
            files.add(os.path.abspath(path))
    return sorted(files)


def _stamp(files: Iterable[str]) -> str:
    """Return a hash of the sizes and times of files."""
    states = ((file, os.stat(file)) for file in files)
    found = [(file, state.st_size, state.st_mtime_ns) for file, state in states]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
