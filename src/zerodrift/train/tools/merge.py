"""Adapters and their base made one model: `zerodrift convert --merge`.

What is merged are the adapters of a run, of one of its checkpoints or exports, or of a folder that `peft`
wrote; `peft` computes the sums. The base is read whole into memory.

Invariant: the base is the one that the adapters were trained on, and what is written computes what base and
adapters compute, but for the rounding of the sums.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.errors import CheckpointError, ModelError, UnsupportedError
from zerodrift.io.atomic import new_folder
from zerodrift.io.checkpoint.folder import CheckpointFolder
from zerodrift.io.convert import Converted
from zerodrift.io.paths import writing
from zerodrift.io.safetensors.export import exported_dtype
from zerodrift.io.safetensors.files import SHARD_SIZE, size_in_bytes
from zerodrift.model.factory import importable
from zerodrift.model.meta import attempt
from zerodrift.train.data.hub import advice, path_of
from zerodrift.train.data.tokenizer import has_tokenizer
from zerodrift.train.loop import model as models
from zerodrift.train.loop.job import Model
from zerodrift.train.tools import adapters
from zerodrift.train.tools.artifacts import FoundModel, base_of, checkpoints_at, model_at
from zerodrift.train.tools.export import copy_tokenizer


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How to merge."""

    base: str | None = None
    """Where the base is; None: where it was in training."""
    dtype: str | None = None
    """None: that of the base."""
    max_shard_size: int | str = SHARD_SIZE
    overwrite: bool = False
    tag: str = ""


def merge(source: Path, target: Path, asked: MergeOptions | None = None) -> Converted:
    """Write the model that the adapters at `source` and their base come to."""
    asked = asked or MergeOptions()
    adapters.require_peft("--merge")
    dtype = exported_dtype(asked.dtype)
    size = size_in_bytes(asked.max_shard_size, "--max-shard-size")
    found = _found(source, asked.tag)
    with importable(found.started_in):
        base, written = _base(found, asked.base)
        model: Any = _with_adapters(base, found, None if dtype is None else dtype.torch)
    _require_weights_of_its_own(model)
    merged = attempt(model.merge_and_unload, str(source), "must hold adapters that can be merged")
    _require_finite(merged, source)
    with new_folder(target, asked.overwrite) as new, writing(target):
        merged.config.use_cache = True  # which training turns off
        with models.quiet():
            merged.save_pretrained(str(new.path), max_shard_size=size)
        for place in (found.export, Path(written.source).expanduser()):
            if place is not None and has_tokenizer(place):
                copy_tokenizer(place, new.path)
                break
        new.publish()
    sizes = [value.numel() for value in merged.parameters()]
    held = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    notes = [f"merged into {written.source}"]
    if found.checkpoint is None and not adapters.saved_base(found.export or source).get("digest"):
        notes.append("Nothing says which base these adapters were trained on: it was taken at its name.")
    kind = f"adapters in {found.checkpoint or found.export}"
    return Converted(kind, "safetensors files", target, len(sizes), sum(sizes), held, tuple(notes))


def _found(source: Path, tag: str) -> FoundModel:
    """The adapters at a path."""
    if tag:
        source = CheckpointFolder(checkpoints_at(source.expanduser())).find(tag)
    found = model_at(source)
    are_adapters = found.export is not None and (found.export / adapters.CONFIG).is_file()
    trained = found.job is not None and found.job.model.lora is not None
    if not are_adapters and (found.checkpoint is None or not trained):
        must, got = "must hold adapters to merge", "a whole model"
        raise CheckpointError(str(source), must, got=got, do="Leave `--merge` out.")
    return found


def _base(found: FoundModel, named: str | None) -> tuple[nn.Module, Model]:
    """The base in its own dtype, and what names it."""
    if found.job is not None:
        trained = found.job.model.model_copy(update={"lora": None})
        saved = trained.source
    else:
        assert found.export is not None
        saved = adapters.saved_base(found.export).get("source", "")
        trained = Model(source=saved or ".", weights="load")
    place = path_of(saved if named is None else named, "model")
    written = trained.model_copy(update={"source": place})
    where = "the base of the adapters" if named is None else "--model"
    if not written.source or (named is None and not saved):
        raise ModelError(where, "must be known", got="no path of it", do="Name it: `--model PATH`.")
    try:
        source = models.source_of(written)
    except ModelError as error:
        must = "must be there, as it was in training"
        todo = f"Name it: `--model PATH`. {advice(written.source, 'model')}".rstrip()
        raise ModelError(where, must, got=error.got, do=todo) from None
    if source.config is not None:
        _require_not_quantised(source.config, where)
    return models.whole_model(written, source), written


def _require_not_quantised(config: Path, where: str) -> None:
    try:
        quantised = json.loads(config.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return  # whoever builds the model says what is wrong with it
    if quantised:
        method = quantised.get("quant_method", "some method") if isinstance(quantised, dict) else quantised
        must, got = "must not be quantised: sums would be rounded to its few values", f"{method} in {config}"
        raise UnsupportedError(where, must, got=got, do="Name the base in full precision: `--model PATH`.")


def _with_adapters(base: nn.Module, found: FoundModel, dtype: torch.dtype | None) -> nn.Module:
    if found.export is not None:
        return adapters.read(base, found.export, dtype)
    assert found.checkpoint is not None and found.job is not None and found.job.model.lora is not None
    lora, digest = found.job.model.lora, base_of(found.checkpoint)
    return adapters.read_from_checkpoint(base, lora, found.checkpoint, digest, dtype)


def _require_weights_of_its_own(model: nn.Module) -> None:
    """That no weight is changed which something without that adapter uses too."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    uses = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        weight = getattr(module.get_base_layer(), "weight", None)
        if weight is not None and uses[id(weight)] > 1:
            layer = name.removeprefix("base_model.model.")
            raise UnsupportedError(
                "--merge",
                "must go with adapters on weights that nothing else uses",
                got=f"one on `{layer}`, whose weight is tied to another's",
                do="Untie them in the base's config (`tie_word_embeddings: false`), or keep the adapters.",
            )


def _require_finite(model: nn.Module, source: Path) -> None:
    bad = [name for name, value in _floating(model) if not torch.isfinite(value).all()]
    if bad:
        got = (
            f"`{bad[0]}`" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "") + " with some that are not"
        )
        raise CheckpointError(str(source), "must come to finite weights", got=got, do="Merge an earlier one.")


def _floating(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, value) for name, value in model.named_parameters() if value.is_floating_point())
