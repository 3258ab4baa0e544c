"""A platform for verl without a GPU, by VERL_USE_EXTERNAL_MODULES: ranks on CPUs are its ranks.

verl knows platforms of GPUs alone. This one has a CPU, gloo, and reports no memory. With
VERL_ENGINE_DEVICE=cuda verl's own engines, which are registered for that, run here too.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import verl.utils.import_utils
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

DEVICE: Any = ModuleType("torch.cpu")
DEVICE.__dict__.update(torch.cpu.__dict__)
for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(DEVICE, name, lambda *_: 0)
DEVICE.set_device = DEVICE.empty_cache = lambda *_: None
DEVICE.mem_get_info = lambda *_: (0, 0)
DEVICE.get_device_name = lambda *_: "cpu"


class PlatformCPU(PlatformCUDA):
    device_name = "cpu"  # type: ignore[assignment]
    vendor_name = ""  # type: ignore[assignment]
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"

    def set_allocator_settings(self, settings: str) -> None:
        pass


set_platform(PlatformCPU())
# Beside TRL, verl 0.9.1 patches a class that TRL 1.16 has no more: its own engines fail there, too.
verl.utils.import_utils.is_trl_available = lambda: False  # type: ignore[assignment]
join = torch.distributed.init_process_group


def joined(backend: str = "gloo", **how: Any) -> None:
    """Join with gloo, in place of verl's one backend for the CPU and one for the device."""
    join("gloo", **how)


torch.distributed.init_process_group = joined
