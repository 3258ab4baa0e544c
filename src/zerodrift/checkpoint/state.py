"""Collect and restore the state of a run except weights and moments.

Rank 0 saves the state that is equal on every rank. Each rank saves its own random numbers, client state and
differing buffers. Files are read with `weights_only`, extended by classes that only hold data.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import hashlib
import io
import pathlib
import random
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from zerodrift.checkpoint.differences import CheckpointDifference
from zerodrift.checkpoint.files import open_own
from zerodrift.engine import Engine
from zerodrift.errors import CheckpointError, UnsupportedError, said
from zerodrift.model import non_persistent_buffers

DATA = (
    *(argparse.Namespace, types.SimpleNamespace, frozenset, range, slice),
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}),
    # The functions that numpy names in a file, for an array and for a number.
    *(np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]),
)
"""Classes that `torch.load` may construct beside its own (torch 2.13 to 2.15, numpy 1 and 2)."""


def load(stream: IO[bytes]) -> dict[str, Any]:
    with torch.serialization.safe_globals(list(DATA)):
        state: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=True)
    return state


def packed(state: Any, what: str, path: str = "") -> bytes:
    """Pack a state, and verify that it can be unpacked. The error names `what` and, as deep as dicts go, the
    item that cannot be packed."""
    out = io.BytesIO()
    try:
        torch.save(state, out)
        load(io.BytesIO(out.getvalue()))
        return out.getvalue()
    except Exception as error:
        for key, item in state.items() if isinstance(state, Mapping) else ():
            packed(item, what, f"{path}[{key!r}]")
        must = "must be made of numbers, strings, tensors, arrays, paths, dates, lists and dicts, to be saved"
        got = f"a {type(state).__name__} at {path}" if path else said(error)
        raise UnsupportedError(what, must, got=got) from error


def read_state(folder: Path, name: str) -> dict[str, Any]:
    try:
        with open_own(folder, name) as stream:
            return load(stream)
    except CheckpointError:
        raise
    except Exception as error:
        do = "Load another checkpoint."
        raise CheckpointError(folder / name, "must be readable", got=said(error), do=do) from error


# --- the same on every rank -------------------------------------------------------------------------------


def shared(engine: Engine, counters: Mapping[str, Any]) -> dict[str, Any]:
    if engine.schedule is not None and not hasattr(engine.schedule, "state_dict"):
        must = "must have `state_dict` and `load_state_dict`, to be saved"
        got, do = type(engine.schedule).__name__, "Add them, or use a scheduler of torch."
        raise UnsupportedError("schedule", must, got=got, do=do)
    scaler = engine.scaler.state_dict() if engine.scaler.active else None
    buffers = {name: buffer.detach().cpu().clone() for name, buffer in engine.module.named_buffers()}
    hidden = sorted(non_persistent_buffers(engine.module))
    held = {"scaler": scaler, "counters": dict(counters), "buffers": buffers, "hidden": hidden}
    return {**_progress(engine), **held}


def persistent_buffers(shared: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers that are in a state dict of the model; all of an older checkpoint."""
    hidden = shared.get("hidden", ())
    return {name: buffer for name, buffer in shared["buffers"].items() if name not in hidden}


def _progress(engine: Engine) -> dict[str, Any]:
    return {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "seed": engine.seed,
        "schedule": engine.schedule.state_dict() if hasattr(engine.schedule, "state_dict") else None,
        "groups": groups(engine),
    }


def groups(engine: Engine) -> list[dict[str, Any]]:
    """Return the options of every parameter group: learning rates, betas, weight decay."""
    return [{key: value for key, value in g.items() if key != "params"} for g in _param_groups(engine)]


def _param_groups(engine: Engine) -> list[dict[str, Any]]:
    return [] if engine.optimizer is None else engine.optimizer.param_groups


def put(
    engine: Engine, shared: Mapping[str, Any], own: Mapping[str, Any] | None, without: Collection[str] = ()
) -> None:
    """Restore everything but weights, moments and random numbers, and except the subjects in `without`."""
    own = own or {"buffers": {}, "modules": {}}
    if "buffers" not in without:
        _put_buffers(engine.module, shared["buffers"] | own["buffers"])
    if "counts" not in without:
        engine.progress.global_steps = int(shared["global_steps"])
        engine.progress.skipped_steps = int(shared["skipped_steps"])
        engine.seed = int(shared.get("seed", engine.seed))  # a converted checkpoint has none
    if "loss_scale" not in without:
        put_scale(engine, shared["scaler"])
    if "schedule" not in without:  # before the groups, whose learning rates a schedule sets
        _put_schedule(engine, shared["schedule"])
    if "groups" not in without:
        put_groups(engine, shared["groups"])
    for name, module in _stateful(engine.module) if "modules" not in without else ():
        if name in own["modules"]:
            module.set_extra_state(own["modules"][name])


