"""The plan, executed: segments, units, compute, gradients, scale, and the step as a recipe."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.engine import nested, place
    from zerodrift.engine.digest import Digest, MOMENTS, computed_by, tensor_digest
    from zerodrift.engine.engine import Engine
    from zerodrift.engine.executor import (
        BatchResult, Executor, batch_on, item_in, numbers_of, one_number, wrong_number,
    )  # fmt: skip
    from zerodrift.engine.habits import pins, products, saved_views
    from zerodrift.engine.habits.absent_parameter import (
        AbsentParameter, STAYS, absent_class, mark_absent, mark_gathered,
    )  # fmt: skip
    from zerodrift.engine.habits.determinism import generators, generators_kept
    from zerodrift.engine.habits.parameter_guard import LOAD
    from zerodrift.engine.habits.storage_writes import READ, WRITE, mark_storage_changed
    from zerodrift.engine.native_executor import NativeExecutor, native
    from zerodrift.engine.nested import BEFORE_ALL, ForwardInputs, at_the_end, in_backward, tensors_in
    from zerodrift.engine.place import ELSEWHERE, ValueSource, ValueSources, tie
    from zerodrift.engine.progress import StepResult, TrainingProgress, refusal
    from zerodrift.engine.shards import FlatShard, SegmentShard, Span
    from zerodrift.engine.step import compute
    from zerodrift.engine.step.compute import ForwardPrecision
    from zerodrift.engine.step.reduce import Gradients
    from zerodrift.engine.step.norm import Norm, RankAgreement, bad_parameters, global_norm
    from zerodrift.engine.habits.products import has_narrow_products
    from zerodrift.engine.segment import FlatSegment
    from zerodrift.engine.trained_segment import TrainedSegment, trained_of
    from zerodrift.engine.step.gather import LiveUnit, refuse_wrapper
    from zerodrift.engine.values import ParameterHandle, SegmentValues, WholeValues

__getattr__, __dir__, __all__ = face(__name__)
