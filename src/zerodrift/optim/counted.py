"""What every schedule does with its count of batches.

Invariant: a schedule resumes from its count alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zerodrift.errors import Problem


class Counted:
    """Rates of parameter groups by the count of batches, which is -1 before the first `step`."""

    optimizer: torch.optim.Optimizer
    last_batch_iteration: int

    def begin(self, last_batch_iteration: int) -> None:
        """From a count; the groups' rates are set where it is the first."""
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._last_lr = applied(self.optimizer, self.get_lr())

    def get_lr(self) -> list[float]:
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count a batch, and set the groups' rates for the next."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._last_lr = applied(self.optimizer, self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Also sets the groups' rates, which DeepSpeed leaves to the next step."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        if self.last_batch_iteration >= 0:
            self._last_lr = applied(self.optimizer, self.get_lr())


def applied(optimizer: Any, rates: Sequence[float]) -> list[float]:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)  # somebody may have a reference to it
        else:
            group["lr"] = rate
    return [group["lr"] for group in optimizer.param_groups]


def optimizer_in(given: Any) -> torch.optim.Optimizer:
    optimizer = given if isinstance(given, torch.optim.Optimizer) else getattr(given, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(refusal("optimizer", "must be a torch.optim.Optimizer", type(given).__name__))
    return optimizer


def refusal(where: str, must: str, got: str) -> str:
    """Of an error as torch's and DeepSpeed's schedules raise it, by its class; told in our words."""
    return str(Problem(where, must, got=got))
