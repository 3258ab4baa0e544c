"""What a pipeline's engine was before there was one engine for all, for one release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zerodrift.engine.batches import BatchResult
from zerodrift.engine.deprecated import deprecated
from zerodrift.engine.engine import Engine
from zerodrift.engine.progress import StepResult


class PipelineEngine:
    """What `initialize_pipeline` returns: an `Engine` by the names of before. Everything else is the engine's
    own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def stage(self) -> Engine:
        deprecated("engine.stage", "engine")
        return self._engine

    def step(self, micro_batches: Iterable[Any], weights: Sequence[float] = ()) -> BatchResult:
        deprecated("engine.step(micro_batches)", "engine.train_batch(micro_batches)")
        return self._engine.train_batch(micro_batches, weights)

    def update(self) -> StepResult:
        deprecated("engine.update()", "engine.step()")
        return self._engine.step()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
