"""`deepspeed.runtime.config`: the error that a wrong config raises."""

from __future__ import annotations

from typing import Any

from zerodrift.deepspeed import absent
from zerodrift.errors import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]

_ABSENT = absent.absent(
    "deepspeed.runtime.config", {"DeepSpeedConfig": "Use `zerodrift.load(file)`, which checks every key."}
)


def __getattr__(name: str) -> Any:
    return absent.missing(__name__, name, __all__, _ABSENT)
