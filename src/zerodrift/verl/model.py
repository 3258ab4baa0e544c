"""The model of verl's `model` block, its weights for a sampler, and its checkpoints.

If verl's `checkpoint.save_contents` has any of `model`, `optimizer` and `extra`, all three are saved in one
checkpoint of zerodrift, which loads at any stage on any number of ranks. The folder `huggingface` beside it
has the files that `transformers` needs. With `hf_model` these include the weights, in the dtypes of the
`export` column, or the adapter.

Invariants: a language model without an adapter is built without memory, and the engine reads its weights. All
tensors that are handed out together belong to one step. An error on one rank is an error on all.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForTokenClassification
from transformers.dynamic_module_utils import custom_object_save
from verl.models.transformers import monkey_patch
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils import hdfs_io
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.model import convert_weight_keys, get_hf_auto_model_class
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from zerodrift.api import empty
from zerodrift.checkpoint import Allowed, Checkpoints, Part
from zerodrift.comm import raise_on_all_ranks
from zerodrift.engine import Engine, tensor_digest
from zerodrift.errors import CheckpointError, RankError, UnsupportedError, first_line
from zerodrift.model import huggingface
from zerodrift.weights import export, whole_values

TAG = "state"
FOLDER = "huggingface"

Weights = Iterator[tuple[str, torch.Tensor]]


def prepared_model(given: Any) -> tuple[nn.Module, Any]:
    """Return an empty model and the path of its weights. A model with an adapter or a new head is read at
    once, and returned with None."""
    build, config = get_hf_auto_model_class(hf_config=given.hf_config), given.hf_config
    if given.model_type == "language_model" and not given.lora_rank:
        with empty():
            model = build.from_config(config, dtype=config.dtype, trust_remote_code=given.trust_remote_code)
        return _patched(model, given), given.local_path
    if given.model_type == "value_model":
        build = AutoModelForTokenClassification
        if type(config) not in build._model_mapping:
            must = "must be of an architecture that `transformers` can give a head for each token"
            raise UnsupportedError("model.path", must, got=str(config.architectures))
        config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
    model = build.from_pretrained(
        given.local_path, dtype=torch.float32, config=config, trust_remote_code=given.trust_remote_code
    )
    return _patched(model, given), None


def _patch(model: Any, use_remove_padding: bool) -> None:
    """Let verl patch the model. TRL 1.16 has removed a class that verl imports: retry without TRL."""
    try:
        apply_monkey_patch(model=model, use_remove_padding=use_remove_padding, ulysses_sp_size=1)
    except ImportError:
        monkey_patch.is_trl_available = lambda: False
        apply_monkey_patch(model=model, use_remove_padding=use_remove_padding, ulysses_sp_size=1)


def _patched(model: Any, given: Any) -> nn.Module:
    if given.use_liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
    try:
        _patch(model, given.use_remove_padding)
    except (AssertionError, AttributeError, KeyError, NotImplementedError) as error:
        must, kind = "must be of an architecture that verl can patch", type(model).__name__
        raise UnsupportedError("model.path", must, got=f"{kind}: {first_line(error)}") from error
    if given.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    patched: nn.Module = model
    return patched


# --- weights for a sampler --------------------------------------------------------------------------------


def adapter_of(engine: Engine) -> Any:
    """Return the settings of an adapter, or None."""
    return getattr(engine.module, "peft_config", {}).get("default")


def model_weights(engine: Engine, kind: str) -> Weights:
    """Yield the weights by their names in a model's folder; with an adapter, those of the base model."""
    adapter = adapter_of(engine)

    def named(name: str) -> str | None:
        if adapter is None:
            return name
        base = name.removeprefix("base_model.model.").replace(".base_layer", "")
        return None if "lora_" in name else replace_lora_wrapper(base, adapter)

    for own, value in unfuse_moe_params(_whole(engine, named), kind):
        (name,) = convert_weight_keys({own: value}, engine.module)
        yield name, value


def adapter_weights(engine: Engine) -> Weights:
    """Yield the adapter's weights by their names in the adapter's folder."""

    def named(name: str) -> str | None:
        return name.replace(".default.", ".").replace(".default", "") if "lora_" in name else None

    return _whole(engine, named)


def _whole(engine: Engine, named: Callable[[str], str | None]) -> Weights:
    """Yield the whole tensors for which `named` returns a name, unit by unit. All ranks must read all."""
    for unit in engine.plan.units:
        rows = [engine.plan.rows[index] for index in unit.rows]
        rows = [row for row in rows if named(row.name) is not None]
        for row, value in zip(rows, whole_values(engine, rows), strict=True):
            assert value is not None
            for to in map(named, row.names):
                if to is not None:
                    yield to, value
    for path, module in engine.module.named_modules():
        for own, buffer in module.named_buffers(path, recurse=False):
            name = named(own)
            kept = own.rpartition(".")[2] not in module._non_persistent_buffers_set
            if kept and name is not None:
                yield name, buffer.detach().clone()


