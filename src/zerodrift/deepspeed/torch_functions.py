"""Small functions of DeepSpeed that torch itself nearly has, activation checkpointing among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint as torch_checkpoint

from zerodrift.versions import numbers

Function = TypeVar("Function", bound=Callable[..., object])

_orig_torch_arange = torch.arange


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool] | None = None
) -> Any:
    """Move the tensors in lists, tuples and dicts to a device, or only those that `criterion_func`
    accepts."""
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(part, device, criterion_func) for part in item)
    if isinstance(item, dict):
        return {key: move_to_device(part, device, criterion_func) for key, part in item.items()}
    return item


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
