"""`deepspeed.runtime.zero.offload_config`: where something may rest, by DeepSpeed's names."""

from __future__ import annotations

import enum

from zerodrift.deepspeed import unsupported

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]

__getattr__ = unsupported.lookup(__name__)


class OffloadDeviceEnum(str, enum.Enum):
    """The places."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """What `offload_states` moves in DeepSpeed."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
