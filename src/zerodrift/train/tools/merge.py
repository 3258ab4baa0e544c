"""Merge adapters and their base into one model: `zerodrift convert --merge`.

The adapters are those of a run, of one of its checkpoints or exports, or of a folder that `peft` wrote;
`peft` computes the sums. The base is read whole into memory, and must be the one that the adapters were
trained on. Where it rested in a narrow format, its decoded values are merged in fp32 and rounded once.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.checkpoint import CheckpointFolder, new_folder, writing
from zerodrift.errors import CheckpointError, ModelError, UnsupportedError
from zerodrift.model import attempt, importable, quiet
from zerodrift.train.data.files import advice, path_of
from zerodrift.train.data.tokenizer import copy_tokenizer, has_tokenizer
from zerodrift.train.job import Model
from zerodrift.train.loop import model as models
from zerodrift.train.loop.run_folder import TrainedModel, base_of, checkpoints_at, model_at
from zerodrift.train.tools import adapters
from zerodrift.weights import ConversionResult, ConvertOptions, exported_dtype, size_in_bytes


def merge(
    source: Path, target: Path, options: ConvertOptions | None = None, base_path: str | None = None
) -> ConversionResult:
    """Write the model that the adapters at `source` and their base make, by default in the dtype of the base.

    Without a `base_path` the base is that of the training.
    """
    options = options or ConvertOptions()
    adapters.require_peft("--merge")
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
        model: Any
        if found.export is not None:
            model = adapters.read(base, found.export, cast)
        else:
            assert found.checkpoint is not None and found.job is not None and found.job.model.lora is not None
            digest = base_of(found.checkpoint)
            model = adapters.read_from_checkpoint(base, found.job.model.lora, found.checkpoint, digest, cast)
    _require_untied(model)
    merged = attempt(model.merge_and_unload, str(source), "must hold adapters that can be merged")
    if merged.dtype is not written_in:  # the base rested in a narrow format
        merged.to(written_in)
    floating = [(name, value) for name, value in merged.named_parameters() if value.is_floating_point()]
    if bad := [name for name, value in floating if not torch.isfinite(value).all()]:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        got = f"`{bad[0]}`{more} with some that are not"
        raise CheckpointError(str(source), "must come to finite weights", got=got, do="Merge an earlier one.")
    with new_folder(target, options.overwrite) as new, writing(target):
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
    if found.checkpoint is None and not adapters.saved_base(found.export or source).get("digest"):
        notes.append("Nothing says which base these adapters were trained on: it was taken at its name.")
    kind, counts = f"adapters in {found.checkpoint or found.export}", (len(sizes), sum(sizes), bytes_written)
    return ConversionResult(kind, "safetensors files", target, *counts, tuple(notes))


def _adapters_at(source: Path, tag: str) -> TrainedModel:
    if tag:
        source = CheckpointFolder(checkpoints_at(source.expanduser())).find(tag)
    found = model_at(source)
    is_exported = found.export is not None and (found.export / adapters.CONFIG).is_file()
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
        saved = adapters.saved_base(found.export).get("source", "")
        trained = Model(source=saved or ".", weights="load")
    written = trained.model_copy(update={"source": path_of(saved if named is None else named, "model")})
    where = "the base of the adapters" if named is None else "--model"
    if not written.source or (named is None and not saved):
        raise ModelError(where, "must be known", got="no path of it", do="Name it: `--model PATH`.")
    try:
        source = models.source_of(written)
    except ModelError as error:
        must = "must be there, as it was in training"
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
    return models.whole_model(written, source), written


def _require_untied(model: nn.Module) -> None:
    """Refuse adapters on a weight that another module uses without them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    uses = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        weight = getattr(module.get_base_layer(), "weight", None)
        if weight is not None and uses[id(weight)] > 1:
            must = "must go with adapters on weights that nothing else uses"
            got = f"one on `{name.removeprefix('base_model.model.')}`, whose weight is tied to another's"
            todo = "Untie them in the base's config (`tie_word_embeddings: false`), or keep the adapters."
            raise UnsupportedError("--merge", must, got=got, do=todo)
