"""Pipelines: a model cut over ranks under torch's schedules, and weight gradients that are formed later."""

from zerodrift.engine.executor import BatchResult
from zerodrift.pipeline.cut import Parts
from zerodrift.pipeline.deferred import WeightQueue, defer_weight_grads

__all__ = ["BatchResult", "Parts", "WeightQueue", "defer_weight_grads"]
