"""`deepspeed.checkpoint`: what accelerate takes of it is in `utils`; checkpoints themselves need no tools."""

from __future__ import annotations

from typing import Any

from zerodrift.deepspeed import absent

_WHY = "Every checkpoint loads on any number of ranks, at any stage: there is nothing to convert."
_ABSENT = absent.absent(
    "deepspeed.checkpoint",
    dict.fromkeys(("DeepSpeedCheckpoint", "ds_to_universal", "universal_checkpoint"), _WHY),
)


def __getattr__(name: str) -> Any:
    return absent.missing(__name__, name, [], _ABSENT)
