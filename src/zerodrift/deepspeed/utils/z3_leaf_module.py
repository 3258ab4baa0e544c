"""`deepspeed.utils.z3_leaf_module`: modules that DeepSpeed gathers whole.

They need no mark here, because a unit is gathered whole: the functions that set one check their arguments,
remember the mark, and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]


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
    """Mark the modules of these classes, or of classes with these full names."""
    return _mark(
        model, _of_classes(model, leaf_module_classes), True, raise_if_not_found, leaf_module_classes
    )


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    return _mark(
        model, _of_classes(model, leaf_module_classes), False, raise_if_not_found, leaf_module_classes
    )


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their path; returns them and the names that were not found."""
    paths = dict(model.named_modules())
    missing = [name for name in module_names if name not in paths]
    marked = _mark(
        model, [paths[n] for n in module_names if n in paths], flag, raise_if_not_found, module_names
    )
    return marked, missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose path ends like one of these; returns them and the suffixes that nothing has."""
    paths = dict(model.named_modules())
    missing = [end for end in module_name_suffixes if not any(path.endswith(end) for path in paths)]
    ends = tuple(module_name_suffixes)
    chosen = [module for path, module in paths.items() if path.endswith(ends)]
    return _mark(model, chosen, flag, raise_if_not_found, module_name_suffixes), missing


def _of_classes(model: nn.Module, classes: Sequence[Any]) -> list[nn.Module]:
    names = {item for item in classes if isinstance(item, str)}
    kinds = tuple(item for item in classes if not isinstance(item, str))
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds)
        or type(module).__name__ in names
        or f"{type(module).__module__}.{type(module).__qualname__}" in names
    ]


def _mark(
    model: nn.Module, modules: list[nn.Module], flag: bool, must_find: bool, asked: Sequence[Any]
) -> list[nn.Module]:
    if not modules and must_find:
        raise ValueError(f"No modules were found for {list(asked)} in {type(model).__name__}.")
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules
