"""The best evaluation of a run, and whether it is time to end for want of a better one.

Invariant: it follows from the losses of the evaluations so far, in their order, and from nothing else; so a
run that is gone on with knows what one that was not would know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class BestEvaluation:
    """The lowest validation loss so far, and how many came after it."""

    def __init__(self, patience: int, losses: Iterable[float | None] = ()) -> None:
        """`patience` is how many may come after it; 0 is any number."""
        self._patience = patience
        self._loss = math.inf
        self._after = 0
        for loss in losses:
            self.take(math.nan if loss is None else loss)

    def take(self, loss: float) -> bool:
        """Whether this one is better than all before it; one that is no number never is."""
        better = loss < self._loss
        self._loss, self._after = (loss, 0) if better else (self._loss, self._after + 1)
        return better

    @property
    def is_out_of_patience(self) -> bool:
        return 0 < self._patience <= self._after

    @property
    def words(self) -> str:
        """Why a run ends before its last step."""
        times = f"{self._after} evaluation" + ("s" if self._after > 1 else "")
        return f"{times} without a better loss than {self._loss:.4f} (`run.patience`)"
