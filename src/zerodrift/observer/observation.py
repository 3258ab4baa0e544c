"""The library's door to what `check` does, for a loop or a notebook of one's own.

with zerodrift.observe(model, optimizer) as seen:
    ...                     # a step or more of training, as always
print(seen.table())
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from zerodrift.errors import ModelError, ZerodriftError
from zerodrift.observer.finding import RunFinding
from zerodrift.observer.findings import run_findings
from zerodrift.observer.libraries import adapters
from zerodrift.observer.seen import SeenModel, SeenProcess
from zerodrift.observer.watch import Watcher

_FOREVER = 1 << 62


class Observation:
    """What this process saw; complete when the context has ended."""

    def __init__(self) -> None:
        self._process: SeenProcess | None = None

    @property
    def process(self) -> SeenProcess:
        """All of it."""
        if self._process is None:
            raise ZerodriftError("observe", "must have ended", do="Read what was seen after the `with`.")
        return self._process

    @property
    def models(self) -> list[SeenModel]:
        """Every model that was seen, with its parameters."""
        return self.process.models

    def findings(self) -> list[RunFinding]:
        """What costs precision, as this process saw it."""
        return run_findings([self.process])

    def table(self) -> str:
        """The text of `check`."""
        from zerodrift.observer.text import run_text

        return run_text([self.process], self.findings(), (), color=False)

    def _ended(self, process: SeenProcess) -> None:
        self._process = process


@contextlib.contextmanager
def observe(model: Any = None, optimizer: Any = None) -> Iterator[Observation]:
    """Watch what trains in this process until the context ends; values are what they would be without.

    `model` is the module, wrapped or not; without one, every model that trains is watched. What `optimizer`
    updates is seen in its steps: one whose steps could not be seen is refused.
    """
    if optimizer is not None:
        _require_torch(optimizer)
    observation = Observation()
    watcher = Watcher(_FOREVER, observation._ended, adapters())
    watcher.only = model
    watcher.begin()
    try:
        yield observation
    finally:
        watcher.finish("steps")
    if not watcher.process.models:
        raise ModelError(
            "observe",
            "must see the model's forward, with gradients on",
            got="none",
            do="Train at least one step of it inside the `with`.",
        )


def _require_torch(optimizer: Any) -> None:
    import torch

    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ZerodriftError(
            "optimizer",
            "must be a `torch.optim.Optimizer`, or wrap one as `optimizer.optimizer`",
            got=type(optimizer).__name__,
            do="Steps of others cannot be seen.",
        )