def counted(weights: Weights, sent: dict[str, str], changes: Callable[[], int]) -> Weights:
    """Add the digest of each tensor to `sent`. Raise if weights change between two tensors."""
    before = changes()

    def read() -> Weights:
        for name, value in weights:
            if changes() != before:
                must, do = "must be read to its end before weights change", "Send the weights, then train."
                got = f"an update after {len(sent)} tensors"
                raise UnsupportedError("get_per_tensor_param", must, got=got, do=do)
            sent[name] = tensor_digest(name, value)
            yield name, value

    return read()


def digests_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {name: tensor_digest(name, value) for name, value in weights}


def require_same(sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Raise unless a sampler holds the tensors that it was sent."""
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        got = f"different bits in {len(wrong)} of {len(sent)} tensors, `{wrong[0]}` first"
        do = "Look for code that casts the tensors, or loads them under other names."
        raise RankError("sampler", "must hold the weights that it was sent", got=got, do=do)


# --- checkpoints ------------------------------------------------------------------------------------------


class SavedRuns:
    """Saves and loads the checkpoints of one engine, by verl's blocks `checkpoint` and `model`."""

    def __init__(self, contents: Any, model: Any) -> None:
        self._contents, self._model = contents, model
        self._adapter_alone = bool(contents.save_lora_only and model.lora_rank)
        self._saved: list[Path] = []

    def save(self, engine: Engine, path: Path, schedule: Any, to: str | None, keep: int | None) -> None:
        """Save a checkpoint, copy it to `to`, and delete all but the last `keep` of this process."""
        wanted = set(self._contents.save_contents)
        client = {"lr_scheduler": None if schedule is None else schedule.state_dict()}
        if wanted - {"hf_model"}:
            saving = Checkpoints(engine, path, quiet=True, shared=True)
            saving.save(TAG, client, frozen=not self._adapter_alone)
        if "hf_model" in wanted:
            _export(engine, path / FOLDER)
        with raise_on_all_ranks(engine.comm):
            if engine.mesh.rank() == 0:
                self._describe(engine, path / FOLDER)
                if to is not None:
                    hdfs_io.makedirs(to, exist_ok=True)
                    hdfs_io.copy(str(path), to, dirs_exist_ok=True)
                self._delete_old(path, keep)

    def _describe(self, engine: Engine, folder: Path) -> None:
        """Write the model's config, tokenizer and code, unless an export wrote them."""
        folder.mkdir(parents=True, exist_ok=True)
        given, model = self._model, engine.module
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()  # type: ignore[operator]
        config = copy.deepcopy(given.hf_config)
        config.architectures = [huggingface.architecture(model)]
        for name, part in (("config.json", config), ("generation_config.json", given.generation_config)):
            if part is not None and not (folder / name).is_file():
                part.save_pretrained(folder)
        if given.get_processor() is not None:
            given.get_processor().save_pretrained(folder)
        if getattr(config, "auto_map", None):
            custom_object_save(model, folder, config=config)

    def _delete_old(self, path: Path, keep: int | None) -> None:
        self._saved = [*(old for old in self._saved if old != path), path]
        if keep:
            for old in self._saved[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
            self._saved = self._saved[-keep:]

    def load(self, engine: Engine, path: Path, schedule: Any) -> None:
        """Load the weights, and moments and schedule if the block names them."""
        wanted = set(self._contents.load_contents)
        if not wanted - {"hf_model"}:
            return
        parts: frozenset[Part] = frozenset()
        if engine.updater is not None and "optimizer" in wanted:
            parts = frozenset({"optimizer", "counts"})
        without: tuple[Allowed, ...] = ("model",) if self._adapter_alone else ()
        with raise_on_all_ranks(engine.comm):
            _require_own(path)
        loaded = Checkpoints(engine, path, quiet=True, shared=True).load_parts(TAG, parts, without)
        if schedule is not None and "extra" in wanted:
            schedule.load_state_dict(loaded.client["lr_scheduler"])


def _export(engine: Engine, folder: Path) -> None:
    """Write a folder that `transformers` loads, or `peft` if there is an adapter."""
    settings = adapter_of(engine)
    if settings is None:
        export(engine, folder, overwrite=True)
        return
    weights = {name: value.cpu().contiguous() for name, value in adapter_weights(engine)}
    with raise_on_all_ranks(engine.comm):
        if engine.mesh.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            settings = copy.copy(settings)
            settings.inference_mode = True
            settings.save_pretrained(folder)


def _require_own(path: Path) -> None:
    if (path / "fsdp_config.json").is_file() and not (path / TAG).is_dir():
        must, got = "must have been saved by this engine", "a checkpoint of verl's engine for fsdp"
        do = "Merge it with `python -m verl.model_merger`, and set `model.path` to the result."
        raise CheckpointError(str(path), must, got=got, do=do)
