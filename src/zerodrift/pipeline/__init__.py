"""Pipelines: so far weight gradients that are formed later, which is what zero-bubble schedules need."""

from zerodrift.pipeline.deferred import WeightQueue, defer_weight_grads

__all__ = ["WeightQueue", "defer_weight_grads"]
