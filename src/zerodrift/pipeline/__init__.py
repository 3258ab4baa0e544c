"""Pipelines: a model cut over ranks under torch's schedules, and weight gradients that are formed later."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.engine.executor import BatchResult
    from zerodrift.pipeline.cut import Parts
    from zerodrift.pipeline.deferred import WeightQueue, defer_weight_grads
    from zerodrift.pipeline.make import pipeline_engine
    from zerodrift.pipeline.schedules import timeline

__getattr__, __dir__, __all__ = face(__name__)
