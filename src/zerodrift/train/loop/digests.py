"""What a run writes down of its bits, so that `zerodrift replay` can find where they first differ.

A line of kind `digest` in the metrics: of a step's state by unit of the plan, of its gradients by unit, and
the loss of every micro-batch. What they depend on beside the job is in the line of kind `start`.

Invariant: two runs that computed the same bits wrote the same lines, whatever their number of ranks.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from zerodrift.engine.digest import Digest
from zerodrift.engine.engine import Engine


class DigestsOfStep:
    """Around one step: takes the digest of its gradients before the update. Every rank makes one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gradients: Digest | None = None

    def __enter__(self) -> None:
        self._engine.before_update = self._take

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.before_update = None

    def _take(self) -> None:
        self._gradients = self._engine.gradient_digest()

    def line(self, step: int, losses: list[float]) -> dict[str, Any]:
        """After the step; `losses` are those of its micro-batches, by their numbers. Every rank calls it."""
        state = self._engine.digest()
        gradients = {} if self._gradients is None else self._gradients.by_unit()
        return {
            "step": step,
            "digest": str(state),
            "state": state.by_unit(),
            "gradients": gradients,
            "losses": [loss.hex() for loss in losses],
        }
