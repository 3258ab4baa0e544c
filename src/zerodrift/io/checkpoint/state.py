"""Everything of a run that is not a weight or a moment: counters, schedule, loss scale, random numbers.

What is the same on every rank is saved once, what a rank has of its own beside it. Both are values that
`packing.py` packs, and verifies when they are written: a state that could not be read again must be refused
while the run still lives.

Invariant: putting back what was collected leaves a run that goes on as the other would have.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zerodrift.errors import CheckpointError, UnsupportedError, said
from zerodrift.io.checkpoint import packing
from zerodrift.io.paths import open_own

if TYPE_CHECKING:
    from torch import nn

    from zerodrift.engine.engine import Engine


# --- the same on every rank -----------------------------------------------------------------------------


def shared(engine: Engine, counters: Mapping[str, Any]) -> dict[str, Any]:
    """What rank 0 writes for all."""
    return {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "seed": engine.seed,
        "scaler": engine.scaler.state_dict() if engine.scaler.active else None,
        "schedule": _schedule_state(engine),
        "groups": groups(engine),
        "counters": dict(counters),
        "buffers": {name: buffer.detach().cpu().clone() for name, buffer in buffers(engine.module)},
    }


def _schedule_state(engine: Engine) -> Any:
    if engine.schedule is None:
        return None
    if not hasattr(engine.schedule, "state_dict"):
        raise UnsupportedError(
            "schedule",
            "must have `state_dict` and `load_state_dict`, to be saved",
            got=type(engine.schedule).__name__,
            do="Add them, or use a scheduler of torch.",
        )
    return engine.schedule.state_dict()


def groups(engine: Engine) -> list[dict[str, Any]]:
    """The options of every parameter group: learning rates, betas, weight decay."""
    if engine.optimizer is None:
        return []
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.optimizer.param_groups
    ]


def put_counts(engine: Engine, state: Mapping[str, Any]) -> None:
    """Where the run is, and what its micro-batches are seeded from, which earlier checkpoints do not say."""
    engine.progress.global_steps = int(state["global_steps"])
    engine.progress.skipped_steps = int(state["skipped_steps"])
    engine.seed = int(state.get("seed", engine.seed))


def put_schedule(engine: Engine, state: Any) -> None:
    """The learning rates' schedule; it sets the groups' rates, so it comes before `put_groups`."""
    if engine.schedule is None or state is None:
        return
    try:
        engine.schedule.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        raise CheckpointError(
            "schedule",
            "must take the saved state",
            got=f"{said(error)} from {type(engine.schedule).__name__}",
            do="`allow=('schedule',)` begins the schedule anew.",
        ) from error


def put_scale(engine: Engine, state: Mapping[str, Any] | None) -> None:
    if engine.scaler.active and state is not None:
        engine.scaler.load_state_dict(dict(state))


def put_groups(engine: Engine, saved: Sequence[Mapping[str, Any]]) -> None:
    """The options of the parameter groups."""
    if engine.optimizer is not None:
        for group, options in zip(engine.optimizer.param_groups, saved, strict=True):
            group.update(options)


class StateBeforeLoad:
    """A run as it was before a load, weights, moments and random numbers apart."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._counts = {
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
            "seed": engine.seed,
        }
        self._scale = engine.scaler.state_dict()
        known = engine.schedule is not None and hasattr(engine.schedule, "state_dict")
        self._schedule = copy.deepcopy(engine.schedule.state_dict()) if known else None
        self._groups = copy.deepcopy(groups(engine))
        self._buffers = {name: buffer.detach().clone() for name, buffer in buffers(engine.module)}
        self._modules = {name: module.get_extra_state() for name, module in _extra(engine.module)}

    def restore(self) -> None:
        """Take everything back."""
        engine = self._engine
        put_counts(engine, self._counts)
        put_scale(engine, self._scale)
        put_schedule(engine, self._schedule)
        if engine.optimizer is not None:
            for group, options in zip(engine.optimizer.param_groups, self._groups, strict=True):
                for key in [key for key in group if key != "params" and key not in options]:
                    del group[key]
                group.update(options)
        put_buffers(engine.module, self._buffers)
        put_modules(engine.module, self._modules)


# --- of a rank alone --------------------------------------------------------------------------------------


def rank_state(engine: Engine, client: Any, different: frozenset[str]) -> dict[str, Any]:
    """What every rank writes: random numbers, the client's state, module states, and the buffers in which
    it differs from rank 0."""
    return {
        "random": random_state(engine.mesh.device),
        "client": client,
        "modules": {name: module.get_extra_state() for name, module in _extra(engine.module)},
        "buffers": {
            name: buffer.detach().cpu().clone()
            for name, buffer in buffers(engine.module)
            if name in different
        },
    }


def random_state(device: torch.device) -> dict[str, Any]:
    """Of Python, numpy and torch."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": (version, list(words), gauss),
        "numpy": (kind, torch.tensor(np.asarray(keys, np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def put_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    python, plain, words, cuda = _generators(state)
    random.setstate(python)
    np.random.set_state(plain)
    torch.set_rng_state(words)
    if cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(cuda, device)


def check_random_state(state: Mapping[str, Any]) -> None:
    """That it can be put, on generators that nobody draws from."""
    python, plain, words, _ = _generators(state)
    random.Random().setstate(python)
    np.random.RandomState().set_state(plain)
    torch.Generator().set_state(words)


def _generators(state: Mapping[str, Any]) -> tuple[Any, Any, torch.Tensor, torch.Tensor | None]:
    """Python's, numpy's and torch's, in their own forms."""
    version, words, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    numpys = (kind, keys.numpy().astype(np.uint32), *rest)
    return (version, tuple(words), gauss), numpys, state["torch"], state["cuda"]


def _extra(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules with a state of their own making."""
    plain = torch.nn.Module.get_extra_state
    return [(name, m) for name, m in model.named_modules() if type(m).get_extra_state is not plain]


def put_modules(model: nn.Module, states: Mapping[str, Any]) -> None:
    for name, module in _extra(model):
        if name in states:
            module.set_extra_state(states[name])


# --- buffers ----------------------------------------------------------------------------------------------


def buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_buffers())


def buffer_digests(model: nn.Module) -> dict[str, str]:
    """To find those that are not the same on every rank, such as running statistics."""
    return {name: _digest(buffer) for name, buffer in buffers(model)}


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest() if flat.numel() else ""


@torch.no_grad()
def put_buffers(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in buffers(model):
        if name in saved and saved[name].shape == buffer.shape:
            buffer.copy_(saved[name])


# --- files --------------------------------------------------------------------------------------------------


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """One of the state files of a checkpoint."""
    try:
        with open_own(folder, name) as stream:
            return packing.load(stream)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            folder / name, "must be readable", got=said(error), do="Load another checkpoint."
        ) from error


def fingerprint(state: Any) -> str:
    """Equal for equal states, tensors and all."""
    digest = hashlib.sha256()

    def take(value: Any) -> None:
        digest.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)} {_digest(value)}".encode())
        elif isinstance(value, dict):
            for key in value:
                take(key)
                take(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                take(item)
        else:
            digest.update(f"{value!r};".encode())

    take(state)
    return digest.hexdigest()
