"""Export the trained model for other programs, and read an export or a checkpoint back into a model.

Whole models are written by `weights/export.py`, and adapters by `adapters.py`. A folder that is there is
whole.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import torch
from torch import nn

from zerodrift.checkpoint import state as states
from zerodrift.checkpoint.manifest import SHARED
from zerodrift.engine.engine import Engine
from zerodrift.errors import ConfigError
from zerodrift.model.factory import attempt, make
from zerodrift.model.huggingface import CONFIG
from zerodrift.train.data.tokenizer import FILES, MODELS, Tokenizer, TransformersTokenizer
from zerodrift.train.job import Job
from zerodrift.train.loop import model as models
from zerodrift.train.tools import adapters
from zerodrift.weights.export import export as export_model

BESIDE_TOKENIZER = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def export(engine: Engine, folder: Path, job: Job, tokenizer: Tokenizer, base: str) -> None:
    """Write the model in the dtypes of the `export` column; adapters with the digest of their base.
    Collective."""
    if job.model.lora is None:
        export_model(engine, folder, overwrite=True)
    else:
        adapters.write(engine, folder, job.model.source, base)
    if engine.mesh.rank() == 0 and isinstance(tokenizer, TransformersTokenizer):
        copy_tokenizer(Path(tokenizer.name), folder)
    engine.comm.barrier()


def copy_tokenizer(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and (file.name in (*FILES, *BESIDE_TOKENIZER) or file.suffix in MODELS):
            shutil.copyfile(file, folder / file.name)


def read(folder: Path, job: Job | None) -> nn.Module:
    """Return an exported model in fp32, which holds every exported dtype; `job` trained it.

    Without a job the folder must hold a `config.json`.
    """
    if (folder / CONFIG).is_file() and (job is None or job.model.lora is None):
        return models.load_pretrained(folder, torch.float32)
    if job is None:
        must = "must hold a `config.json`, or lie in its run, beside the `job.json`"
        raise ConfigError(str(folder), must, got="neither")
    source = models.source_of(job.model)
    if job.model.lora is not None:
        return adapters.read(models.whole_model(job.model, source), folder, torch.float32)
    from safetensors.torch import load_file

    model, tensors = make(source.text), dict[str, torch.Tensor]()
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= attempt(functools.partial(load_file, str(file)), str(file), "must be readable")
    load = functools.partial(model.load_state_dict, tensors, strict=False)
    keys = attempt(load, str(folder), "must hold the tensors of the model of this run")
    here = model.state_dict(keep_vars=True)
    filled = {id(here[name]) for name in tensors if name in here}
    missing = [name for name in keys.missing_keys if id(here[name]) not in filled]
    models.require_whole(folder, missing, keys.unexpected_keys)
    return model


def read_checkpoint(model: nn.Module, place: Path) -> None:
    """Copy the weights and buffers of a checkpoint into a model that has memory for them."""
    models.require_whole(place, adapters.copy_weights(place, dict(model.named_parameters())), ())
    with torch.no_grad():
        states.put_buffers(model, states.read_state(place, SHARED)["buffers"])
