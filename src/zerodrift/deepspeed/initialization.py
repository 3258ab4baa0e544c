"""`initialize`: make an engine, its optimizer, a loader and a schedule from DeepSpeed's arguments.

Optimizer and schedule may be objects, functions that make them, or blocks of the config, which may name any
class of torch.

Invariant: all ranks refuse the same arguments, before anything is allocated.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zerodrift.alias import run_settings
from zerodrift.api import FROM_BLOCK, print_plan
from zerodrift.api import initialize as make_engine
from zerodrift.comm import raise_on_all_ranks
from zerodrift.config import Config, Optimizer, Scheduler, load, shown, without_torch_classes
from zerodrift.deepspeed.checkpointed_engine import tag_validation
from zerodrift.deepspeed.config import MANAGED, with_additions, written_config
from zerodrift.deepspeed.engine import DeepSpeedEngine, end_engine, end_engines_of
from zerodrift.deepspeed.modules import RefusedConfigError
from zerodrift.deepspeed.optimizer import DeepSpeedOptimizer
from zerodrift.deepspeed.tools.collectives import PORT, init_distributed, local_rank
from zerodrift.deepspeed.tools.curves import MONITORS, MonitorMaster, get_monitor_config
from zerodrift.deepspeed.tools.optimizers import OVER_PARAMETERS, require_states
from zerodrift.errors import ConfigError, ModelError, Problems, UnsupportedError, first_line
from zerodrift.optim import SCHEDULES, TORCH_DECAY
from zerodrift.optimizers import ADAMW, TYPES, algorithm_for, either
from zerodrift.policy import ANY, check_arguments

Path = str | os.PathLike[str]

TORCH_CLASSES = {
    "optimizer": (torch.optim, torch.optim.Optimizer, TYPES),
    "scheduler": (torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler, SCHEDULES),
}
"""Block of the config -> module and base class of torch's classes, and zerodrift's own names."""


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
    """Return the engine, its optimizer, the loader of `training_data` and the schedule. The last three may
    be None."""
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise ModelError("model", "must be a torch.nn.Module", got=got, do="Pass `model=...`.")
    _refuse_axes(mpu, mesh_param)
    try:
        passed = written_config(args, config, config_params)
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
        if hasattr(args, "local_rank"):
            args.local_rank = local_rank()
        with with_additions(passed) as written:
            loaded = load({k: v for k, v in written.items() if k not in (MANAGED, *MONITORS)})
            built = _build_optimizer(optimizer, model_parameters, model, loaded)
            schedule = _torch_class(loaded.scheduler, "scheduler") if lr_scheduler is None else lr_scheduler
            tag_validation(written)  # an error now, not at the first checkpoint
            curves = get_monitor_config(written)
            has_optimizer = built is not None or loaded.optimizer is not None
            schedule = schedule if has_optimizer else None
            end_engines_of(model)
            planned = without_torch_classes(loaded)
            engine = make_engine(model, built, planned, schedule=schedule, quiet=True)
            try:
                updates = (row.columns.update for row in engine.plan.rows)
                require_states(built, [update.state.dtype for update in updates if update is not None])
            except UnsupportedError:
                end_engine(engine)
                raise
        run = run_settings()
        if run is not None and run.shown != "none" and engine.mesh.rank() == 0:
            print_plan(engine.plan, "run" if run.shown == "brief" else "")
        with raise_on_all_ranks(engine.comm):
            monitor = MonitorMaster(curves)
    except ConfigError as error:
        raise RefusedConfigError.joined([error]) from error
    wrapper = DeepSpeedEngine(engine, written, training_data, collate_fn, optimizer, monitor)
    return wrapper, wrapper.optimizer, wrapper.training_dataloader, wrapper.lr_scheduler


def _refuse_axes(mpu: Any, mesh_param: Any) -> None:
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        got = f"{mpu.get_model_parallel_world_size()} ranks"
        do = "Shard with `zero_optimization.stage: 3` instead."
        raise UnsupportedError("mpu", "must have no model parallelism", got=got, do=do)
    if mesh_param is not None and len(mesh_param) > 1 and mesh_param[1] > 1:
        must = "must have no sequence-parallel ranks"
        raise UnsupportedError("mesh_param", must, got=repr(mesh_param), do="Leave it out.")


def _build_optimizer(
    given: Any, model_parameters: Any, model: nn.Module, loaded: Config
) -> torch.optim.Optimizer | None:
    """Return an optimizer, or None if the config's block applies to the whole model."""
    if isinstance(given, DeepSpeedOptimizer):
        raise UnsupportedError("optimizer", "must be your own", got="another engine's", do="Build one.")
    if isinstance(given, torch.optim.Optimizer):
        given.param_groups[:] = [group for group in given.param_groups if group["params"]]
        return given
    parameters = None if model_parameters is None else _listed(model_parameters)
    if callable(given):
        return given(list(model.parameters()) if parameters is None else parameters)
    if given is not None:
        must = "must be a torch.optim.Optimizer or a function that makes one"
        raise UnsupportedError("optimizer", must, got=type(given).__name__)
    block = loaded.optimizer
    make = _torch_class(block, "optimizer")
    if make is not None:
        return make([p for p in model.parameters() if p.requires_grad] if parameters is None else parameters)
    if block is None or parameters is None or _is_everything(parameters, model):
        return None
    made = optimizer_over(block.type, block.params, parameters)
    setattr(made, FROM_BLOCK, True)
    return made


