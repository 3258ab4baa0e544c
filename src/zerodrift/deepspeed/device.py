"""`deepspeed.accelerator`: CUDA or the CPU as one object.

Any name that is not in the tables below is looked up in `torch.cuda` or `torch.cpu`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from zerodrift.deepspeed.errors import NotHereError, absent

ON_CPU: Mapping[str, Any] = {
    "device_count": 1,
    "current_device": "cpu",
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
    "reset_peak_memory_stats": None,
    "is_bf16_supported": True,
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0
    ),
}
"""Functions of `torch.cuda` -> what they return on a CPU."""


class Accelerator:
    """CUDA if available, else the CPU."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._module: ModuleType = torch.cuda if self._cuda else torch.cpu

    def __getattr__(self, name: str) -> Any:
        if name in ON_CPU:
            return functools.partial(self._call, name)
        if not name.startswith("__") and hasattr(self._module, name):
            return getattr(self._module, name)
        raise absent(f"get_accelerator().{name}", f"Use `torch.{self._name}`.")

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed's keyword is `device_index`, torch's is `device`.
        return getattr(torch.cuda, name)(*args, *kwargs.values()) if self._cuda else ON_CPU[name]

    @property
    def _cuda(self) -> bool:
        return self._name == "cuda"

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or not self._cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.cuda.device(device_index) if self._cuda else torch.device("cpu")

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}" if self._cuda else "cpu"

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return not self._cuda

    def total_memory(self, device_index: int | None = None) -> int:
        if not self._cuda:
            must = "must be asked of a GPU"
            raise NotHereError("get_accelerator().total_memory", must, got="a CPU", do="Use `psutil`.")
        return torch.cuda.get_device_properties(device_index or 0).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        return self.total_memory(device_index) - torch.cuda.memory_allocated(device_index)

    def manual_seed(self, seed: int) -> Any:
        return torch.cuda.manual_seed(seed) if self._cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.cuda.manual_seed_all(seed) if self._cuda else torch.manual_seed(seed)

    def random(self) -> Any:
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if not self._cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def communication_backend_name(self) -> str:
        return "nccl" if self._cuda else "gloo"

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        return torch.cuda.nvtx.range_push(msg) if self._cuda else None

    def range_pop(self, domain: str | None = None) -> Any:
        return torch.cuda.nvtx.range_pop() if self._cuda else None

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def get_compile_backend(self) -> str:
        return "inductor"


def get_accelerator() -> Accelerator:
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    return True
