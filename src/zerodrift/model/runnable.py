"""A model that can be run without its weights: built like one to be trained, its parameters without memory.

A plan needs names and shapes (`sources.py`); this is for whoever calls the model. Buffers have their values,
and a model of `transformers` has the kernels that it would be trained with.

Invariant: only a source with code is accepted, and what is returned is in training mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zerodrift.dtypes import DType
from zerodrift.errors import ModelError
from zerodrift.model import huggingface, safetensors
from zerodrift.model.empty import WithoutValues, empty
from zerodrift.model.factory import is_factory, make
from zerodrift.model.meta import attempt

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def runnable(text: str) -> nn.Module:
    """The model of a config or a function."""
    path = Path(text).expanduser()
    config = path / huggingface.CONFIG if path.is_dir() else path
    if config.is_file() and config.suffix == ".json" and not config.name.endswith(safetensors.INDEX_SUFFIX):
        return _from_config(text, config).train()
    if is_factory(text) and not path.exists():
        with empty(), WithoutValues():
            model = make(text)
        return model.train()
    must = "must be a model with code, a `transformers` config or `package.module:function`, to be run"
    raise ModelError(text, must, got="safetensors files, which hold tensors only")


def _from_config(text: str, file: Path) -> PreTrainedModel:
    huggingface.require_installed(text)
    must = "must be a config that a model can be built from"
    with huggingface.quiet(), empty(), huggingface.without_values(), WithoutValues():
        config = attempt(lambda: huggingface.read_config(file), str(file), must)
        config.use_cache = False
        if getattr(config, "dtype", None) is None:
            config.dtype = DType.FP32.torch
        model = attempt(lambda: huggingface.instantiate(config), str(file), must)
        model.tie_weights()
    return model
