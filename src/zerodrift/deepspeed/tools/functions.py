"""Functions of DeepSpeed that need no engine: the log, small helpers, loaders, activation checkpointing, and
marks on modules.

Marks change no result: a unit is always gathered whole, and so is any other unit whose parameters a module
uses. The script sets the handlers and the level of the log.
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
from torch.utils.data import DataLoader, Dataset

from zerodrift.comm import usable_accelerator
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
    logger.warning(message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger and of its handlers, such as "info"."""
    target = logger if custom_logger is None else custom_logger
    target.setLevel(log_level_str.upper())
    for handler in target.handlers:
        handler.setLevel(target.level)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the GPU memory of this process if `force` is set and there is a GPU."""
    if force and usable_accelerator() is not None:
        sizes = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()
        now, most = (count / 2**30 for count in sizes)
        logger.info("%s: %.2f GiB allocated, %.2f GiB at most", message, now, most)


# --- small helpers ----------------------------------------------------------------------------------------


def _map_tensors(item: Any, call: Callable[[torch.Tensor], torch.Tensor], make: Any = None) -> Any:
    """Apply a function to the tensors in lists, tuples and mappings. Mappings become instances of `make`."""
    if isinstance(item, torch.Tensor):
        return call(item)
    if isinstance(item, (list, tuple)):
        return type(item)(_map_tensors(part, call, make) for part in item)
    if isinstance(item, Mapping):
        kind: Any = make or type(item)
        return kind({key: _map_tensors(part, call, make) for key, part in item.items()})
    return item


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool] | None = None
) -> Any:
    """Move the tensors in lists, tuples and dicts to a device, or those that `criterion_func` accepts."""
    stays = (lambda each: False) if criterion_func is None else (lambda each: not criterion_func(each))
    return _map_tensors(item, lambda each: each if stays(each) else each.to(device), dict)


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:  # noqa: B008
    return _map_tensors(item, lambda each: each.detach().clone().to(device))


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Return True if torch's version is in the range. "2.1" as a maximum includes 2.1.3."""
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
    """Return the function. transformers replaces this wrapper while it builds a model."""
    return fn


# --- loaders ----------------------------------------------------------------------------------------------


class RepeatingLoader:
    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """Loads this rank's batches, without worker processes. `next` works on it too."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, sampler
        self.post_process_func: Callable[..., Any] | None = None
        """Called with every batch and the sampler's state."""
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=pin_memory and usable_accelerator() is not None,
        )
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> DeepSpeedDataLoader:
        self._batches = iter(self._loader)
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches)
        return batch if self.post_process_func is None else self.post_process_func(batch, {})


# --- deepspeed.checkpointing ------------------------------------------------------------------------------

_calls: list[bool] = []


def configure(mpu_: Any, *args: Any, **kwargs: Any) -> None:
    _calls.append(True)


def is_configured() -> bool:
    return bool(_calls)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose activations are recomputed in the backward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


# --- marks ------------------------------------------------------------------------------------------------


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Check the arguments. A module may use any parameter in its forward."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Yield the engine's module, whose units gather themselves."""
    yield model.module


def is_zero_param(parameter: Any) -> bool:
    """Return True if the parameter has the attributes that stage 3 and `zero.Init` set."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Return the groups unchanged, because there are no expert layers of DeepSpeed."""
    if not isinstance(param_groups, (dict, list, tuple)):
        raise ValueError(f"Unknown param group type of {type(param_groups)}")
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Return the groups, or one group of the parameters."""
    if not isinstance(model_parameters, list):
        raise AssertionError("model_parameters must be a list")
    if model_parameters and isinstance(model_parameters[0], dict):
        return model_parameters
    return [{"params": model_parameters, "name": "dense-params"}]


def split_params_into_shared_and_expert_params(
    params: Sequence[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return all parameters as shared ones."""
    return list(params), []


LEAF_MODULE = "ds_z3_leaf_module"
"""The attribute of a parameter at stage 3 whose module is marked."""
DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{family}.modeling_{family}.{block}"
    for family, block in (
        ("mixtral", "MixtralSparseMoeBlock"),
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock"),
        ("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    )
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []
MIN_SWAPPABLE_BYTES = 1024**2
"""Size below which DeepSpeed keeps a tensor off the disk."""


def mark_configured_leaves(model: nn.Module, block: Any) -> None:
    """Mark the modules that `zero_optimization.leaf_module` names, or DeepSpeed's default ones."""
    block = block if isinstance(block, Mapping) else {}

    def listed(key: str) -> list[Any]:
        value = block.get(key)
        return [value] if isinstance(value, str) else list(value or ())

    classes, names, ends = map(listed, ("classes", "names", "name_suffixes"))
    kinds = classes if "classes" in block else DEFAULT_LEAF_MODULE_CLASSES
    found = set_z3_leaf_modules(model, kinds, raise_if_not_found=False)
    named, no_names = set_z3_leaf_modules_by_name(model, names, raise_if_not_found=False)
    ended, no_ends = set_z3_leaf_modules_by_suffix(model, ends, raise_if_not_found=False)
    missing = [*no_names, *no_ends] if found or named or ended else [*classes, *names, *ends]
    if missing:
        logger.warning("`zero_optimization.leaf_module` names modules that do not exist: %s", missing)


def z3_leaf_module(model: nn.Module) -> bool:
    return bool(model.__dict__.get("_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    return hasattr(model, LEAF_MODULE)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    model.__dict__["_z3_leaf"] = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, which may be given by their names."""
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their paths. Return the modules, and the paths that do not exist."""
    paths = dict(model.named_modules())
    chosen = [paths[name] for name in module_names if name in paths]
    missing = [name for name in module_names if name not in paths]
    return _mark(model, chosen, flag, raise_if_not_found, module_names), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their paths. Return the modules, and the suffixes that match nothing."""
    paths = dict(model.named_modules())
    chosen = [module for path, module in paths.items() if path.endswith(tuple(module_name_suffixes))]
    missing = [end for end in module_name_suffixes if not any(path.endswith(end) for path in paths)]
    return _mark(model, chosen, flag, raise_if_not_found, module_name_suffixes), missing


def _mark_classes(model: nn.Module, classes: Sequence[Any], flag: bool, must_find: bool) -> list[nn.Module]:
    kinds = tuple(item for item in classes if not isinstance(item, str))
    chosen = []
    for module in model.modules():
        kind = type(module)
        names = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(module, kinds) or any(name in classes for name in names):
            chosen.append(module)
    return _mark(model, chosen, flag, must_find, classes)


def _mark(
    model: nn.Module, modules: list[nn.Module], flag: bool, must_find: bool, wanted: Sequence[Any]
) -> list[nn.Module]:
    if not modules and must_find:
        raise ValueError(f"No modules were found for {list(wanted)} in {type(model).__name__}.")
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules
