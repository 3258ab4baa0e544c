"""The files of a DeepSpeed checkpoint: which there must be, and reading them without running what they say.

DeepSpeed saves pickles that name its own classes. They are opened memory-mapped and by torch's restricted
unpickler, with stand-ins for those few classes, so DeepSpeed need not be installed and a file cannot do
anything; what is needed of a tensor is read when it is used. What is in them is `deepspeed.py`'s business.
Checksums are compared first, so every byte is read once before that (`archive.py`).

Invariant: what is returned is complete and of one save: a file for every rank that the checkpoint was saved
from, each with the bits that were written, and all of the same step.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from zerodrift.errors import CheckpointError, Problems, did_you_mean, said
from zerodrift.io import paths
from zerodrift.io.checkpoint.folder import LATEST, read_latest
from zerodrift.io.deepspeed import archive
from zerodrift.io.paths import is_folder, kind_at, short
from zerodrift.model.document import listed

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHERS = {
    re.compile(r"layer_\d+-.*\.pt"): "a checkpoint of a DeepSpeed pipeline",
    re.compile(r"(layer_\d+_)?expert_.*\.pt"): "a checkpoint with expert parallelism",
}
FIRST, LAST = (0, 10), (0, 19)
"""Versions of DeepSpeed whose files have all that is read here, and up to which it was tried."""


class _PickleStub:
    """Stands in for a class of DeepSpeed: holds what the pickle gives it."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def _stand(name: str) -> type:
    return type(name, (_PickleStub,), {})


