"""`deepspeed.checkpointing`: activation checkpointing, which is `torch.utils.checkpoint`.

What `configure` says of partitions, copies on the CPU and contiguous buffers tunes DeepSpeed's own machinery:
the same activations are recomputed without it, and the same model is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torchs

from zerodrift.deepspeed import unsupported

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]

_configured: list[bool] = []

__getattr__ = unsupported.lookup(__name__)


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Remember that it was called, as `is_configured` tells."""
    _configured.append(True)


def is_configured() -> bool:
    return bool(_configured)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Its activations are dropped, and computed again in the backward."""
    return torchs.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def reset() -> None:
    """Nothing is kept from one step to the next."""
