"""Execute a plan on flat segments, with hooks and collectives of our own.

This file puts the parts together. The plan's rows say what is gathered, cast, reduced and updated in which
dtype; `step/gather.py` and `step/reduce.py` decide when.

Invariant: between two calls no collective is running, even if the last call raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerodrift.comm import Collectives, raise_on_all_ranks
from zerodrift.dtypes import BLOCK
from zerodrift.engine import shards
from zerodrift.engine.accumulation import GradientBuffers
from zerodrift.engine.executor import Executor
from zerodrift.engine.habits import products
from zerodrift.engine.habits import storage_writes as writes
from zerodrift.engine.habits.determinism import generators
from zerodrift.engine.habits.parameter_guard import ParameterGuard, mark_as_ours
from zerodrift.engine.habits.pins import make_plain, pin
from zerodrift.engine.nested import in_transform
from zerodrift.engine.place import ValueSources, place
from zerodrift.engine.progress import TrainingProgress, refusal
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.step import compute
from zerodrift.engine.step.gather import LiveUnit, attach_parts, refuse_wrapper
from zerodrift.engine.step.norm import Norm, RankAgreement, bad_parameters, global_norm, parts_of, set_on_some
from zerodrift.engine.step.reduce import Gradients
from zerodrift.engine.step.update import choose_update_function, collect_statistics, update_segments
from zerodrift.engine.trained_segment import TrainedSegment, trained_of
from zerodrift.engine.traversal import Traversal, UnitOrder
from zerodrift.engine.values import SegmentValues, WholeValues
from zerodrift.experts import Turns, distribute_experts
from zerodrift.optim import GroupMembers, Updater, hold_parameters, learning_rates, make_updater
from zerodrift.plan import Plan, part, prefetch_budget
from zerodrift.policy import Mode
from zerodrift.report import UpdateReport


class NativeExecutor(Executor):
    """Runs this rank's part of a plan on segments."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        comm: Collectives,
        optimizer: torch.optim.Optimizer | None = None,
        sources: ValueSources | None = None,
    ) -> None:
        policy, mesh = plan.policy, comm.mesh
        self.plan = plan
        self.part = part(plan, mesh.rank("pipeline"))
        self.module = self.whole = model
        self.forwards: Sequence[nn.Module] = (model,)
        self.comm = comm
        self.segments: list[FlatSegment]
        self.units: list[LiveUnit]
        self._pools = GradientBuffers(keep=not policy.sharding.free_accumulator)
        originals = {id(parameter): name for name, parameter in model.named_parameters()}
        with torch.no_grad():
            self.segments, self.units, masters = place(self.part, model, comm, self._pools, sources)
        alone = policy.pipeline is not None or not any(segment.gathers for segment in self.segments)
        order = None if alone else UnitOrder(self.units, comm.all_gather_object)
        self._traversal = Traversal(self.units, order, prefetch_budget(self.part))
        for unit in self.units:
            unit.traversal = self._traversal
        self.gradients = Gradients(
            self.units, self._traversal, policy.averaging.before, requires_tree=policy.requires_tree
        )
        self.precision = compute.ForwardPrecision(plan, mesh.device)
        self.turns = Turns(mesh.device, generators(mesh.device))
        """Alternates a forward and a backward, each of which computes while the other's exchange travels."""
        self.guard = ParameterGuard(model, self.segments, asynchronous=mesh.asynchronous)
        self._handles: list[Any] = [
            *(() if policy.pipeline else self.precision.attach(model)),
            *self._attach(),
            refuse_wrapper(model),
            *distribute_experts(self.part, model, comm, self.turns),
            *self.guard.attach(),
        ]
        if policy.mode is not Mode.FP32:
            pin(self.segments)
        products.attach(self.segments)
        self._trained = trained_of(self.segments)
        self.sum_over_ends: Callable[[], None] = lambda: None
        for segment in self.segments:
            writes.record_versions(segment)
        update_slice = choose_update_function(plan, comm)
        self.updater: Updater | None = None
        self._members: GroupMembers | None = None
        if self._trained and (optimizer is not None or policy.optimizer is not None):
            owned = [segment.piece(masters.pop(segment.number)) for segment in self._trained]
            self.updater = make_updater(self.part, owned, optimizer, originals, update_slice=update_slice)
            if optimizer is None:
                hold_parameters(self.updater, model)
            self._members = GroupMembers(self.updater.groups)
        for segment in self._trained:
            if segment.shows_narrow_values:
                shown = masters.get(segment.number)  # there is one without an optimizer only
                handle = segment.sync_storage(self.updater) if shown is None else segment.show_master(shown)
                handle.wait()
                writes.record_versions(segment)
        mark_as_ours(self._handles)
        self._progress: TrainingProgress

    def _attach(self) -> list[Any]:
        handles = [handle for unit in self.units for handle in unit.attach()]
        handles += attach_parts(self.module, self.units)
        return handles + compute.attach(self.module, self.plan.boundaries)

    def follow(self, progress: TrainingProgress) -> None:
        self._progress = progress
        for wire in filter(None, (segment.wire for segment in self._trained)):
            wire.follow(lambda: progress.steps_tried)
        if self.runner is None:
            self._handles += progress.watch(self.module)
            mark_as_ours(self._handles)
        self.gradients.progress = progress

    # --- a micro-batch ----------------------------------------------------------------------------------

    def forward(self) -> contextlib.AbstractContextManager[None]:
        self.guard.check()
        if torch.is_grad_enabled() and not in_transform():
            # Refuse writes that a master cannot take over early, where that is cheap. The step checks all.
            first = self._progress.micro_batches == 0 and not self.comm.mesh.asynchronous
            for segment in self._trained:
                if segment.has_separate_master and (first or writes.rows_with_new_version(segment)):
                    writes.take_over_writes(segment, self.updater)
        for unit in self.units:
            unit.order_hooks()
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return self.gradients.micro_batch(loss)

    def recover(self) -> None:
        self.gradients.abort()
        for unit in self.units:
            unit.forget()

    # --- the step ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.guard.require_closed("step")
        self.guard.check(stepping=True)
        if self._members is not None:
            self._members.require_unchanged()
        cleared = self.gradients.hide()
        if cleared:
            raise refusal("gradient cleared", name=cleared)
        if self._progress.micro_batches == 0:
            # A backward that no hook has noticed must end on all ranks or on none.
            loose = self.comm.all_gather_object(self.gradients.first_uncollected)
            if any(loose) and not all(loose):
                raise set_on_some(next(filter(None, loose)))
            self.gradients.end_untracked_backward()
        yield
        if self._progress.micro_batches:
            self.gradients.show_again()

    def norm(self) -> Norm:
        """Reduce gradients and return their norm. Gradients that were set by hand are reduced after a first
        norm has shown that all ranks have them. Over replicas and in a pipeline this is not checked."""
        replicas = self.comm.mesh.size("replicate") > 1
        by_hand = [] if replicas or self.runner is not None else self.gradients.set_by_hand
        self.gradients.flush(without=by_hand)
        if replicas:
            self.gradients.sum_over_replicas()
        self.sum_over_ends()
        found = [(segment.number, segment.first_uncollected_gradient) for segment in by_hand]
        norm = self._norm_of_reduced(found)
        if found and self.plan.policy.requires_tree:
            raise refusal("gradient by hand", name=found[0][1])
        if by_hand:
            self.gradients.reduce(by_hand)
            norm = self._norm_of_reduced()
        if norm.written:
            with raise_on_all_ranks(self.comm):
                for segment in self.segments:
                    writes.take_over_writes(segment, self.updater)
        else:
            for segment in self.segments:
                segment.overwritten = None
        return norm

    def _norm_of_reduced(self, unreduced: Sequence[tuple[int, str]] = ()) -> Norm:
        written, checksum = self._visible_weights()
        counted = [segment for segment in self._trained if segment.spec.lead]
        gradients = [part for segment in counted for part in self._updated_gradients(segment)]
        order, self._traversal.checksum = self._traversal.checksum, 0
        still = tuple(row.name for segment in self._trained for row in segment.rows_without_update)
        rates = learning_rates(self.updater)
        agreement = RankAgreement(order, unreduced, self._progress.dropped, still, rates)
        return global_norm(gradients, self.comm, self._progress.unscale, agreement, written, checksum)

    def _updated_gradients(self, segment: TrainedSegment) -> Iterator[torch.Tensor]:
        """Yield this rank's reduced gradient of a segment, without parameters that no group of the optimizer
        holds, which neither count nor are clipped. Each part begins with a block of the norm, so that no
        slicing cuts a block."""
        flat, end = segment.reduced, 0
        if flat is None or self.updater is None:
            return
        for row in segment.rows:
            if row.name not in self.updater.group_of:
                span = row.within(segment.start_of(flat), flat.numel())
                yield flat[end : span.start]
                end = -(-span.stop // BLOCK) * BLOCK
        yield flat[end:]

    def _visible_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, on the device, (above 0 if user code wrote to visible weights, a checksum below 2^32 of the
        weights that are the same on all ranks)."""
        mesh = self.comm.mesh
        compared = (
            segment
            for segment in self.segments
            if segment.has_separate_master or segment.gathers or mesh.size("shard") > 1
        )
        written, checksum = writes.check_storage(compared, mesh.device)
        for placeholders in self.guard.placeholders if mesh.asynchronous else ():
            # `guard.check` does this on devices that are not asynchronous.
            written = written + (~writes.are_missing(placeholders)).any()
        return written, checksum

    def reduced(self) -> Iterator[tuple[Sequence[shards.Span], torch.Tensor]]:
        for segment in () if self.comm.mesh.rank("replicate") else self._trained:
            if segment.reduced is not None and segment.spec.lead:
                start = segment.start_of(segment.reduced)
                held = shards.spans_of(segment, start, start + segment.reduced.numel(), start)
                yield tuple(held), segment.reduced

    def bad(self) -> list[str]:
        return bad_parameters(parts_of(self._trained), self.comm)

    def update(self, multiplier: float) -> None:
        if self.updater is None:
            raise refusal("no optimizer")
        self.drop()
        update_segments(self._trained, self.updater, multiplier)

    def forget(self) -> None:
        self.gradients.drop()
        self._pools.end_step()

    # --- values -----------------------------------------------------------------------------------------

    @property
    def own_values(self) -> SegmentValues:
        """The whole values of this rank's part."""
        return SegmentValues(self.segments, self.updater, self.gradients, self.guard, self.comm)

    @property
    def values(self) -> WholeValues:
        return self.own_values

    def pieces(self) -> Iterator[shards.FlatShard]:
        return shards.pieces(self.segments, self.updater, self.comm.mesh)

    def drop(self) -> None:
        for unit in self.units:
            unit.drop()

    def sync_storage(self) -> None:
        self.guard.require_closed("load")
        self.drop()
        for segment in self.segments:
            segment.sync_storage(self.updater).wait()
            writes.mark_storage_changed(segment)
            writes.refresh_views(segment)

    def update_statistics(self) -> UpdateReport:
        steps_taken = self._progress.global_steps
        return collect_statistics(self.plan, self._trained, self.updater, self.comm, steps_taken)

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        for unit in self.units:
            unit.detach()
        self.guard.leave()
        make_plain(self.segments)
        self.gradients.progress = None


def native(executor: Executor) -> NativeExecutor:
    """Return the executor as a `NativeExecutor`, for callers that read segments."""
    assert isinstance(executor, NativeExecutor), f"{type(executor).__name__} has no segments"
    return executor