_CLASSES = {
    path: _stand(path.rpartition(".")[2])
    for path in (
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
}


@dataclass(frozen=True, slots=True)
class DeepSpeedFiles:
    """The files of one tag, loaded."""

    folder: Path
    models: tuple[dict[str, Any], ...]
    """One at stages 0-2, one per rank at stage 3."""
    optimizers: tuple[dict[str, Any], ...]
    """One per rank; none at stage 0."""

    @property
    def version(self) -> str:
        return str(self.models[0].get("ds_version", ""))


def is_deepspeed(path: Path) -> bool:
    """Whether a folder looks like a checkpoint of DeepSpeed, or a folder of them."""
    if kind_at(path) != "folder":
        return False
    named = read_latest(path)
    folder = path / named if named else path
    return kind_at(folder) == "folder" and _is_one(folder)


def _is_one(folder: Path) -> bool:
    return any(_MODEL.fullmatch(entry.name) for entry in paths.listed(folder))


def find_tag(path: Path, tag: str = "") -> Path:
    """The folder of a tag; of the one that `latest` names, or `path` itself, where none is given."""
    if not is_folder(path, "must be a folder that DeepSpeed saved into"):
        raise CheckpointError(short(path), "must be a folder that DeepSpeed saved into", got="no such folder")
    if not tag and _is_one(path):
        return path
    there = paths.listed(path)
    tags = [entry.name for entry in there if entry.is_dir() and entry.name != LATEST]
    if not tag:
        tag = read_latest(path)
        if not tag:
            have = listed(tags) if tags else "no folder in it"
            raise CheckpointError(
                path,
                f"must have a file `{LATEST}` that names a tag",
                got=f"none, and {have}",
                do="Give the tag.",
            )
    if tag not in tags:
        hint = did_you_mean(short(tag), tags)
        must = f"must have a folder for the tag {short(repr(tag))}"
        raise CheckpointError(short(path), must, got="none", do=hint)
    return path / tag


def read_files(folder: Path, trust: bool = False) -> DeepSpeedFiles:
    """Every file of one tag. `trust` unpickles whatever they hold, which runs code that they name."""
    problems = Problems()
    names = [entry.name for entry in paths.listed(folder)]
    _refuse_others(folder, names)
    models, optimizers = _numbered(names, _MODEL), _numbered(names, _OPTIMIZER)
    if not models:
        raise CheckpointError(
            folder,
            "must hold `mp_rank_00_model_states.pt` or `zero_pp_rank_0_mp_rank_00_model_states.pt`",
            got="neither",
            do="Is it the folder of one tag?",
        )
    found_models = _load_all(folder, models, problems, trust)
    problems.raise_as(CheckpointError)
    _check_version(folder, str(found_models[0].get("ds_version", "")))
    sharded = found_models[0].get("param_shapes") is not None
    if optimizers and not sharded:
        problems.add(
            str(folder), "must have `param_shapes` in its model files", got="none, and optimizer files"
        )
        problems.raise_as(CheckpointError)
    shards = _load_all(folder, optimizers, problems, trust) if sharded else []
    problems.raise_as(CheckpointError)
    ranks = _ranks(shards) or int(found_models[0].get("dp_world_size") or 1)
    if sharded:
        _check_ranks(folder, optimizers, ranks, "_optim_states.pt", problems)
        if any(number is not None for number in models):
            _check_ranks(folder, models, ranks, "_model_states.pt", problems)
    problems.raise_as(CheckpointError)
    _check_one_save(folder, found_models, shards)
    return DeepSpeedFiles(folder, tuple(found_models), tuple(shards))


def _check_one_save(
    folder: Path, models: Sequence[dict[str, Any]], optimizers: Sequence[dict[str, Any]]
) -> None:
    """What every rank writes alike must be alike, or files of two saves were mixed."""
    problems = Problems()
    for what, saved in (
        ("model files", [_of_model(model) for model in models]),
        ("optimizer files", [_of_optimizer(state["optimizer_state_dict"]) for state in optimizers]),
    ):
        for number, other in enumerate(saved):
            apart = [key for key, value in other.items() if value != saved[0].get(key)]
            if apart:
                got = "; ".join(f"{key} {saved[0].get(key)!r} and {other[key]!r}" for key in apart)
                problems.add(
                    str(folder),
                    f"must have {what} of one save",
                    got=f"of ranks 0 and {number}: {short(got)}",
                    do=_MIXED,
                )
                break
    problems.raise_as(CheckpointError)


def _of_model(model: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("ds_version", "dp_world_size", "global_steps", "skipped_steps", "global_samples", "param_shapes")
    return {key: model.get(key) for key in keys}


def _of_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    """Stage, steps and options, as each rank has them."""
    base = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    groups = base.get("param_groups", ()) if isinstance(base, Mapping) else ()
    kept = base.get("state", {}) if isinstance(base, Mapping) else dict(enumerate(base or ()))
    stage, scaler = state.get("zero_stage"), state.get("loss_scaler")
    steps = [_step(of) for of in kept.values()]
    return {
        "stage": getattr(stage, "values", (stage,))[0],
        "steps": max((step for step in steps if step is not None), default=None),
        "options": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "loss scale": scaler if scaler is None or isinstance(scaler, Mapping) else vars(scaler),
    }


def _step(state: Mapping[str, Any]) -> int | None:
    return int(state["step"]) if "step" in state else None


def _refuse_others(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        for pattern, what in _OTHERS.items():
            if pattern.fullmatch(name):
                raise _cannot(folder, what, name)
        match = _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if match and int(match[2]) > 0:
            raise _cannot(folder, "a checkpoint with tensor parallelism", name)
    if "zero" in names and (folder / "zero").is_dir():
        raise _cannot(folder, "a universal checkpoint", "zero/")


def _cannot(folder: Path, what: str, name: str) -> CheckpointError:
    return CheckpointError(
        folder,
        "must be a checkpoint of ZeRO stage 0, 1, 2 or 3 over data-parallel ranks",
        got=f"{what} ({name})",
        do="Export its weights with DeepSpeed, and start from those.",
    )


def _numbered(names: Sequence[str], pattern: re.Pattern[str]) -> dict[int | None, str]:
    """Rank, None for the one file of all, -> name."""
    names_by_number = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match:
            names_by_number[None if match[1] is None else int(match[1])] = name
    return dict(sorted(names_by_number.items(), key=lambda item: -1 if item[0] is None else item[0]))


def _ranks(optimizers: Sequence[dict[str, Any]]) -> int:
    """How many ranks saved, as each of their files says."""
    for state in optimizers:
        count = state["optimizer_state_dict"].get("partition_count")
        if count is not None:
            return max(count) if isinstance(count, list) else int(count)
    return 0


def _check_ranks(
    folder: Path, files: dict[int | None, str], ranks: int, suffix: str, problems: Problems
) -> None:
    missing = [str(rank) for rank in range(ranks) if rank not in files]
    if missing:
        got = f"none of rank {listed(missing)}"
        problems.add(
            str(folder),
            f"must hold a file *{suffix} of each of {ranks} ranks",
            got=got,
            do="Copy the folders of all machines into one.",
        )
    beyond = [name for rank, name in files.items() if rank is not None and rank >= ranks]
    if beyond:
        problems.add(
            str(folder), f"must hold files of {ranks} ranks", got=f"also {listed(beyond)}", do=_MIXED
        )


_MIXED = "Two saves are mixed: remove what the later did not write."


def _load_all(
    folder: Path, files: dict[int | None, str], problems: Problems, trust: bool
) -> list[dict[str, Any]]:
    return [state for name in files.values() if (state := _load(folder / name, problems, trust)) is not None]


def _load(path: Path, problems: Problems, trust: bool) -> dict[str, Any] | None:
    try:
        if kind_at(path) != "file":
            raise archive.DamagedError("a folder")
        written = archive.check(path)
    except (archive.DamagedError, OSError) as error:
        got = str(error) if isinstance(error, archive.DamagedError) else error.strerror or said(error)
        problems.add(str(path), "must be readable", got=short(got), do=_DAMAGED)
        return None
    if not _is_own_name(path.name, written):
        problems.add(
            str(path), "must be the file that was saved under its name", got=f"`{written}.pt`", do=_MIXED
        )
        return None
    stands = [(klass, name) for name, klass in _CLASSES.items()]
    try:
        with safe_globals([] if trust else stands):  # type: ignore[arg-type]
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
    except pickle.UnpicklingError as error:
        klass = re.search(r"(?:GLOBAL|class|global) [`']?([\w.]+)", str(error))
        if klass is None:
            problems.add(str(path), "must be readable", got=said(error)[:180], do=_DAMAGED)
            return None
        problems.add(
            str(path),
            "must hold tensors, numbers, text and containers of them",
            got=f"an object of `{klass[1]}`, which only its own code can read",
            do="If you trust who wrote the file, read it with `trust` (`--trust`).",
        )
        return None
    except Exception as error:
        problems.add(str(path), "must be readable", got=said(error)[:180], do=_DAMAGED)
        return None
    if not isinstance(state, dict) or not ({"module", "optimizer_state_dict"} & state.keys()):
        problems.add(str(path), "must be a file that DeepSpeed saved", got=type(state).__name__)
        return None
    return state


_DAMAGED = "It was cut short or damaged: copy it again, or use another tag."


def _is_own_name(name: str, written: str) -> bool:
    """Whether a file was saved for the rank that its name says; torch keeps the name that it wrote to. What
    was written to a stream has none."""
    for pattern in (_MODEL, _OPTIMIZER):
        then, now = pattern.fullmatch(f"{written}.pt"), pattern.fullmatch(name)
        if then is not None:
            return now is not None and then.groups() == now.groups()
    return True


def _check_version(folder: Path, version: str) -> None:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < FIRST:
        oldest, got = f"{FIRST[0]}.{FIRST[1]}", version or "no version"
        raise CheckpointError(
            folder,
            f"must be saved by DeepSpeed {oldest} or later",
            got=got,
            do="Load and save it with a later DeepSpeed.",
        )


def is_tried(version: str) -> bool:
    """Whether files of this version of DeepSpeed were read in tests."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) <= LAST
