"""`deepspeed.runtime`: the modules that scripts import by their full path."""

from __future__ import annotations

import importlib
from typing import Any

from zerodrift.deepspeed import absent
from zerodrift.deepspeed.runtime import dataloader, lr_schedules, torch_autocast

__all__ = ["dataloader", "lr_schedules", "torch_autocast"]


def __getattr__(name: str) -> Any:
    if name in ("config", "engine", "utils", "zero"):
        return importlib.import_module(f"{__name__}.{name}")
    return absent.missing(__name__, name, __all__, {})