@torch.no_grad()
def _put_buffers(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in saved and saved[name].shape == buffer.shape:
            buffer.copy_(saved[name])


def _put_schedule(engine: Engine, state: Any) -> None:
    if engine.schedule is None or state is None:
        return
    try:
        engine.schedule.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        got = f"{said(error)} from {type(engine.schedule).__name__}"
        do = "`allow=('schedule',)` starts the schedule from step 0."
        raise CheckpointError("schedule", "must take the saved state", got=got, do=do) from error


def put_scale(engine: Engine, state: Mapping[str, Any] | None) -> None:
    if engine.scaler.active and state is not None:
        engine.scaler.load_state_dict(dict(state))


def put_groups(engine: Engine, saved: Sequence[Mapping[str, Any]]) -> None:
    if engine.optimizer is not None:
        for group, options in zip(_param_groups(engine), saved, strict=True):
            group.update(options)


def copied(engine: Engine) -> Callable[[], None]:
    """Copy the state that `put` replaces. The result undoes a load that failed."""
    buffers = {name: buffer.detach().clone() for name, buffer in engine.module.named_buffers()}
    modules = {name: module.get_extra_state() for name, module in _stateful(engine.module)}
    before = {**copy.deepcopy(_progress(engine)), "scaler": engine.scaler.state_dict(), "buffers": buffers}

    def restore() -> None:
        for group, options in zip(_param_groups(engine), before["groups"], strict=True):
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
        put(engine, before, {"buffers": {}, "modules": modules})

    return restore


# --- of one rank ------------------------------------------------------------------------------------------


def rank_state(engine: Engine, client: Any, different: frozenset[str]) -> dict[str, Any]:
    """Collect the state that every rank writes, with the buffers that are `different` from rank 0's."""
    buffers = engine.module.named_buffers()
    return {
        "random": random_state(engine.mesh.device),
        "client": client,
        "modules": {name: module.get_extra_state() for name, module in _stateful(engine.module)},
        "buffers": {name: buffer.detach().cpu().clone() for name, buffer in buffers if name in different},
    }


def random_state(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": (version, list(words), gauss),
        "numpy": (kind, torch.tensor(np.asarray(keys, np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
    }


def put_random_state(state: Mapping[str, Any], device: torch.device, trial: bool = False) -> None:
    """Set the generators of this process; in a `trial` generators of their own, which shows that it works."""
    version, words, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    python, numpy = (random.Random(), np.random.RandomState()) if trial else (random, np.random)
    python.setstate((version, tuple(words), gauss))
    numpy.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    (torch.Generator() if trial else torch.default_generator).set_state(state["torch"])
    if state["cuda"] is None or device.type == "cpu":
        return
    if trial:
        torch.Generator(device).set_state(state["cuda"])
    else:
        torch.get_device_module(device).set_rng_state(state["cuda"], device)


def check_random_state(state: Mapping[str, Any], device: torch.device) -> CheckpointDifference | None:
    """Raise unless the state can be restored. Return a difference if the saved run drew random numbers on a
    GPU and this one does on a CPU, or the other way round."""
    put_random_state(state, device, trial=True)
    was_on_cpu, is_on_cpu = state["cuda"] is None, device.type == "cpu"
    if was_on_cpu == is_on_cpu:
        return None
    saved, now = (f"of a {'CPU' if on_cpu else 'GPU'}" for on_cpu in (was_on_cpu, is_on_cpu))
    return CheckpointDifference("random numbers", saved, now, "random numbers differ from this step on")


def _stateful(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that define `get_extra_state`."""
    plain = torch.nn.Module.get_extra_state
    return [(name, m) for name, m in model.named_modules() if type(m).get_extra_state is not plain]


def bits_digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest() if flat.numel() else ""


def fingerprint(state: Any) -> str:
    """Return a digest that is equal for equal client states, tensors and arrays included."""
    digest = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            text = f"{value.dtype} {tuple(value.shape)} {bits_digest(value)}"
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:  # its repr leaves values out
            text = f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        else:
            text = str(len(value)) if isinstance(value, (dict, list, tuple)) else repr(value)
        digest.update(f"{type(value).__name__} {text};".encode())
        if isinstance(value, (dict, list, tuple)):
            for item in value.items() if isinstance(value, dict) else value:
                take(item)

    try:
        take(state)
    except RecursionError:
        must, got = "must be made of lists and dicts that do not hold themselves", "one that does"
        raise UnsupportedError("client", must, got=got) from None
    return digest.hexdigest()
