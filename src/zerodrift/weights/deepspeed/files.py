"""Read the files of a DeepSpeed checkpoint, without running code from them.

DeepSpeed saves pickles of a few of its own classes. Stubs of these classes let torch's restricted unpickler
open the files. The CRCs of the zip are compared first, because torch's reader ignores them.

Invariant: every rank's file is there, undamaged, and from the same save.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from zerodrift.checkpoint import (
    DEEPSPEED,
    LATEST,
    has_deepspeed_files,
    is_folder,
    kind_at,
    list_folder,
    read_latest,
    short,
)
from zerodrift.errors import CheckpointError, Problems, did_you_mean, said
from zerodrift.model import listed

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHERS = {
    re.compile(r"layer_\d+-.*\.pt"): "a checkpoint of a DeepSpeed pipeline",
    re.compile(r"(layer_\d+_)?expert_.*\.pt"): "a checkpoint with expert parallelism",
}
FIRST, LAST = (0, 10), (0, 19)
"""Oldest version of DeepSpeed that can be read, and newest that was tested."""
_DAMAGED = "It was cut short or damaged: copy it again, or use another tag."
_MIXED = "Two saves are mixed: remove the files of the older one."


class _PickleStub:
    """Base of the stubs. `values` are the arguments in the pickle."""

    def __init__(self, *values: Any) -> None:
        self.values = values


_STUBS = [
    (type(path.rpartition(".")[2], (_PickleStub,), {}), f"deepspeed.{path}")
    for path in (
        "runtime.zero.config.ZeroStageEnum",
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "utils.tensor_fragment.fragment_address",
    )
]


@dataclass(frozen=True, slots=True)
class DeepSpeedFiles:
    """Contents of the files of one tag. Stage 3 has a model file per rank, and stage 0 no optimizer files."""

    folder: Path
    models: tuple[dict[str, Any], ...]
    optimizers: tuple[dict[str, Any], ...]

    @property
    def version(self) -> str:
        return str(self.models[0].get("ds_version", ""))


def find_tag(path: Path, tag: str = "") -> Path:
    """Return the folder of a tag, or of the one that `latest` names, or `path` if it is one itself."""
    must = "must be a folder that DeepSpeed saved into"
    if not is_folder(path, must):
        raise CheckpointError(short(path), must, got="no such folder")
    if not tag and has_deepspeed_files(path):
        return path
    tags = [entry.name for entry in list_folder(path) if entry.is_dir() and entry.name != LATEST]
    tag = tag or read_latest(path)
    if not tag:
        got = f"none, and {listed(tags) if tags else 'no folder in it'}"
        must = f"must have a file `{LATEST}` that names a tag"
        raise CheckpointError(path, must, got=got, do="Give the tag.")
    if tag not in tags:
        must, do = f"must have a folder for the tag {short(repr(tag))}", did_you_mean(short(tag), tags)
        raise CheckpointError(short(path), must, got="none", do=do)
    return path / tag


def read_files(folder: Path, trust: bool = False) -> DeepSpeedFiles:
    """Read every file of one tag. With `trust` any pickle is loaded, which can run code."""
    problems = Problems()
    names = [entry.name for entry in list_folder(folder)]
    _refuse_others(folder, names)
    model_files, optimizer_files = _by_rank(names, DEEPSPEED), _by_rank(names, _OPTIMIZER)
    if not model_files:
        must = "must hold `mp_rank_00_model_states.pt` or `zero_pp_rank_0_mp_rank_00_model_states.pt`"
        raise CheckpointError(folder, must, got="neither", do="Is it the folder of one tag?")
    models = _load_all(folder, model_files, problems, trust)
    problems.raise_as(CheckpointError)
    if (_version(version := str(models[0].get("ds_version", ""))) or (0, 0)) < FIRST:
        must, do = "must be saved by DeepSpeed 0.10 or later", "Load and save it with a later DeepSpeed."
        raise CheckpointError(folder, must, got=version or "no version", do=do)
    optimizers: list[dict[str, Any]] = []
    if models[0].get("param_shapes") is not None:
        optimizers = _load_all(folder, optimizer_files, problems, trust)
        problems.raise_as(CheckpointError)
        counts = [state["optimizer_state_dict"].get("partition_count") for state in optimizers]
        count = next((count for count in counts if count is not None), 0)
        count = max(count) if isinstance(count, list) else int(count)
        ranks = count or int(models[0].get("dp_world_size") or 1)
        _check_ranks(folder, optimizer_files, ranks, "_optim_states.pt", problems)
        if any(number is not None for number in model_files):
            _check_ranks(folder, model_files, ranks, "_model_states.pt", problems)
    elif optimizer_files:
        got = "none, and optimizer files"
        problems.add(str(folder), "must have `param_shapes` in its model files", got=got)
    problems.raise_as(CheckpointError)
    keys = ("ds_version", "dp_world_size", "global_steps", "skipped_steps", "global_samples", "param_shapes")
    _check_one_save(folder, "model files", [{key: model.get(key) for key in keys} for model in models])
    states = [state["optimizer_state_dict"] for state in optimizers]
    _check_one_save(folder, "optimizer files", [_common_of_optimizer(state) for state in states])
    return DeepSpeedFiles(folder, tuple(models), tuple(optimizers))


def _refuse_others(folder: Path, names: Sequence[str]) -> None:
    refused = [("a universal checkpoint", "zero/")] if (folder / "zero").is_dir() else []
    for name in names:
        refused += [(what, name) for pattern, what in _OTHERS.items() if pattern.fullmatch(name)]
        match = DEEPSPEED.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if match and int(match[2]) > 0:
            refused.append(("a checkpoint with tensor parallelism", name))
    for what, name in refused:
        must = "must be a checkpoint of ZeRO stage 0, 1, 2 or 3 over data-parallel ranks"
        do = "Export its weights with DeepSpeed, and start from those."
        raise CheckpointError(folder, must, got=f"{what} ({name})", do=do)


def _version(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return None if match is None else (int(match[1]), int(match[2]))


def is_tried(version: str) -> bool:
    """Return whether tests read files of this version of DeepSpeed."""
    return (_version(version) or (LAST[0] + 1, 0)) <= LAST


def _by_rank(names: Sequence[str], pattern: re.Pattern[str]) -> dict[int | None, str]:
    """Return names by rank, with None for the one file of all ranks."""
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    matches.sort(key=lambda match: -1 if match[1] is None else int(match[1]))
    return {None if match[1] is None else int(match[1]): match[0] for match in matches}


def _check_ranks(
    folder: Path, files: dict[int | None, str], ranks: int, suffix: str, problems: Problems
) -> None:
    if missing := [str(rank) for rank in range(ranks) if rank not in files]:
        must, got = f"must hold a file *{suffix} of each of {ranks} ranks", f"none of rank {listed(missing)}"
        problems.add(str(folder), must, got=got, do="Copy the folders of all machines into one.")
    if beyond := [name for rank, name in files.items() if rank is not None and rank >= ranks]:
        must, got = f"must hold files of {ranks} ranks", f"also {listed(beyond)}"
        problems.add(str(folder), must, got=got, do=_MIXED)


def _check_one_save(folder: Path, what: str, common: Sequence[dict[str, Any]]) -> None:
    """Raise if values differ that are equal on all ranks of one save."""
    for number, other in enumerate(common):
        pairs = [(key, common[0].get(key), value) for key, value in other.items()]
        if differences := [f"{key} {first!r} and {value!r}" for key, first, value in pairs if first != value]:
            got = f"of ranks 0 and {number}: {short('; '.join(differences))}"
            raise CheckpointError(folder, f"must have {what} of one save", got=got, do=_MIXED)


def _common_of_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    base = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    groups = base.get("param_groups", ()) if isinstance(base, Mapping) else ()
    kept = base.get("state", {}) if isinstance(base, Mapping) else dict(enumerate(base or ()))
    stage, scaler = state.get("zero_stage"), state.get("loss_scaler")
    return {
        "stage": getattr(stage, "values", (stage,))[0],
        "steps": max((int(moments["step"]) for moments in kept.values() if "step" in moments), default=None),
        "options": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "loss scale": scaler if scaler is None or isinstance(scaler, Mapping) else vars(scaler),
    }


def _load_all(
    folder: Path, files: dict[int | None, str], problems: Problems, trust: bool
) -> list[dict[str, Any]]:
    states = []
    for path in (folder / name for name in files.values()):
        try:
            states.append(_load(path, trust))
        except CheckpointError as error:
            problems.include(*error.problems)
    return states


def _load(path: Path, trust: bool) -> dict[str, Any]:
    if kind_at(path) != "file":
        raise _damaged(path, "a folder")
    try:
        saved_as = _check_archive(path)
    except OSError as error:
        raise _damaged(path, error.strerror or said(error)) from error
    if not _is_own_name(path.name, saved_as):
        must = "must be the file that was saved under its name"
        raise CheckpointError(path, must, got=f"`{saved_as}.pt`", do=_MIXED)
    try:
        with safe_globals([] if trust else _STUBS):  # type: ignore[arg-type]
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
    except Exception as error:
        klass = re.search(r"(?:GLOBAL|class|global) [`']?([\w.]+)", str(error))
        if klass is None or not isinstance(error, pickle.UnpicklingError):
            raise _damaged(path, said(error)[:180]) from error
        must = "must hold tensors, numbers, text and containers of them"
        got = f"an object of `{klass[1]}`, which only its own code can read"
        do = "If you trust who wrote the file, read it with `trust`."
        raise CheckpointError(path, must, got=got, do=do) from error
    if not isinstance(state, dict) or not ({"module", "optimizer_state_dict"} & state.keys()):
        raise CheckpointError(path, "must be a file that DeepSpeed saved", got=type(state).__name__)
    return state


def _is_own_name(name: str, saved_as: str) -> bool:
    """Return whether a file still has the name that it was saved under, which torch writes into it."""
    for pattern in (DEEPSPEED, _OPTIMIZER):
        then, now = pattern.fullmatch(f"{saved_as}.pt"), pattern.fullmatch(name)
        if then is not None:
            return now is not None and then.groups() == now.groups()
    return True


def _damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError(path, "must be readable", got=short(got), do=_DAMAGED)


def _check_archive(path: Path) -> str:
    """Check every CRC of a zip that torch wrote, and return the name that the file was saved under."""
    with path.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            old = "the older format has no checksums, and damage in it cannot be seen"
            todo = "If it is one of those, load it with torch and save it again"
            raise _damaged(path, f"no zip, which torch has written since 1.6: {old}. {todo}")
        got = "a zip whose list of records is damaged"
        try:
            with zipfile.ZipFile(stream) as archive:
                records = archive.infolist()
                names = {record.filename for record in records}
                tops = {name.partition("/")[0] for name in names}
                first = min((record.header_offset for record in records), default=-1)
                # Python accepts bytes before an archive, which torch does not expect.
                if first == 0 and len(names) == len(records) and len(tops) == 1:
                    damaged = next((r.filename for r in records if not _is_plain(r)), None)
                    damaged = damaged or archive.testzip()
                    if damaged is None:
                        return tops.pop()
                    got = f"a damaged record `{damaged}`"
        except Exception as error:  # damage makes `zipfile` raise nearly anything
            got = f"a damaged zip ({error or type(error).__name__})"
    raise _damaged(path, got)


def _is_plain(record: zipfile.ZipInfo) -> bool:
    return record.compress_type == zipfile.ZIP_STORED and record.file_size == record.compress_size
