"""Functions of DeepSpeed that scripts call beside an engine: the log, small helpers, activation
checkpointing, and marks on modules.

Marks change nothing: a unit is gathered whole, and a module that computes with a parameter of another unit
has that unit gathered. Handlers and level of the log are the script's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from zerodrift.versions import numbers

Function = TypeVar("Function", bound=Callable[..., object])

_orig_torch_arange = torch.arange

# --- the log ----------------------------------------------------------------------------------------------

logger = logging.getLogger("zerodrift.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks. Log on all of them if -1 is among them or torch.distributed does not run."""
    running = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if running else -1
    if not running or not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.cache
def warning_once(message: str) -> None:
    """Warn, unless the same text was a warning before."""
    logger.warning(message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the GPU memory of this process if `force` is set and there is a GPU."""
    if force and torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GiB allocated, %.2f GiB at most", message, now, most)


# --- helpers that torch nearly has ------------------------------------------------------------------------


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:  # noqa: B008
    """Copy tensors to a device, so that `torch.save` does not write the buffers that they are views of."""
    if isinstance(item, torch.Tensor):
        copy = item.detach().clone()
        return copy if device is None else copy.to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(part, device) for part in item)
    if isinstance(item, Mapping):
        copies = {key: clone_tensors_for_torch_save(part, device) for key, part in item.items()}
        return type(item)(copies)  # type: ignore[call-arg]
    return item


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Return True if torch's version lies between these, both included, compared as far as they are
    written."""
    given = str(torch.__version__)
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version: Must specify min_version or max_version")
    if min_version is not None and numbers(given) < numbers(str(min_version)):
        return False
    return max_version is None or numbers(given, str(max_version)) <= numbers(str(max_version))


def instrument_w_nvtx(func: Function) -> Function:
    """Return the function. `torch.profiler` shows the engine's own ranges."""
    return func


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Return the function. transformers replaces this one while it builds a model, so that DeepSpeed does not
    round rotary tables; nothing is rounded here."""
    return fn


# --- deepspeed.checkpointing ------------------------------------------------------------------------------

_calls: list[bool] = []


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Record the call, for `is_configured`."""
    _calls.append(True)


def is_configured() -> bool:
    return bool(_calls)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose activations are recomputed in the backward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def reset() -> None:
    """Do nothing: no state is kept between steps."""


# --- marks ------------------------------------------------------------------------------------------------


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Check the arguments. A module may use any parameter in its forward."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: no parameter is registered."""


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Yield the engine's module, whose units gather themselves."""
    yield model.module


def is_zero_param(parameter: Any) -> bool:
    """Return True if the parameter has the attributes that stage 3 and `zero.Init` set."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def has_moe_layers(m: nn.Module) -> tuple[bool, list[int]]:
    """Return that there are none of DeepSpeed's expert layers."""
    return False, []


def is_moe_param(param: nn.Parameter) -> bool:
    return False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def z3_leaf_module(model: nn.Module) -> bool:
    return bool(model.__dict__.get("_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    model.__dict__["_z3_leaf"] = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, which may be given by their names."""
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def _mark(model: nn.Module, classes: Sequence[Any], flag: bool, must_find: bool) -> list[nn.Module]:
    kinds = tuple(item for item in classes if not isinstance(item, str))
    chosen = []
    for module in model.modules():
        kind = type(module)
        names = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(module, kinds) or any(name in classes for name in names):
            chosen.append(module)
    if not chosen and must_find:
        raise ValueError(f"No modules were found for {list(classes)} in {type(model).__name__}.")
    for module in chosen:
        set_z3_leaf_module(module, flag)
    return chosen
