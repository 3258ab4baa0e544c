"""Write and read adapters of `peft` on a base model, and merge both into one: `zerodrift convert --merge`.

With `model.lora` only adapters are trained, and an export holds adapters without their base. It names the
base by its path and a digest of its values, and adapters are refused on any other base. A base that was
stored in a narrow format is rounded to this format again, in fp32, to have its values of the training.

The adapters to merge are those of a run, of one of its checkpoints or exports, or of a folder that `peft`
wrote; `peft` computes the sums. The whole base is read into memory. A base that was stored in a narrow format
is merged in fp32 and rounded once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zerodrift import checkpoint
from zerodrift.comm import raise_on_all_ranks
from zerodrift.dtypes import DType
from zerodrift.engine import Engine
from zerodrift.errors import CheckpointError, ModelError, UnsupportedError, first_of
from zerodrift.kernels import narrow
from zerodrift.model import attempt, describe, importable, quiet
from zerodrift.plan import Plan
from zerodrift.train.data.files import advice, path_of
from zerodrift.train.data.tokenizer import copy_tokenizer, has_tokenizer
from zerodrift.train.job import Model
from zerodrift.train.loop import model as models
from zerodrift.train.loop.model import add_adapters, require_peft
from zerodrift.train.loop.run_folder import TrainedModel, base_of, checkpoints_at, model_at
from zerodrift.weights import (
    ConversionResult,
    ConvertOptions,
    SafetensorsWeights,
    expected_tensors,
    exported_dtype,
    open_zerodrift,
    size_in_bytes,
)

CONFIG = "adapter_config.json"
"""The file that makes a folder one of adapters."""
BASE = "base.json"
"""File with the `digest` and `source` of the base, and its parameters by the narrow format of storage."""
VALUES = 256
"""Values of each parameter in the digest of a base."""


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
            with checkpoint.new_folder(folder, overwrite=True) as new:
                module.save_pretrained(str(new.path), state_dict=tensors, save_embedding_layers=False)
                base = {"source": where, "digest": digest, "formats": _formats(engine.plan)}
                (new.path / BASE).write_text(json.dumps(base, indent=1) + "\n", encoding="utf-8")
                new.publish()


def read(base: nn.Module, found: TrainedModel, dtype: torch.dtype | None) -> nn.Module:
    """Return a base in `dtype`, by default its own, with the adapters of an export or a checkpoint."""
    if found.export is not None:
        folder = found.export
        require_peft(str(folder))
        from peft import PeftModel

        saved = saved_base(folder)
        require_base(base, saved.get("digest"), str(folder))
        _cast(base, saved.get("formats"), dtype)
        with quiet():
            load = functools.partial(PeftModel.from_pretrained, base, str(folder))
            return attempt(load, str(folder), "must hold adapters of its base")
    place, job = found.checkpoint, found.job
    assert place is not None and job is not None and job.model.lora is not None
    require_base(base, base_of(place), str(place))
    plan = checkpoint.read_plan(place)
    _cast(base, None if plan is None else _formats(plan), dtype)
    model = add_adapters(base, job.model.lora)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    source = open_zerodrift(place)
    entries = {name: entry for entry in source.entries for name in entry.names}
    shapes = {name: entry.shape for name, entry in entries.items()}
    if missing := [name for name, value in trained.items() if shapes.get(name) != tuple(value.shape)]:
        got = f"none of {first_of([f'`{name}`' for name in missing], 1)}"
        must = "must hold the adapters of the model, in their shapes"
        raise ModelError(str(place), must, got=got, do="Set `model.lora` as it was trained.")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(source.whole(entries[name]))
    return model


def saved_base(folder: Path) -> dict[str, Any]:
    """Return the content of `BASE`; for adapters of other programs only the `source`, from their config."""
    try:
        if (folder / BASE).is_file():
            found = json.loads((folder / BASE).read_text(encoding="utf-8"))
            return {**found, "source": str(found["source"]), "digest": str(found["digest"])}
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return {"source": str(config.get("base_model_name_or_path") or "")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        must, todo = f"must hold a `{CONFIG}` that can be read", "Export it again."
        raise ModelError(str(folder), must, got="a damaged one, or none", do=todo) from None


def _formats(plan: Plan) -> dict[str, list[str]]:
    """Return the parameters that are stored in a narrow format, by format, with their names in the base."""
    formats: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.columns.storage.dtype.format is not None:
            formats.setdefault(row.columns.storage.dtype.value, []).append(base_name(row.name))
    return formats


def _cast(base: nn.Module, formats: Mapping[str, list[str]] | None, dtype: torch.dtype | None) -> None:
    """Cast a base to `dtype`, or to the fp32 values of the narrow formats that it was stored in."""
    if not formats:
        base.to(dtype)
        return
    base.float()
    parameters = dict(base.named_parameters())
    with torch.no_grad():
        for text, names in formats.items():
            for name in names:
                if name not in parameters:
                    must = "must be a parameter of the base, which was stored in a narrow format"
                    raise ModelError(name, must, got="no such parameter", do="Name the base of the training.")
                parameters[name].copy_(narrow.round_trip(DType(text), parameters[name]))


def base_name(name: str) -> str:
    """Return the name that a parameter of a model with adapters has in the base."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def base_digest(model: nn.Module, weights: Path | None = None) -> str:
    """Return a digest of evenly spread values of each parameter of the base, whatever their dtype.

    Values of parameters without memory are read from the files of `weights`.
    """
    digest, files = hashlib.blake2b(digest_size=12), None
    if weights is not None:
        spec = describe(model)
        files = SafetensorsWeights(weights, model, expected_tensors(spec.parameters, (), model), False)
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
    """Refuse a base whose digest is another one than that of the adapters."""
    if digest and base_digest(model) != digest:
        must = "must go with the base that its adapters were trained on"
        todo = "Name that one: its path is in `base.json` of an export, and in `model.source` of the job."
        raise ModelError(where, must, got="a base with other values", do=todo)


