"""verl's `checkpoint.save_contents` and `load_contents`, in the engine's own checkpoints.

The engine's state is one checkpoint with `model`, `optimizer` and `extra`, and loads at any stage on any
number of ranks; it is saved if any of them is asked for. The folder `huggingface` beside it has what
`transformers` needs: with `hf_model` the weights too, in the dtypes of the `export` column, or the adapter.

Invariant: an error on one rank is an error on all.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers.dynamic_module_utils import custom_object_save
from verl.utils import hdfs_io

from zerodrift.api import export
from zerodrift.checkpoint.checkpoints import Checkpoints, Part
from zerodrift.checkpoint.differences import Allowed
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.engine import Engine
from zerodrift.errors import CheckpointError
from zerodrift.verl.model import adapter_of, adapter_weights

TAG = "state"
FOLDER = "huggingface"


class SavedRuns:
    """Saves and loads the checkpoints of one engine."""

    def __init__(self, contents: Any, model: Any) -> None:
        """`contents` is verl's `checkpoint` block, `model` its `model`."""
        self._contents, self._model = contents, model
        self._adapter_alone = bool(contents.save_lora_only and model.lora_rank)
        self._saved: list[Path] = []

    def save(self, engine: Engine, path: Path, schedule: Any, to: str | None, keep: int | None) -> None:
        """Save a checkpoint, copy it to `to`, and keep the last `keep` of this process."""
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
        if hasattr(model, "get_base_model"):  # an adapter's
            model = model.get_base_model()  # type: ignore[operator]
        config = copy.deepcopy(given.hf_config)
        config.architectures = [type(model).__name__]
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
        """Load the weights, and moments and schedule if they are trained and asked for."""
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
        do = "Merge it with `python -m verl.model_merger`, and name what comes of it in `model.path`."
        raise CheckpointError(str(path), must, got=got, do=do)