def _torch_class(block: Optimizer | Scheduler | None, key: str) -> Callable[[Any], Any] | None:
    if block is None:
        return None
    kind, (module, base, own) = block.type, TORCH_CLASSES[key]
    named = getattr(module, kind, None)
    if not (isinstance(named, type) and issubclass(named, base)) or {kind, kind.lower()} & own.keys():
        return None
    build: Any = named

    def make(over: Any) -> Any:
        try:
            return build(over, **block.params)
        except (TypeError, ValueError) as error:
            must = f"must be arguments of `torch.optim`'s {kind}"
            raise ConfigError(f"{key}.params", must, got=first_line(error)) from error

    return make


def _listed(given: Any) -> list[Any]:
    """Return parameters or groups of them. Names from `named_parameters()` are dropped."""
    if isinstance(given, nn.Module):
        return list(given.parameters())
    items = [given] if isinstance(given, torch.Tensor) else list(given)
    items = [item[1] if isinstance(item, tuple) else item for item in items]
    for item in items:
        if not isinstance(item, (torch.Tensor, dict)):
            must = "must hold parameters of the model, or groups of them"
            raise UnsupportedError("model_parameters", must, got=f"a {type(item).__name__}")
    return items


def _is_everything(parameters: list[Any], model: nn.Module) -> bool:
    """Return True if the list holds all trained parameters of the model, without groups."""
    if any(isinstance(item, dict) for item in parameters):
        return False
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return {id(parameter) for parameter in parameters if parameter.requires_grad} == trained


def optimizer_over(kind: str, written: Mapping[str, Any], parameters: list[Any]) -> torch.optim.Optimizer:
    """Make the config's optimizer over parameter groups, or over a part of the parameters."""
    name = TYPES.get(kind.lower())
    algorithm = None if name is None else algorithm_for(name, written)
    make = None if algorithm is None else OVER_PARAMETERS.get(algorithm)
    if make is None:
        known = either(algorithm.name for algorithm in OVER_PARAMETERS)
        must = f"must be {known} if `model_parameters` are groups or a part of the model"
        do = "Leave `model_parameters` out, or pass an optimizer."
        raise UnsupportedError("optimizer.type", must, got=repr(kind), do=do)
    problems = Problems()
    params = check_arguments("optimizer.params", str(name), written, problems)
    problems.raise_as(ConfigError)
    params.pop("adam_w_mode", None)
    if params.pop("torch_adam", False) and algorithm is ADAMW:
        params.setdefault("weight_decay", TORCH_DECAY)
    taken = inspect.signature(make).parameters
    for key in params.keys() - taken.keys():
        if key not in ANY:
            must, do = "must be left out where `model_parameters` are groups", "Pass an optimizer."
            raise UnsupportedError(f"optimizer.params.{key}", must, got=shown(params[key]), do=do)
    return make(parameters, **{key: value for key, value in params.items() if key in taken})
