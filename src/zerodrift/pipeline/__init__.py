"""Pipelines: a model cut over ranks under torch's schedules, and weight gradients that are formed later."""

from zerodrift.pipeline.cut import Parts
from zerodrift.pipeline.deferred import WeightQueue, defer_weight_grads
from zerodrift.pipeline.run import BatchResult, PipelineEngine

__all__ = ["BatchResult", "Parts", "PipelineEngine", "WeightQueue", "defer_weight_grads"]
