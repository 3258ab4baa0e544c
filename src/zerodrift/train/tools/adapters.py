"""Make, write and read adapters of `peft` on a base model.

With `model.lora` the adapters alone are trained, so an export holds them and not their base. The base is
known by a digest of its values, beside its path. Adapters are never put on another base where the digest is
known. A base that rested in a narrow format is rounded to it again, in fp32, so that the adapters meet the
values that they were trained on.
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

from zerodrift.checkpoint import CheckpointReader, new_folder, read_entries, read_plan, verified
from zerodrift.comm import raise_on_all_ranks
from zerodrift.dtypes import DType
from zerodrift.engine import Engine
from zerodrift.errors import ModelError, UnsupportedError
from zerodrift.kernels import narrow
from zerodrift.model import attempt, describe, quiet
from zerodrift.plan import Plan
from zerodrift.train.job import Lora
from zerodrift.weights import SafetensorsWeights, expected_tensors

CONFIG = "adapter_config.json"
"""The file that makes a folder one of adapters."""
BASE = "base.json"
"""The `digest` and `source` of the base, and the names of its parameters by the format they rested in."""
VALUES = 256
"""Values of each parameter in the digest of a base."""


def require_peft(where: str) -> None:
    if importlib.util.find_spec("peft") is None:
        must, todo = "needs `peft`, which reads and makes adapters", "Run `pip install 'zerodrift[peft]'`."
        raise ModelError(where, must, got="no such package", do=todo)


def add_adapters(model: nn.Module, lora: Lora) -> nn.Module:
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
                base = {"source": where, "digest": digest, "formats": _formats(engine.plan)}
                (new.path / BASE).write_text(json.dumps(base, indent=1) + "\n", encoding="utf-8")
                new.publish()


def read(base: nn.Module, folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a base in `dtype`, by default its own, with the adapters of a folder."""
    require_peft(str(folder))
    from peft import PeftModel

    require_base(base, saved_base(folder).get("digest"), str(folder))
    _cast(base, _saved(folder).get("formats"), dtype)
    with quiet():
        load = functools.partial(PeftModel.from_pretrained, base, str(folder))
        return attempt(load, str(folder), "must hold adapters of its base")


def read_from_checkpoint(
    base: nn.Module, lora: Lora, place: Path, digest: str | None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Return a base in `dtype` with the adapters of a checkpoint; `digest` is that of their base."""
    require_base(base, digest, str(place))
    document = read_plan(place)
    _cast(base, None if document is None else _formats(Plan.from_json(document)), dtype)
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


def saved_base(folder: Path) -> dict[str, str]:
    """Return `source` and `digest` of the base; for adapters of others the `source` of their config."""
    try:
        if (folder / BASE).is_file():
            found = _saved(folder)
            return {key: str(found[key]) for key in ("source", "digest")}
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return {"source": str(config.get("base_model_name_or_path") or "")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        must, todo = f"must hold a `{CONFIG}` that can be read", "Export it again."
        raise ModelError(str(folder), must, got="a damaged one, or none", do=todo) from None


def _saved(folder: Path) -> dict[str, Any]:
    file = folder / BASE
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _formats(plan: Plan) -> dict[str, list[str]]:
    """Return the names in the base of what rests in each narrow format."""
    formats: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.columns.storage.dtype.format is not None:
            formats.setdefault(row.columns.storage.dtype.value, []).append(base_name(row.name))
    return formats


def _cast(base: nn.Module, formats: Mapping[str, list[str]] | None, dtype: torch.dtype | None) -> None:
    """Cast a base; to fp32 if it rested in a narrow format, of which it then has the values."""
    if not formats:
        base.to(dtype)
        return
    base.float()
    parameters = dict(base.named_parameters())
    with torch.no_grad():
        for text, names in formats.items():
            for name in names:
                if name not in parameters:
                    must = "must be a parameter of the base, which rested in a narrow format"
                    raise ModelError(name, must, got="no such parameter", do="Name the base of the training.")
                parameters[name].copy_(narrow.round_trip(DType(text), parameters[name]))


def base_name(name: str) -> str:
    """Return the name in the base of a parameter of a model with adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def base_digest(model: nn.Module, weights: Path | None = None) -> str:
    """Return a digest of evenly spread values of each parameter but adapters, whatever their dtype.

    The files of `weights` have the values of parameters without memory.
    """
    digest, files = hashlib.blake2b(digest_size=12), None
    if weights is not None:
        spec = describe(model)
        files = SafetensorsWeights.open(weights, model, expected_tensors(spec.parameters, (), model), False)
    named = [(base_name(n), n, value) for n, value in model.named_parameters() if ".lora_" not in n]
    for short, name, value in sorted(named, key=lambda names: names[0]):
        flat = value.detach().reshape(-1)
        at = np.linspace(0, max(0, flat.numel() - 1), min(VALUES, flat.numel())).astype(np.int64)
        digest.update(f"{short} {list(value.shape)} ".encode())
        if files is not None and files.holds(name):
            chosen = torch.empty(len(at))
            for number, place in enumerate(at.tolist()):
                files.fill(name, place, chosen[number : number + 1])
        else:
            chosen = flat[torch.from_numpy(at).to(flat.device)].float().cpu()
        digest.update(chosen.numpy().tobytes())
    if files is not None:
        files.close()
    return digest.hexdigest()


def require_base(model: nn.Module, digest: str | None, where: str) -> None:
    """Refuse another base than that of a digest, where there is one."""
    if digest and base_digest(model) != digest:
        must = "must go with the base that its adapters were trained on"
        todo = "Name that one: its path is in `base.json` of an export, and in `model.source` of the job."
        raise ModelError(where, must, got="a base with other values", do=todo)
