"""Collect and restore everything of a run that is not a weight or a moment.

Rank 0 saves what is equal on every rank, each rank its own random numbers, client state and differing
buffers. Files are read with `weights_only`, extended by classes that only hold data.
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


def packed(state: Mapping[str, Any], what: str) -> bytes:
    """Pack a state, and verify that it can be unpacked; `what` names it in the error."""
    out, error = _try_to_pack(dict(state))
    if error is not None:
        path, value = _find_unpackable(state, "")
        must = "must be made of numbers, strings, tensors, arrays, paths, dates, lists and dicts, to be saved"
        got = f"a {type(value).__name__} at {path}" if path else said(error)
        raise UnsupportedError(what, must, got=got) from error
    return out


def _try_to_pack(value: Any) -> tuple[bytes, Exception | None]:
    out = io.BytesIO()
    try:
        torch.save(value, out)
        load(io.BytesIO(out.getvalue()))
    except Exception as error:
        return b"", error
    return out.getvalue(), None


def _find_unpackable(value: Any, path: str) -> tuple[str, Any]:
    """Return the item that cannot be packed, as deep as dicts go."""
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if _try_to_pack(item)[1] is not None:
            return _find_unpackable(item, f"{path}[{key!r}]")
    return path, value


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


def put_counts(engine: Engine, state: Mapping[str, Any]) -> None:
    """Restore the step counters and the seed; a converted checkpoint has no seed."""
    engine.progress.global_steps = int(state["global_steps"])
    engine.progress.skipped_steps = int(state["skipped_steps"])
    engine.seed = int(state.get("seed", engine.seed))


def put_schedule(engine: Engine, state: Any) -> None:
    """Restore the schedule. It sets the groups' learning rates, so call it before `put_groups`."""
    if engine.schedule is None or state is None:
        return
    try:
        engine.schedule.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        got = f"{said(error)} from {type(engine.schedule).__name__}"
        do = "`allow=('schedule',)` begins the schedule anew."
        raise CheckpointError("schedule", "must take the saved state", got=got, do=do) from error


def put_scale(engine: Engine, state: Mapping[str, Any] | None) -> None:
    if engine.scaler.active and state is not None:
        engine.scaler.load_state_dict(dict(state))


def put_groups(engine: Engine, saved: Sequence[Mapping[str, Any]]) -> None:
    if engine.optimizer is not None:
        for group, options in zip(_param_groups(engine), saved, strict=True):
            group.update(options)


def put(
    engine: Engine, shared: Mapping[str, Any], own: Mapping[str, Any] | None, without: Collection[str] = ()
) -> None:
    """Restore everything but weights, moments and random numbers. What `without` names stays as it is."""
    if "buffers" not in without:
        put_buffers(engine.module, shared["buffers"] | ({} if own is None else own["buffers"]))
    if "counts" not in without:
        put_counts(engine, shared)
    if "loss_scale" not in without:
        put_scale(engine, shared["scaler"])
    if "schedule" not in without:
        put_schedule(engine, shared["schedule"])
    if "groups" not in without:
        put_groups(engine, shared["groups"])
    if "modules" not in without and own is not None:
        put_modules(engine.module, own["modules"])


def copied(engine: Engine) -> Callable[[], None]:
    """Copy a run's state, weights, moments and random numbers apart. The result undoes a load that failed."""
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


def put_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    python, plain, words, cuda = _generators(state)
    random.setstate(python)
    np.random.set_state(plain)
    torch.set_rng_state(words)
    if cuda is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(cuda, device)


def check_random_state(state: Mapping[str, Any], device: torch.device) -> CheckpointDifference | None:
    """Raise unless the state can be restored, by trying it on generators of its own. Return a difference if
    one of the run that saved and this run draws on a GPU, and the other on a CPU."""
    python, plain, words, cuda = _generators(state)
    random.Random().setstate(python)
    np.random.RandomState().set_state(plain)
    torch.Generator().set_state(words)
    was_on_cpu, is_on_cpu = cuda is None, device.type == "cpu"
    if was_on_cpu != is_on_cpu:
        saved, now = (f"of a {'CPU' if on_cpu else 'GPU'}" for on_cpu in (was_on_cpu, is_on_cpu))
        return CheckpointDifference("random numbers", saved, now, "what a model draws differs from here on")
    if cuda is not None:
        torch.Generator(device).set_state(cuda)
    return None


def _generators(state: Mapping[str, Any]) -> tuple[Any, Any, torch.Tensor, torch.Tensor | None]:
    version, words, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    plain = (kind, keys.numpy().astype(np.uint32), *rest)
    return (version, tuple(words), gauss), plain, state["torch"], state["cuda"]


def _stateful(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that define `get_extra_state`."""
    plain = torch.nn.Module.get_extra_state
    return [(name, m) for name, m in model.named_modules() if type(m).get_extra_state is not plain]


def put_modules(model: nn.Module, states: Mapping[str, Any]) -> None:
    for name, module in _stateful(model):
        if name in states:
            module.set_extra_state(states[name])


def bits_digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest() if flat.numel() else ""


@torch.no_grad()
def put_buffers(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in saved and saved[name].shape == buffer.shape:
            buffer.copy_(saved[name])


def fingerprint(state: Any) -> str:
    """Return a digest that is equal for equal client states, tensors included."""
    digest = hashlib.sha256()

    def take(value: Any) -> None:
        digest.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)} {bits_digest(value)}".encode())
        elif isinstance(value, dict):
            for pair in value.items():
                take(pair[0])
                take(pair[1])
        elif isinstance(value, (list, tuple)):
            for item in value:
                take(item)
        else:
            digest.update(f"{value!r};".encode())

    try:
        take(state)
    except RecursionError:
        must, got = "must be made of lists and dicts that do not hold themselves", "one that does"
        raise UnsupportedError("client", must, got=got) from None
    return digest.hexdigest()
