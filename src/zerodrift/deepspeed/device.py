"""`deepspeed.accelerator`: CUDA or the CPU as one object.

Any name that is not in the tables below is looked up in `torch.cuda` or `torch.cpu`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from zerodrift.deepspeed.modules import absent

ON_CPU: Mapping[str, Any] = {
    "device_count": 1,
    "current_device": "cpu",
    "is_bf16_supported": True,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "get_rng_state": lambda *device: torch.get_rng_state(),
    "set_rng_state": lambda state, *device: torch.set_rng_state(state),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")),
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0
    ),
}
"""Functions of `torch.cuda` -> what they do or return on a CPU."""

CONSTANT: Mapping[str, Any] = {
    "is_available": True,
    "is_fp16_supported": True,
    "supported_dtypes": [torch.float, torch.half, torch.bfloat16],
}
"""Methods without arguments -> what they return."""


class Accelerator:
    """CUDA if available, else the CPU."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._name = "cuda" if self._cuda else "cpu"

    def __getattr__(self, name: str) -> Any:
        if name in CONSTANT:
            return lambda: CONSTANT[name]
        if name in ON_CPU:
            return functools.partial(self._call, getattr(torch.cuda, name) if self._cuda else ON_CPU[name])
        module = getattr(torch, self._name)
        if not name.startswith("__") and hasattr(module, name):
            return getattr(module, name)
        raise absent(f"get_accelerator().{name}", f"Use `torch.{self._name}`.")

    @staticmethod
    def _call(do: Any, *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed's keyword is `device_index`, torch's is `device`.
        given = (*args, *(value for value in kwargs.values() if value is not None))
        return do(*given) if callable(do) else do

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or not self._cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.cuda.device(device_index) if self._cuda else torch.device("cpu")

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}" if self._cuda else "cpu"

    def communication_backend_name(self) -> str:
        return "nccl" if self._cuda else "gloo"

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._cuda else tensor


def get_accelerator() -> Accelerator:
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    return True
