"""Make, write and read adapters of `peft` on a base model.

With `model.lora` the adapters alone are trained, so an export holds them and not their base. The base is
known by a digest of its values, beside its path. Adapters are never put on another base where the digest is
known.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zerodrift.checkpoint import CheckpointReader, new_folder, read_entries, verified
from zerodrift.comm import raise_on_all_ranks
from zerodrift.engine import Engine
from zerodrift.errors import ModelError, UnsupportedError
from zerodrift.model import attempt, quiet
from zerodrift.train.job import Lora

CONFIG = "adapter_config.json"
"""The file that makes a folder one of adapters."""
BASE = "base.json"
"""The `digest` and `source` of the base."""
VALUES = 256
"""Values of each parameter in the digest of a base."""


def require_peft(where: str) -> None:
    if importlib.util.find_spec("peft") is None:
        must, todo = "needs `peft`, which reads and makes adapters", "Run `pip install 'zerodrift[peft]'`."
        raise ModelError(where, must, got="no such package", do=todo)


def add_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    """Return a frozen model with trainable adapters."""
    require_peft("model.lora")
    if not hasattr(model, "config"):
        raise UnsupportedError("model.lora", "must go with a `transformers` model", got=type(model).__name__)
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    with quiet():
        return attempt(lambda: get_peft_model(model, config), "model.lora", "must fit the model")


def write(engine: Engine, folder: Path, source: str, digest: str) -> None:
    """Write the adapters, with the path and digest of their base. Collective."""
    tensors: dict[str, torch.Tensor] = {}
    for row in engine.plan.rows:
        if row.trained:
            export = row.columns.export
            plain = torch.float32 if export.format is not None else export.torch  # peft reads no narrow ones
            tensors[row.name] = engine.parameter(row.name).master.to("cpu", plain)
    module: Any = engine.module
    with raise_on_all_ranks(engine.comm):
        if engine.mesh.rank() == 0:
            path = Path(source).expanduser()
            where = str(path.absolute()) if path.exists() else source
            for config in module.peft_config.values():
                config.base_model_name_or_path = where
            with new_folder(folder, overwrite=True) as new:
                module.save_pretrained(str(new.path), state_dict=tensors, save_embedding_layers=False)
                base = {"source": where, "digest": digest}
                (new.path / BASE).write_text(json.dumps(base, indent=1) + "\n", encoding="utf-8")
                new.publish()


def read(base: nn.Module, folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a base in `dtype`, by default its own, with the adapters of a folder."""
    require_peft(str(folder))
    from peft import PeftModel

    require_base(base, saved_base(folder).get("digest"), str(folder))
    base.to(dtype)
    with quiet():
        load = functools.partial(PeftModel.from_pretrained, base, str(folder))
        return attempt(load, str(folder), "must hold adapters of its base")


def read_from_checkpoint(
    base: nn.Module, lora: Lora, place: Path, digest: str | None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Return a base in `dtype` with the adapters of a checkpoint; `digest` is that of their base."""
    require_base(base, digest, str(place))
    base.to(dtype)
    model = add_adapters(base, lora)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if missing := copy_weights(place, trained):
        got = f"none of `{missing[0]}`" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        must = "must hold the adapters of the model, in their shapes"
        raise ModelError(str(place), must, got=got, do="Set `model.lora` as it was trained.")
    return model


def copy_weights(place: Path, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Copy the weights of a checkpoint, or return the names that it does not hold in their shapes."""
    verified(place)
    reader, table = CheckpointReader(place), read_entries(place)
    for entry in table:
        reader.check(entry)
    entries = {name: entry for entry in table for name in entry.names}
    shapes = {name: entry.shape for name, entry in entries.items()}
    missing = [name for name, value in parameters.items() if shapes.get(name) != tuple(value.shape)]
    with torch.no_grad():
        for name, parameter in parameters.items() if not missing else ():
            parameter.copy_(reader.weight(entries[name]))
    return missing


# --- the base -------------------------------------------------------------------------------------------


def saved_base(folder: Path) -> dict[str, str]:
    """Return `source` and `digest` of the base; for adapters of others the `source` of their config."""
    try:
        if (folder / BASE).is_file():
            found = json.loads((folder / BASE).read_text(encoding="utf-8"))
            return {key: str(found[key]) for key in ("source", "digest")}
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return {"source": str(config.get("base_model_name_or_path") or "")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        must, todo = f"must hold a `{CONFIG}` that can be read", "Export it again."
        raise ModelError(str(folder), must, got="a damaged one, or none", do=todo) from None


def base_digest(model: nn.Module) -> str:
    """Return a digest of evenly spread values of each parameter but adapters, whatever their dtype."""
    digest = hashlib.blake2b(digest_size=12)
    names = (
        (name.removeprefix("base_model.model.").replace(".base_layer.", "."), values)
        for name, values in model.named_parameters()
        if ".lora_" not in name
    )
    for name, values in sorted(names, key=lambda pair: pair[0]):
        flat = values.detach().reshape(-1)
        at = np.linspace(0, max(0, flat.numel() - 1), min(VALUES, flat.numel())).astype(np.int64)
        digest.update(f"{name} {list(values.shape)} ".encode())
        digest.update(flat[torch.from_numpy(at).to(flat.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def require_base(model: nn.Module, digest: str | None, where: str) -> None:
    """Refuse another base than that of a digest, where there is one."""
    if digest and base_digest(model) != digest:
        must = "must go with the base that its adapters were trained on"
        todo = "Name that one: its path is in `base.json` of an export, and in `model.source` of the job."
        raise ModelError(where, must, got="a base with other values", do=todo)
