"""The library's door to `check`, around a loop or in a notebook.

with zerodrift.observe(model, optimizer) as seen:
    ...                     # a step or more of training, as always
print(seen.table())
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from zerodrift.errors import ModelError, ZerodriftError
from zerodrift.inspect.check.findings import run_findings
from zerodrift.inspect.check.table import RunFinding
from zerodrift.inspect.trace import ModelRecord, ProcessRecord, Watcher

_FOREVER = 1 << 62


class Observation:
    """The record of this process; complete when the context has ended."""

    def __init__(self) -> None:
        self._process: ProcessRecord | None = None

    @property
    def process(self) -> ProcessRecord:
        """All of it."""
        if self._process is None:
            raise ZerodriftError("observe", "must have ended", do="Read what was seen after the `with`.")
        return self._process

    @property
    def models(self) -> list[ModelRecord]:
        """Every model that was seen, with its parameters."""
        return self.process.models

    def findings(self) -> list[RunFinding]:
        """Return what costs precision, as this process saw it."""
        return run_findings([self.process])

    def table(self) -> str:
        """Return the text that `check` prints."""
        from zerodrift.inspect.check.report import run_text

        return run_text([self.process], self.findings(), (), color=False)


@contextlib.contextmanager
def observe(model: Any = None, optimizer: Any = None) -> Iterator[Observation]:
    """Watch what trains in this process until the context ends; values are what they would be without.

    `model` is the module, wrapped or not; without one, every model that trains is watched. What `optimizer`
    updates is seen in its steps: one whose steps could not be seen is refused.
    """
    held = getattr(optimizer, "optimizer", optimizer)
    if optimizer is not None and not isinstance(held, torch.optim.Optimizer):
        must = "must be a `torch.optim.Optimizer`, or wrap one as `optimizer.optimizer`"
        do = "Steps of others cannot be seen."
        raise ZerodriftError("optimizer", must, got=type(optimizer).__name__, do=do)
    observation = Observation()
    watcher = Watcher(_FOREVER, lambda process: None, only=model)
    watcher.begin()
    try:
        yield observation
    finally:
        watcher.finish("steps")
        observation._process = watcher.state.process
    if not observation.models:
        must = "must see the model's forward, with gradients on"
        raise ModelError("observe", must, got="none", do="Train at least one step of it inside the `with`.")
