"""`deepspeed.pipe`: importable, for scripts that ask `isinstance(model, PipelineModule)`; not usable."""

from __future__ import annotations

from typing import Any

from zerodrift.deepspeed import absent

_WHY = "Use a plain module with `zero_optimization.stage: 3`."
_ABSENT = absent.absent(
    "deepspeed.pipe", dict.fromkeys(("PipelineModule", "LayerSpec", "TiedLayerSpec", "ProcessTopology"), _WHY)
)


def __getattr__(name: str) -> Any:
    return absent.missing(__name__, name, [], _ABSENT)
