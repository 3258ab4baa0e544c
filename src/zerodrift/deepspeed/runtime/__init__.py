"""`deepspeed.runtime`: the modules that scripts import by their full path."""

from __future__ import annotations

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.runtime import dataloader, lr_schedules, torch_autocast

__all__ = ["dataloader", "lr_schedules", "torch_autocast"]


__getattr__ = unsupported.lookup(
    __name__, "activation_checkpointing", "base_optimizer", "config", "engine", "utils", "zero"
)
