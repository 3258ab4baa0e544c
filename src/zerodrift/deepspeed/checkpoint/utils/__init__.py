"""`deepspeed.checkpoint.utils`. The name is DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["clone_tensors_for_torch_save"]


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:  # noqa: B008
    """A copy with tensors of their own on a device, so that `torch.save` writes no buffer that they are views
    of."""
    if isinstance(item, torch.Tensor):
        copy = item.detach().clone()
        return copy if device is None else copy.to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(part, device) for part in item)
    if isinstance(item, Mapping):
        copies = {key: clone_tensors_for_torch_save(part, device) for key, part in item.items()}
        return type(item)(copies)  # type: ignore[call-arg]
    return item
