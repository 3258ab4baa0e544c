"""Marks that DeepSpeed needs on modules and parameters, and questions about them.

The engine needs none of them: a unit is gathered whole, and a module that computes with a parameter of
another unit has that unit gathered. The functions check their arguments, keep the mark, and change nothing
else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

EXTERNAL = "_zerodrift_external"
"""The attribute of a module with the parameters of others that it uses."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Record that `module` uses `parameter` in its forward."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    held = module.__dict__.setdefault(EXTERNAL, [])
    if not any(other is parameter for other in held):
        held.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    held = module.__dict__.get(EXTERNAL, [])
    module.__dict__[EXTERNAL] = [other for other in held if other is not parameter]


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Yield the engine's module, whose units gather themselves."""
    yield model.module


def is_zero_param(parameter: Any) -> bool:
    """Return True if the parameter has the attributes that stage 3 and `zero.Init` set."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


# --- DeepSpeed's expert layers, of which a model here has none --------------------------------------------


def has_moe_layers(m: nn.Module) -> tuple[bool, list[int]]:
    return False, []


def is_moe_param(param: nn.Parameter) -> bool:
    return False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


# --- leaf modules -----------------------------------------------------------------------------------------


def z3_leaf_module(model: nn.Module) -> bool:
    return bool(model.__dict__.get("_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    return hasattr(model, "ds_z3_leaf_module")


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
    """Mark modules by their paths. Return them and the names that do not exist."""
    paths = dict(model.named_modules())
    chosen = [paths[name] for name in module_names if name in paths]
    missing = [name for name in module_names if name not in paths]
    return _mark(model, chosen, flag, raise_if_not_found, module_names), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their paths. Return them and the suffixes that match nothing."""
    paths = dict(model.named_modules())
    chosen = [module for path, module in paths.items() if path.endswith(tuple(module_name_suffixes))]
    missing = [end for end in module_name_suffixes if not any(path.endswith(end) for path in paths)]
    return _mark(model, chosen, flag, raise_if_not_found, module_name_suffixes), missing


def _mark_classes(model: nn.Module, classes: Sequence[Any], flag: bool, must_find: bool) -> list[nn.Module]:
    names = {item for item in classes if isinstance(item, str)}
    kinds = tuple(item for item in classes if not isinstance(item, str))
    chosen = [
        module
        for module in model.modules()
        if isinstance(module, kinds)
        or type(module).__name__ in names
        or f"{type(module).__module__}.{type(module).__qualname__}" in names
    ]
    return _mark(model, chosen, flag, must_find, classes)


def _mark(
    model: nn.Module, modules: list[nn.Module], flag: bool, must_find: bool, wanted: Sequence[Any]
) -> list[nn.Module]:
    if not modules and must_find:
        raise ValueError(f"No modules were found for {list(wanted)} in {type(model).__name__}.")
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules
