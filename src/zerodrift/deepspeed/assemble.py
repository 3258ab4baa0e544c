"""`initialize`: from DeepSpeed's arguments to an engine, its optimizer, a loader and a schedule.

The config may be a dict, a file (JSON or YAML), or base64 of JSON, and may come by four ways; a model may be
in pieces from `zero.Init`; optimizer and schedule may be objects, functions that make them, or blocks of the
config, which may name any class of torch's. All of it ends in one call of the engine that
`zerodrift.initialize` makes.

Invariant: on every rank the same things are refused, before anything is allocated.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zerodrift.alias import errand
from zerodrift.api import initialize as make_engine
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.config.load import load
from zerodrift.config.schema import Config
from zerodrift.deepspeed.engine import DeepSpeedEngine
from zerodrift.deepspeed.launch import PORT, init_distributed, local_rank
from zerodrift.deepspeed.monitor.config import MONITORS, get_monitor_config
from zerodrift.deepspeed.monitor.monitor import MonitorMaster
from zerodrift.deepspeed.ops import OVER_PARAMETERS
from zerodrift.deepspeed.optimizer import DeepSpeedOptimizer
from zerodrift.deepspeed.spellings import MANAGED
from zerodrift.deepspeed.unsupported import RefusedConfigError
from zerodrift.deepspeed.written import with_additions, written_config
from zerodrift.errors import ConfigError, ModelError, UnsupportedError, first_line
from zerodrift.optim.flat import TORCH_DECAY
from zerodrift.optim.schedules import SCHEDULES
from zerodrift.optimizers import ADAMW, TYPES, either, meant

Path = str | os.PathLike[str]


def initialize(  # DeepSpeed's thirteen parameters
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Path | Mapping[str, Any] | Config | None = None,
    mesh_param: Any = None,
    config_params: Path | Mapping[str, Any] | Config | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Engine, optimizer, loader of `training_data`, schedule; what there is none of is None."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model", "must be a torch.nn.Module", got=type(model).__name__, do="Pass `model=...`."
        )
    _refuse(mpu, mesh_param)
    try:
        passed = written_config(args, config, config_params)
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
        if hasattr(args, "local_rank"):
            args.local_rank = local_rank()
        with with_additions(passed) as written:
            built = _optimizer(optimizer, model_parameters, model, written)
            schedule = _of_torch(written, "scheduler") if lr_scheduler is None else lr_scheduler
            loaded = load(_for_the_engine(written))
            curves = get_monitor_config(written)
            has_one = built is not None or loaded.optimizer is not None
            engine = make_engine(
                model, built, loaded, schedule=schedule if has_one else None, quiet=errand() is None
            )
        with raise_on_all_ranks(engine.comm):
            monitor = MonitorMaster(curves)
    except ConfigError as error:
        raise RefusedConfigError.joined([error]) from error
    wrapper = DeepSpeedEngine(engine, written, training_data, collate_fn, optimizer, monitor)
    return wrapper, wrapper.optimizer, wrapper.training_dataloader, wrapper.lr_scheduler


def _refuse(mpu: Any, mesh_param: Any) -> None:
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise UnsupportedError(
            "mpu",
            "must have no model parallelism",
            got=f"{mpu.get_model_parallel_world_size()} ranks",
            do="Shard with `zero_optimization.stage: 3` instead.",
        )
    if mesh_param is not None and len(mesh_param) > 1 and mesh_param[1] > 1:
        raise UnsupportedError(
            "mesh_param", "must have no sequence-parallel ranks", got=repr(mesh_param), do="Leave it out."
        )


# --- optimizer and schedule -----------------------------------------------------------------------------


def _optimizer(
    given: Any, model_parameters: Any, model: nn.Module, written: Mapping[str, Any]
) -> torch.optim.Optimizer | None:
    """An optimizer over the model's parameters; None where the config's block is for all of them alike."""
    if isinstance(given, DeepSpeedOptimizer):
        raise UnsupportedError("optimizer", "must be your own", got="another engine's", do="Build one.")
    if isinstance(given, torch.optim.Optimizer):
        given.param_groups[:] = [group for group in given.param_groups if group["params"]]
        return given
    parameters = None if model_parameters is None else _listed(model_parameters)
    if callable(given):
        return given(list(model.parameters()) if parameters is None else parameters)
    if given is not None:
        raise UnsupportedError(
            "optimizer",
            "must be a torch.optim.Optimizer or a function that makes one",
            got=type(given).__name__,
        )
    make = _of_torch(written, "optimizer")
    if make is not None:
        return make([p for p in model.parameters() if p.requires_grad] if parameters is None else parameters)
    block = written.get("optimizer")
    if not block or parameters is None or _is_everything(parameters, model):
        return None
    return _of_block(block.get("type", ""), dict(block.get("params") or {}), parameters)


TORCHS = {
    "optimizer": (torch.optim, torch.optim.Optimizer, TYPES),
    "scheduler": (torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler, SCHEDULES),
}
"""Blocks of the config that may name a class of torch's: where it is, what it is one of, and what has a name
in zerodrift."""


def _of_torch(written: Mapping[str, Any], key: str) -> Callable[[Any], Any] | None:
    """What makes the class of torch's that a block names; None where it names none."""
    block = written.get(key)
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        return None
    kind, (module, base, own) = block["type"], TORCHS[key]
    named = getattr(module, kind, None)
    if not (isinstance(named, type) and issubclass(named, base)) or {kind, kind.lower()} & own.keys():
        return None
    return functools.partial(_made, named, f"{key}.params", dict(block.get("params") or {}))


def _made(kind: type, where: str, params: dict[str, Any], over: Any) -> Any:
    try:
        return kind(over, **params)
    except (TypeError, ValueError) as error:
        must = f"must be arguments of `torch.optim`'s {kind.__name__}"
        raise ConfigError(where, must, got=first_line(error)) from error


def _for_the_engine(written: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine below reads: it gets what torch makes as an object, and writes no curves."""
    gone = {MANAGED, *MONITORS, *(key for key in TORCHS if _of_torch(written, key) is not None)}
    return {key: value for key, value in written.items() if key not in gone}


def _listed(given: Any) -> list[Any]:
    """Parameters or groups of them; of `named_parameters()`, what is named."""
    if isinstance(given, nn.Module):
        return list(given.parameters())
    items = [given] if isinstance(given, torch.Tensor) else list(given)
    return [item[1] if isinstance(item, tuple) else item for item in items]


def _is_everything(parameters: Iterable[Any], model: nn.Module) -> bool:
    """Whether these are the trained parameters of the model, in one group."""
    flat = list(parameters)
    if any(isinstance(item, dict) for item in flat):
        return False
    return {id(p) for p in flat if p.requires_grad} == {id(p) for p in model.parameters() if p.requires_grad}


def _of_block(kind: str, params: dict[str, Any], parameters: list[Any]) -> torch.optim.Optimizer:
    """The config's optimizer over some parameters, or groups of them."""
    named = TYPES.get(kind.lower())
    algorithm = None if named is None else meant(named, params)
    make = None if algorithm is None else OVER_PARAMETERS.get(algorithm)
    if make is None:
        raise UnsupportedError(
            "optimizer.type",
            f"must be {either(known.name for known in OVER_PARAMETERS)} where `model_parameters` "
            "are groups or a part of the model",
            got=repr(kind),
            do="Leave `model_parameters` out, or pass an optimizer.",
        )
    params.pop("adam_w_mode", None)
    if params.pop("torch_adam", False) and algorithm is ADAMW:
        params.setdefault("weight_decay", TORCH_DECAY)
    return make(parameters, **params)