# --- merging ----------------------------------------------------------------------------------------------


def merge(
    source: Path, target: Path, options: ConvertOptions | None = None, base_path: str | None = None
) -> ConversionResult:
    """Write the adapters at `source` merged into their base, or the one at `base_path`."""
    options = options or ConvertOptions()
    require_peft("--merge")
    dtype = exported_dtype(options.dtype)
    if dtype is not None and dtype.format is not None:
        must, do = "must be plain with `--merge`", f"Merge first, and convert that with `--dtype {dtype}`."
        raise UnsupportedError("--dtype", must, got=dtype, do=do)
    size = size_in_bytes(options.max_shard_size, "--max-shard-size")
    found = _adapters_at(source, options.tag)
    with importable(found.started_in):
        base, written = _base(found, base_path)
        cast = None if dtype is None else dtype.torch
        written_in = cast or base.dtype
        model: Any = read(base, found, cast)
    _require_untied(model)
    merged = attempt(model.merge_and_unload, str(source), "must hold adapters that can be merged")
    if merged.dtype is not written_in:  # the base was stored in a narrow format
        merged.to(written_in)
    floating = [(name, value) for name, value in merged.named_parameters() if value.is_floating_point()]
    if bad := [name for name, value in floating if not torch.isfinite(value).all()]:
        got = f"{first_of([f'`{name}`' for name in bad], 1)} with some that are not"
        raise CheckpointError(str(source), "must give finite weights", got=got, do="Merge an earlier one.")
    with checkpoint.new_folder(target, options.overwrite) as new, checkpoint.writing(target):
        merged.config.use_cache = True  # off in training
        with quiet():
            merged.save_pretrained(str(new.path), max_shard_size=size)
        places = [place for place in (found.export, Path(written.source).expanduser()) if place is not None]
        if tokenizer := next(filter(has_tokenizer, places), None):
            copy_tokenizer(tokenizer, new.path)
        new.publish()
    sizes = [value.numel() for value in merged.parameters()]
    bytes_written = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    notes = [f"merged into {written.source}"]
    if found.checkpoint is None and not saved_base(found.export or source).get("digest"):
        notes.append("These adapters have no digest of their base: the base was not checked.")
    kind, counts = f"adapters in {found.checkpoint or found.export}", (len(sizes), sum(sizes), bytes_written)
    return ConversionResult(kind, "safetensors files", target, *counts, tuple(notes))


def _adapters_at(source: Path, tag: str) -> TrainedModel:
    if tag:
        source = checkpoint.CheckpointFolder(checkpoints_at(source.expanduser())).find(tag)
    found = model_at(source)
    is_exported = found.export is not None and (found.export / CONFIG).is_file()
    is_trained = found.job is not None and found.job.model.lora is not None
    if not is_exported and (found.checkpoint is None or not is_trained):
        must, got = "must hold adapters to merge", "a whole model"
        raise CheckpointError(str(source), must, got=got, do="Leave `--merge` out.")
    return found


def _base(found: TrainedModel, named: str | None) -> tuple[nn.Module, Model]:
    """Return the base in its own dtype, and the block that names it."""
    if found.job is not None:
        trained = found.job.model.model_copy(update={"lora": None})
        saved = trained.source
    else:
        assert found.export is not None
        saved = saved_base(found.export).get("source", "")
        trained = Model(source=saved or ".", weights="load")
    written = trained.model_copy(update={"source": path_of(saved if named is None else named, "model")})
    where = "the base of the adapters" if named is None else "--model"
    if not written.source or (named is None and not saved):
        raise ModelError(where, "must be known", got="no path of it", do="Name it: `--model PATH`.")
    try:
        source = models.source_of(written)
    except ModelError as error:
        must = "must exist, as it did in training"
        todo = f"Name it: `--model PATH`. {advice(written.source, 'model')}".rstrip()
        raise ModelError(where, must, got=error.got, do=todo) from None
    quantised: Any = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # refused when the model is built
        if source.config is not None:
            quantised = json.loads(source.config.read_text(encoding="utf-8")).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "some method") if isinstance(quantised, dict) else quantised
        must = "must not be quantised: sums would be rounded to its few values"
        todo = "Name the base in full precision: `--model PATH`."
        raise UnsupportedError(where, must, got=f"{method} in {source.config}", do=todo)
    return models.whole_model(source), written


def _require_untied(model: nn.Module) -> None:
    """Refuse adapters on a weight that another module uses without them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    uses = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        weight = getattr(module.get_base_layer(), "weight", None)
        if weight is not None and uses[id(weight)] > 1:
            must = "must have adapters only on weights that nothing else uses"
            got = f"one on `{name.removeprefix('base_model.model.')}`, whose weight is tied to another's"
            todo = "Untie them in the base's config (`tie_word_embeddings: false`), or keep the adapters."
            raise UnsupportedError("--merge", must, got=got, do=todo)
