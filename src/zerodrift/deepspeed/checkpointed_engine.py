"""`save_checkpoint`, `load_checkpoint` and state dicts: DeepSpeed's calls on zerodrift's checkpoints.

A folder has one folder per tag and a file `latest`. The client state is rank 0's, made of plain values,
because loading a checkpoint runs no code from it. Rank 0 converts a checkpoint that DeepSpeed itself saved
into a temporary folder beside it, from which all ranks load. `module_state_dict` and `save_16bit_model`
gather a whole model, one unit at a time, in the `export` dtypes.

Invariants: loading changes neither the parts that were not asked for nor a checkpoint of DeepSpeed. A loaded
value reaches the master weights at every stage.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerodrift.checkpoint import (
    LATEST,
    Allowed,
    CheckpointFolder,
    Checkpoints,
    Part,
    is_deepspeed,
    kind_at,
    new_file,
    on_rank_0,
)
from zerodrift.comm import raise_on_all_ranks
from zerodrift.deepspeed.modules import MissingCheckpointError, MisuseError
from zerodrift.deepspeed.tools.functions import logger
from zerodrift.engine import Engine, native
from zerodrift.errors import CheckpointError, ConfigError, UnsupportedError
from zerodrift.plan import Row
from zerodrift.weights import TrainingState, open_deepspeed, to_checkpoint, whole_values

PathLike = str | os.PathLike[str]

SCRIPT = """#!/usr/bin/env python
# Makes one fp32 model of a checkpoint in this folder: python zero_to_fp32.py . output_folder
from zerodrift.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
"""


def tag_validation(config: Mapping[str, Any]) -> str:
    """Return `checkpoint.tag_validation` in lower case: `ignore`, `warn` or `fail`."""
    block: Any = config.get("checkpoint")
    mode = str(block.get("tag_validation", "warn")).lower() if isinstance(block, Mapping) else "warn"
    if mode not in ("ignore", "warn", "fail"):
        must, got = "must be `ignore`, `warn` or `fail`", repr(block["tag_validation"])
        raise ConfigError("checkpoint.tag_validation", must, got=got, do="Leave it out for `warn`.")
    return mode


class CheckpointedEngine(nn.Module):
    _engine: Engine
    _checkpoints: tuple[str, Checkpoints] | None = None
    """The folder that was used last, and its checkpoints."""

    if TYPE_CHECKING:  # the attributes of DeepSpeedEngine

        def __getattr__(self, name: str) -> Any: ...

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's state dict, whole on every rank."""
        if keep_vars:
            must = "must be false: the returned state is a copy"
            raise UnsupportedError("keep_vars", must, do="Use `named_parameters`.")
        state = {} if destination is None else destination
        state.update(model_state(self._engine, prefix, exclude_frozen_parameters, everywhere=True))
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load the state dict under `module` into the module and its master weights."""
        if not isinstance(checkpoint, Mapping) or "module" not in checkpoint:
            must, got = "must be given a dict with the key `module`", "none"
            do = "Pass `{'module': state_dict}`."
            raise CheckpointError("load_module_state_dict", must, got=got, do=do)
        with self._engine.gathered(write=True):
            if custom_load_fn is not None:
                custom_load_fn(src=checkpoint["module"], dst=self.module)
            else:
                self.module.load_state_dict(checkpoint["module"], strict=strict)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the whole state dict on rank 0's CPU, None on other ranks. transformers calls this."""
        state = model_state(self._engine, "", exclude_frozen_parameters, everywhere=False)
        return state if self.global_rank == 0 else None

    def save_16bit_model(
        self,
        save_dir: PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole model in its `export` dtypes to one file, for `torch.load` or safetensors."""
        path = as_path("save_dir", save_dir) / as_path("save_filename", save_filename)
        state = model_state(self._engine, "", exclude_frozen_parameters, everywhere=False)
        with raise_on_all_ranks(self._engine.comm):
            if self.global_rank == 0:
                with new_file(path) as partial:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_state(state, partial, path.suffix == ".safetensors")
        return True

    def save_fp16_model(self, save_dir: PathLike, save_filename: str = "pytorch_model.bin") -> bool:
        return self.save_16bit_model(save_dir, save_filename)

    def checkpoints_in(self, folder: PathLike) -> Checkpoints:
        """Return the checkpoints in a folder. All folders of an engine belong to one run."""
        path = os.path.realpath(folder)
        if self._checkpoints is None or self._checkpoints[0] != path:
            run = "" if self._checkpoints is None else self._checkpoints[1].run
            self._checkpoints = (path, Checkpoints(self._engine, folder, quiet=True, run=run, shared=True))
        return self._checkpoints[1]

    def save_checkpoint(
        self,
        save_dir: PathLike,
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save all state of a run, to resume on any number of ranks at any stage. A checkpoint without frozen
        parameters loads only with `load_module_strict=False`."""
        folder, engine = as_path("save_dir", save_dir), self._engine
        client = engine.comm.broadcast_object(dict(client_state), 0)
        counts = {"micro_steps": self.micro_steps, "global_samples": self.global_samples}
        tag = self._common_tag(str(tag) if tag is not None else f"global_step{self.global_steps}")
        state, frozen = {"client": client, "counts": counts}, not exclude_frozen_parameters
        self.checkpoints_in(folder).save(tag, state, latest=save_latest, frozen=frozen, within=True)
        script = folder / "zero_to_fp32.py"
        with raise_on_all_ranks(engine.comm):
            if engine.mesh.rank() == 0 and not os.path.lexists(script):
                with new_file(script) as partial:
                    partial.write_text(SCRIPT, encoding="utf-8")
                    partial.chmod(0o755)
        return True

    def _common_tag(self, tag: str) -> str:
        """Return rank 0's tag. If ranks differ, raise or warn as `checkpoint.tag_validation` says."""
        tags = self._engine.comm.all_gather_object(tag)
        mode = tag_validation(self.config)
        if len({*tags}) > 1 and mode != "ignore":
            must, got = "must be the same on all ranks", ", ".join(map(repr, sorted({*tags})[:4]))
            problem = MisuseError("save_checkpoint: tag", must, got=got, do="Pass one tag, or none.")
            if mode == "fail":
                raise problem
            logger.warning("%s The checkpoint has that of rank 0.", problem)
        return tags[0]

    def load_checkpoint(
        self,
        load_dir: PathLike,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of zerodrift or of DeepSpeed. Return its path and client state, or two Nones.
        Without `load_module_strict`, a name that is missing on one side is skipped."""
        if custom_load_fn is not None:
            must = "must be left out: masters and moments are loaded by name"
            do = "Write weights of your own inside `zero.GatheredParameters(parameters, modifier_rank=0)`."
            raise UnsupportedError("custom_load_fn", must, do=do)
        engine, folder = self._engine, as_path("load_dir", load_dir)
        counts = not load_module_only
        optimizer = counts and load_optimizer_states
        schedule = counts and load_lr_scheduler_states and (engine.schedule is not None or optimizer)
        wanted: dict[Part, bool] = {"optimizer": optimizer, "schedule": schedule, "counts": counts}
        parts = frozenset(part for part, is_wanted in wanted.items() if is_wanted)
        # DeepSpeed refuses another kind of schedule only if the optimizer is loaded too.
        allow: tuple[Allowed, ...] = () if optimizer else ("schedule",)
        if not load_module_strict:
            allow = (*allow, "model", "buffers")
        found = (False, "")
        with raise_on_all_ranks(engine.comm):
            if engine.mesh.rank() == 0:
                found = _find(folder, tag)
        is_deepspeeds, latest = engine.comm.broadcast_object(found, 0)
        if is_deepspeeds:
            with _converted(engine, folder, str(tag or "")) as (made, (path, samples, client), missing):
                self._load(Checkpoints(engine, made, quiet=True), LATEST, parts, (*allow, *missing))
                self._restore_counts(counts, {"global_samples": samples})
                return path, client
        if tag is None and not latest:
            logger.warning("no checkpoint in %s that `latest` names: nothing is loaded", folder)
            return None, None
        path, client = self._load(self.checkpoints_in(folder), str(tag or latest), parts, allow)
        self._restore_counts(counts, client.get("counts", {}))
        return path, dict(client.get("client", {}))

    def _load(
        self, folder: Checkpoints, tag: str, parts: frozenset[Part], allow: tuple[Allowed, ...]
    ) -> tuple[str, dict[str, Any]]:
        """Load the parts. Return the path and the client state."""
        # As in DeepSpeed, a schedule that is loaded without the optimizer sets no rate before its next step.
        groups = [] if "optimizer" in parts else getattr(self._engine.optimizer, "param_groups", [])
        rates = [group["lr"] for group in groups]
        loaded = folder.load_parts(tag, parts, allow)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for difference in loaded.differences:
            if difference.what == "model":
                logger.warning("%s: %s", loaded.path, difference)
        return str(loaded.path), loaded.client or {}

    def _restore_counts(self, wanted: bool, saved: Mapping[str, int]) -> None:
        if wanted:
            per_step = self.gradient_accumulation_steps()
            steps = saved.get("micro_steps", self.global_steps * per_step)
            self.micro_steps = steps - steps % per_step  # gradients of an unfinished step are not saved
            self.global_samples = saved.get("global_samples", self.global_steps * self.train_batch_size())
        self.update_boundary()


def as_path(name: str, given: Any) -> Path:
    """Return an argument as a path, or raise an error of the kinds that DeepSpeed raises."""
    if not given or not isinstance(given, (str, os.PathLike)):
        raise MissingCheckpointError(name, "must be a path", got=repr(given))
    return Path(given)


def _find(path: Path, tag: str | None) -> tuple[bool, str]:
    """Return True if DeepSpeed saved the checkpoint, and the tag in `latest` if none was asked for."""
    folder = CheckpointFolder(path)
    if kind_at(path) == "folder" and is_deepspeed(path if tag is None else path / str(tag)):
        return True, ""
    if tag is not None:
        require(folder, str(tag))
        return False, ""
    latest = folder.latest()
    if not latest and folder.halves():
        folder.newest()  # raises an error that names the missing file
    return False, latest


def require(folder: CheckpointFolder, tag: str) -> Path:
    """Return the checkpoint of a tag, or raise an error of DeepSpeed's kinds."""
    try:
        return folder.find(tag)
    except CheckpointError as error:
        raise MissingCheckpointError.joined([error]) from error


# --- DeepSpeed's own checkpoints --------------------------------------------------------------------------

Converted = tuple[str, tuple[str, int, dict[str, Any]], tuple[Allowed, ...]]
"""Temporary folder; path, samples and client state of the original; parts that the original does not have."""


@contextlib.contextmanager
def _converted(engine: Engine, path: Path, tag: str) -> Iterator[Converted]:
    """Convert a checkpoint of DeepSpeed while the context is open. Collective."""
    with contextlib.ExitStack() as stack:
        yield on_rank_0(
            engine.comm, lambda: _convert(path, tag, stack.enter_context(_room(path)), engine.schedule)
        )
        engine.comm.barrier()


def _room(path: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix=".zerodrift-", dir=path, ignore_cleanup_errors=True)
    except OSError as error:
        must = "must be writable, because the checkpoint is converted beside itself while it is loaded"
        do = "Convert it into another folder once, with `zerodrift convert`."
        raise CheckpointError(path, must, got=error.strerror or error, do=do) from error


def _convert(path: Path, tag: str, room: str, schedule: Any) -> Converted:
    """Convert a checkpoint. The files do not name a caller's own schedule, which `schedule` does."""
    source = open_deepspeed(path, tag)
    trained = source.trained or TrainingState()
    if not trained.schedule and trained.schedule_state is not None and schedule is not None:
        trained = replace(trained, schedule=type(schedule).__name__)
        source = replace(source, trained=trained)
    to_checkpoint(source, Path(room))
    for note in source.notes:
        logger.warning("%s: %s", source.path, note)
    lacks: dict[Allowed, bool] = {"optimizer": not trained.optimizer, "schedule": not trained.schedule}
    missing = tuple(part for part, is_missing in lacks.items() if is_missing)
    return room, (str(source.path), trained.samples, dict(trained.client)), missing


# --- state dicts of the model -----------------------------------------------------------------------------


def model_state(engine: Engine, prefix: str, without_frozen: bool, everywhere: bool) -> dict[str, Any]:
    """Return the model's state dict, in its own order, on every rank, or only on rank 0's CPU."""
    keep = everywhere or engine.mesh.rank() == 0
    values: dict[str, torch.Tensor] = {}
    for unit in engine.plan.units:
        rows = [engine.plan.rows[index] for index in unit.rows]
        rows = [row for row in rows if not (without_frozen and not row.trained)]
        for row, value in zip(rows, whole_values(engine, rows, keep), strict=True):
            if value is not None:
                values |= dict.fromkeys(row.names, value if everywhere else value.cpu())
    state = engine.module.state_dict()
    rows = [row for row in engine.plan.rows if row.trained or not without_frozen]
    if not {name for row in rows for name in row.names} <= state.keys():
        if everywhere or not any(segment.sharded for segment in native(engine.executor).segments):
            with engine.gathered():
                return _by_memory(engine.module, values, prefix, everywhere) if keep else {}
        state = _by_modules(engine.module)
    if not keep:
        return {}
    whole: dict[str, Any] = {}
    for name, value in state.items():
        if name in values:
            whole[prefix + name] = values[name]
        elif engine.plan.row(name) is None:  # a buffer
            whole[prefix + name] = _copy(value, everywhere)
    return whole


def _by_modules(module: nn.Module) -> dict[str, Any]:
    """Return parameters and persistent buffers by the paths of their modules, as DeepSpeed saves a sharded
    model whose own `state_dict` renames or omits parameters."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        buffers = {n: b for n, b in part._buffers.items() if n not in part._non_persistent_buffers_set}
        found |= {
            start + n: value for n, value in {**part._parameters, **buffers}.items() if value is not None
        }
    return found


def _by_memory(module: nn.Module, values: dict[str, Any], prefix: str, everywhere: bool) -> dict[str, Any]:
    """Return the module's own state dict with `values` in place of the parameters, which are recognized by
    their addresses. The parameters must be gathered."""
    places = {(p.data_ptr(), p.shape): name for name, p in module.named_parameters(remove_duplicate=False)}
    whole: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        held = places.get((value.data_ptr(), value.shape)) if isinstance(value, torch.Tensor) else None
        if held is None or held in values:  # else it is frozen, and left out
            whole[prefix + name] = _copy(value, everywhere) if held is None else values[held]
    return whole


def _copy(value: Any, everywhere: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    return copy if everywhere else copy.cpu()


def write_state(state: dict[str, Any], path: Path, safe: bool) -> None:
    """Write a state dict as safetensors, or as torch saves it."""
    if not safe:
        # torch's own writer reports a full disk as a failed write only.
        with path.open("wb") as stream:
            torch.save(state, stream)
        return
    from safetensors.torch import save_file

    save_file(without_ties(state), path, metadata={"format": "pt"})


def without_ties(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = {id(value): name for name, value in reversed(state.items())}
    return {name: value.contiguous() for name, value in state.items() if first[id(value)] == name}


def attach_loading(engine: Engine) -> None:
    """Make `load_state_dict` of the engine's module and its parts work at every stage.

    The parameters of a module are gathered while it loads, and rank 0's values become those of all ranks. A
    master takes the loaded value itself if that is wider than the compute dtype, except inside of
    `GatheredParameters`, where it takes what the parameter shows.
    """
    reference = weakref.ref(engine)
    exact: dict[str, tuple[Row, torch.Tensor]] = {}
    loading_now: list[Mapping[str, Row]] = []

    @contextlib.contextmanager
    def loading(rows: Mapping[str, Row], state: Mapping[str, Any]) -> Iterator[None]:
        engine = reference()
        if engine is None:
            raise AssertionError("hooks of an engine that is gone")
        engine.require_open()
        guard = native(engine.executor).guard
        if not loading_now and all(guard.is_writable(row) for row in rows.values()):
            # Inside of `GatheredParameters`, which sends the values, a script may load on one rank.
            yield
            return
        loading_now.append(rows)
        try:
            with engine.values.gathered(rows, write=True):
                yield
        finally:
            loading_now.pop()
        exact.update(
            {n: (row, state[n]) for n, row in rows.items() if row.trained and _is_wider(state[n], row)}
        )
        if loading_now:  # a module loads before its children
            return
        for row, value in () if guard.opened else exact.values():
            master = value.detach().to(engine.mesh.device, torch.float32, copy=True).contiguous()
            engine.comm.broadcast(master.view(-1), 0, "data")
            engine.values.set_master(row, master)
        exact.clear()

    native(engine.executor).guard.loading = loading


def _is_wider(value: Any, row: Row) -> bool:
    compute = row.columns.compute.torch
    return (
        isinstance(value, torch.Tensor)
        and tuple(value.shape) == row.whole_shape
        and value.is_floating_point()
        and torch.promote_types(value.dtype, compute) is not compute
        and value.dtype is not torch.float64
    )
