"""torch's deterministic operations: on while an engine of this process needs them.

The switch is torch's own and holds for the whole process. Memory that is not written yet is left as it is,
which torch would fill in this mode: nothing here reads it.

Invariant: when the last engine that asked has ended, the switches are as its first found them.
"""

from __future__ import annotations

import os
import re

import torch

from zerodrift.errors import UnsupportedError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Without it cuBLAS may choose otherwise in each run; read when CUDA is first used."""

_REFUSED = re.compile(r"^(\S+) does not have a deterministic implementation")
_asking: set[object] = set()
_before: tuple[bool, bool, bool] | None = None


def ask(asker: object, device: torch.device) -> None:
    """From now on, until `release`."""
    global _before
    if _before is None:
        fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        _before = torch.are_deterministic_algorithms_enabled(), warns, fills
        if not _before[0]:
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        os.environ.setdefault(WORKSPACE, ":4096:8")
    _asking.add(asker)


def release(asker: object) -> None:
    """Of one that did not ask, or has released, nothing is heard."""
    global _before
    _asking.discard(asker)
    if _asking or _before is None:
        return
    enabled, warns, fills = _before
    _before = None
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def workspace() -> str:
    """What cuBLAS is told of it; nothing where nobody has said."""
    return os.environ.get(WORKSPACE, "")


def refused(error: BaseException) -> UnsupportedError | None:
    """What torch refuses in this mode, in our words; None for anything else."""
    found = _REFUSED.match(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    return UnsupportedError(
        "precision.reduce.order",
        f"must be `rank` with `{found[1]}`, whose result is not the same each time",
        got="tree",
        do="Use another operation in the model, or leave `order` out.",
    )
