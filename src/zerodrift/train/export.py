"""The trained model as a folder that others load, and back.

A whole model is written by `io/safetensors/export.py`; here is what a trainer adds: its tokenizer, adapters
as `peft` writes them, and the way back from a folder or a checkpoint into a model to sample from.

Invariant: every rank calls `export`; a folder that is there is whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.comm.together import together
from zerodrift.engine.engine import Engine
from zerodrift.io.atomic import new_folder
from zerodrift.io.checkpoint.folder import LATEST, CheckpointFolder
from zerodrift.io.checkpoint.items import CheckpointReader, weight_key
from zerodrift.io.checkpoint.manifest import verified
from zerodrift.io.safetensors.export import export as export_model
from zerodrift.model.factory import make
from zerodrift.train import model as models
from zerodrift.train.job import Job
from zerodrift.train.tokens import FILES, Folder, Tokenizer

BESIDE_TOKENIZER = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def export(engine: Engine, folder: Path, job: Job, tokenizer: Tokenizer) -> None:
    """Write the model as it is now, in the dtypes of the `export` column."""
    if job.model.lora is None:
        export_model(engine, folder, overwrite=True)
    else:
        _write_adapters(engine, folder)
    if engine.mesh.rank() == 0 and isinstance(tokenizer, Folder):
        for name in (*FILES, *BESIDE_TOKENIZER):
            if (Path(tokenizer.name) / name).is_file():
                shutil.copyfile(Path(tokenizer.name) / name, folder / name)
    engine.comm.barrier()


def _write_adapters(engine: Engine, folder: Path) -> None:
    """What was trained, and nothing of the frozen model."""
    tensors: dict[str, torch.Tensor] = {}
    for row in engine.plan.rows:
        if row.columns.update is not None:
            tensors[row.name] = engine.full_master(row.name).to("cpu", row.columns.export.torch)
    module: Any = engine.module
    with together(engine.comm):
        if engine.mesh.rank() == 0:
            with new_folder(folder, overwrite=True) as new:
                module.save_pretrained(str(new.path), state_dict=tensors, save_embedding_layers=False)
                new.publish()


def read(folder: Path, job: Job) -> nn.Module:
    """An exported model, in fp32, which holds every dtype that was exported."""
    source = models.source_of(job.model)
    if source.config is None:
        from safetensors.torch import load_file

        made = make(source.text)
        for file in sorted(folder.glob("*.safetensors")):
            made.load_state_dict(load_file(str(file)), strict=False)
        return made
    from transformers import AutoModelForCausalLM

    if job.model.lora is None:
        with models.quiet():
            return AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True
            )
    from peft import PeftModel

    base = models.whole(job.model, source)
    return PeftModel.from_pretrained(base.float(), str(folder))


def read_checkpoint(model: nn.Module, checkpoints: Path) -> None:
    """The weights of the newest checkpoint into a model that has memory for them."""
    place = CheckpointFolder(checkpoints).find(LATEST)
    verified(place)
    found = CheckpointReader(place)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found.whole(weight_key(name)).view(parameter.shape))
