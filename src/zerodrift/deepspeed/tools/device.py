"""`deepspeed.accelerator`: an accelerator or the CPU as one object.

A name that is not in this file is looked up in `torch.cuda`, or the module of another device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from zerodrift.comm import usable_accelerator
from zerodrift.deepspeed.modules import NotHereError, absent
from zerodrift.deepspeed.tools.collectives import local_size

ON_CPU: Mapping[str, Any] = {
    "device_count": lambda *device: local_size(),  # each rank has one, as in DeepSpeed
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

CONSTANT: Mapping[str, Any] = {
    "is_available": True,
    "is_fp16_supported": True,
    "random": torch.random,
    "supported_dtypes": [torch.float, torch.half, torch.bfloat16],
    "visible_devices_envs": ["CUDA_VISIBLE_DEVICES"],
    "get_compile_backend": "inductor",
}
"""Methods without arguments -> what they return."""


class Accelerator:
    def __init__(self) -> None:
        self._name = (usable_accelerator() or torch.device("cpu")).type
        self._is_cpu = self._name == "cpu"
        self._module: Any = torch.get_device_module(self._name)

    def __getattr__(self, name: str) -> Any:
        if name in CONSTANT:
            return lambda: CONSTANT[name]
        if name in ON_CPU:
            do = ON_CPU[name] if self._is_cpu else getattr(self._module, name)
            return functools.partial(self._call, do)
        if not name.startswith("__") and hasattr(self._module, name):
            return getattr(self._module, name)
        raise absent(f"get_accelerator().{name}", f"Use `torch.{self._name}`.")

    @staticmethod
    def _call(do: Any, *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed's keyword is `device_index`, torch's is `device`.
        given = (*args, *(value for value in kwargs.values() if value is not None))
        return do(*given) if callable(do) else do

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._is_cpu else f"{self._name}:{device_index}"

    def amp(self) -> Any:
        return self._module.amp

    def device(self, device_index: int | None = None) -> Any:
        return torch.device("cpu") if self._is_cpu else self._module.device(device_index)

    def current_device_name(self) -> str:
        return "cpu" if self._is_cpu else f"{self._name}:{self._module.current_device()}"

    def is_synchronized_device(self) -> bool:
        return self._is_cpu

    def total_memory(self, device_index: int | None = None) -> int:
        if self._is_cpu:
            must = "must be asked of a GPU"
            raise NotHereError("get_accelerator().total_memory", must, got="a CPU", do="Use `psutil`.")
        return torch.accelerator.get_memory_info(device_index or 0)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return self.total_memory(device_index) - torch.accelerator.memory_allocated(device_index)

    def communication_backend_name(self) -> str:
        return torch.distributed.get_default_backend_for_device(self._name)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._is_cpu else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        return torch.cuda.nvtx.range_push(msg) if self._name == "cuda" else None

    def range_pop(self, domain: str | None = None) -> Any:
        return torch.cuda.nvtx.range_pop() if self._name == "cuda" else None


def get_accelerator() -> Accelerator:
    return Accelerator()
