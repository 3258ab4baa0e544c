"""The plan executed on flat segments: what is gathered, reduced and updated by our own hooks and collectives.

It owns the parts and decides nothing: what is gathered, cast, reduced and updated in which dtype is in the
plan's rows, when each happens is in `unit.py` and `grads.py`.

Invariant: between two calls nothing is under way, whatever was raised in the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives, Handle
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine import compute, shards, statistics, steps
from zerodrift.engine.attached import AttachedParameters, own, settle
from zerodrift.engine.buffers import GradientBuffers
from zerodrift.engine.executor import BatchRunner, Executor
from zerodrift.engine.grads import BackwardCallbacks, Gradients
from zerodrift.engine.parameter import WholeValues
from zerodrift.engine.pins import pin, unpin
from zerodrift.engine.place import ValueSources, place
from zerodrift.engine.progress import TrainingProgress
from zerodrift.engine.scale import (
    BetweenRanks,
    Norm,
    UnreducedSegment,
    VisibleWeights,
    bad_parameters,
    global_norm,
    parts_of,
    set_on_some,
)
from zerodrift.engine.seeds import generators
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.trained import trained
from zerodrift.engine.traversal import Traversal
from zerodrift.engine.unit import LiveUnit, attach_parts, in_transform, refuse_wrapper
from zerodrift.engine.update_function import choose_update_function
from zerodrift.engine.values import SegmentValues
from zerodrift.experts.dispatch import distribute_experts
from zerodrift.experts.turns import Turns
from zerodrift.optim.factory import make_updater
from zerodrift.optim.updater import Updater
from zerodrift.plan.prefetch import room
from zerodrift.plan.stages import part
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Mode
from zerodrift.report.updates import UpdateReport


class NativeExecutor:
    """Runs this rank's part of a plan on segments."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        comm: Collectives,
        optimizer: torch.optim.Optimizer | None = None,
        sources: ValueSources | None = None,
    ) -> None:
        if plan.policy.backend != "native":
            raise AssertionError(f"a plan for backend {plan.policy.backend}")
        policy, mesh = plan.policy, comm.mesh
        self.plan = plan
        self.part = part(plan, mesh.rank("pipeline"))
        self.module = model
        self.whole = model
        self.forwards: Sequence[nn.Module] = (model,)
        self.comm = comm
        self.segments: list[FlatSegment]
        self.units: list[LiveUnit]
        self._pools = GradientBuffers(keep=not policy.sharding.free_accumulator)
        originals = {id(parameter): name for name, parameter in model.named_parameters()}
        with torch.no_grad():
            self.segments, self.units, masters = place(self.part, model, comm, self._pools, sources)
        alone = policy.pipeline is not None or not any(segment.gathers for segment in self.segments)
        self._traversal = Traversal(self.units, None if alone else comm.all_gather_object, room(self.part))
        for unit in self.units:
            unit.traversal = self._traversal
        self.gradients = Gradients(self.units, self._traversal, policy.averaging.before)
        self.precision = compute.ForwardPrecision(plan, mesh.device)
        self._handles: list[Any] = self._attach()
        self._handles.append(refuse_wrapper(model))
        self.turns = Turns(mesh.device, generators(mesh.device))
        """In which a forward and a backward go on beside each other's exchanges."""
        self._handles += distribute_experts(self.part, model, comm, self.turns)
        self.attached = AttachedParameters(model, self.segments, asynchronous=mesh.asynchronous)
        self._handles += self.attached.attach()
        if policy.mode is not Mode.FP32:
            pin(self.segments)
        self._trained = trained(self.segments)
        for segment in self.segments:
            segment.know()
        update_slice = choose_update_function(plan, comm)
        self.updater: Updater | None = None
        if self._trained and (optimizer is not None or policy.optimizer is not None):
            owned = [segment.piece(masters.pop(segment.number)) for segment in self._trained]
            self.updater = make_updater(self.part, owned, optimizer, originals, update_slice=update_slice)
        own(self._handles)
        self._progress: TrainingProgress
        """Set by `follow`."""

    def _attach(self) -> list[Any]:
        """Hooks that gather, cast and reduce around the model's forward; returns their handles."""
        handles = [handle for unit in self.units for handle in unit.attach(self.gradients)]
        handles += attach_parts(self.module, self.units)
        return handles + compute.attach(self.module, self.plan.boundaries)

    @property
    def runner(self) -> BatchRunner | None:
        return None

    def follow(self, progress: TrainingProgress, callbacks: BackwardCallbacks) -> None:
        self._progress = progress
        if self.runner is None:
            self._handles += progress.watch(self.module)
            own(self._handles)
        self.gradients.callbacks = callbacks

    def require_peers(self) -> None:
        """Peers that are gone end a collective by themselves."""

    # --- a micro-batch ----------------------------------------------------------------------------------

    def forward(self) -> contextlib.AbstractContextManager[None]:
        self.attached.check()
        self._require_masters()
        for unit in self.units:
            unit.take_places()
        return contextlib.nullcontext()

    def _require_masters(self) -> None:
        """Before a forward that is trained: masters that cannot follow what was written, while that is cheap
        to know; the step asks again."""
        if not torch.is_grad_enabled() or in_transform():
            return
        first = self._progress.micro_batches == 0 and not self.comm.mesh.asynchronous
        for segment in self._trained:
            if segment.apart and (first or segment.moved):
                settle(segment, self.updater)

    def backward(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return self.gradients.micro_batch(loss)

    def recover(self) -> None:
        self.gradients.abort()
        for unit in self.units:
            unit.forget()

    # --- the step ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.attached.require_closed("step")
        self.attached.check(stepping=True)
        taken = self.gradients.hide()
        if taken:
            raise steps.taken_away(taken)
        if self._progress.micro_batches == 0:
            self._end_unseen()
        yield
        if self._progress.micro_batches:
            self.gradients.show_again()

    def _end_unseen(self) -> None:
        """A backward that nobody was told of ends here, on all ranks or on none."""
        loose = self.comm.all_gather_object(self.gradients.loose)
        if any(loose) and not all(loose):
            raise set_on_some(next(filter(None, loose)))
        self.gradients.end_unseen()

    def norm(self) -> Norm:
        """Gradients that were set by hand are reduced when the ranks know that all have them, which travels
        with a norm of what else there is. Over replicas and in a pipeline it does not, and is taken for
        granted."""
        replicas = self.comm.mesh.size("replicate") > 1
        strays = [] if replicas or self.runner is not None else self.gradients.unreduced
        self.gradients.flush(without=strays)
        if replicas:
            self.gradients.sum_over_replicas()
        self._sum_over_ends()
        norm = self._norm_of_reduced([UnreducedSegment(segment.number, segment.loose) for segment in strays])
        if strays and self.plan.policy.tree:
            raise steps.beside(strays[0].loose)
        if strays:
            self.gradients.reduce(strays)
            norm = self._norm_of_reduced()
        if norm.written:
            self._settle()
        else:
            for segment in self.segments:
                segment.nobody_wrote()
        return norm

    def _sum_over_ends(self) -> None:
        """Of a pipeline: what is tied across it."""

    def _settle(self) -> None:
        """What was written outside of the engine becomes the masters', or is an error on every rank."""
        with raise_on_all_ranks(self.comm):
            for segment in self.segments:
                settle(segment, self.updater)

    def _shown(self) -> VisibleWeights:
        mesh = self.comm.mesh
        absent = self.attached.look()
        written = torch.zeros((), dtype=torch.int64, device=mesh.device) if absent is None else absent
        checksum = torch.zeros_like(written)
        for segment in self.segments:
            if segment.apart or segment.gathers or mesh.size("shard") > 1:
                look = segment.look()
                if look is not None:
                    written += look[0]
                    checksum = (checksum * 31 + look[1]) & 0xFFFFFFFF
        return VisibleWeights(written, checksum)

    def _norm_of_reduced(self, strays: Sequence[UnreducedSegment] = ()) -> Norm:
        shown = self._shown()
        counted = [segment for segment in self._trained if segment.spec.lead]
        gradients = [segment.reduced for segment in counted if segment.reduced is not None]
        order, self._traversal.checksum = self._traversal.checksum, 0
        progress = self._progress
        alone = [row.name for segment in self._trained for row in segment.left_alone]
        apart = BetweenRanks(order, strays, progress.dropped, tuple(alone))
        return global_norm(gradients, self.comm, progress.unscale, apart, shown)

    def reduced(self) -> Iterator[tuple[Sequence[shards.Span], torch.Tensor]]:
        return shards.reduced_parts(self._trained, self.comm.mesh)

    def bad(self) -> list[str]:
        return bad_parameters(parts_of(self._trained), self.comm)

    def update(self, multiplier: float) -> None:
        if self.updater is None:
            raise steps.needs_optimizer()
        self.drop()
        self.updater.leave_alone([row.name for segment in self._trained for row in segment.left_alone])
        gradients: dict[int, torch.Tensor] = {}
        _one_ahead(self._gather_gradients(gradients))
        self.updater.update(gradients, multiplier)
        for segment in self._trained:
            if segment.number in gradients:
                segment.give_back(gradients[segment.number])
        _one_ahead(segment.sync_storage() for segment in self._trained if segment.number in gradients)
        for segment in self._trained:
            segment.changed()
            segment.renew()

    def _gather_gradients(self, gradients: dict[int, torch.Tensor]) -> Iterator[Handle]:
        """Fill it with what each segment is updated by; each is there when its handle was waited for."""
        for segment in self._trained:
            if segment.reduced is None:
                continue
            if segment.update.axis:
                gradients[segment.number] = segment.reduced
            else:
                gradients[segment.number], handle = segment.start_whole_gradient()
                yield handle

    def forget(self) -> None:
        self.gradients.drop()
        self._pools.end_step()

    # --- values -----------------------------------------------------------------------------------------

    @property
    def own_values(self) -> SegmentValues:
        """Of this rank's part."""
        return SegmentValues(self.segments, self.updater, self.gradients, self.attached, self.comm)

    @property
    def values(self) -> WholeValues:
        return self.own_values

    def pieces(self) -> Iterator[shards.FlatShard]:
        return shards.pieces(self.segments, self.updater, self.comm.mesh)

    def drop(self) -> None:
        for unit in self.units:
            unit.drop()

    def sync_storage(self) -> None:
        self.attached.require_closed("load")
        self.drop()
        for segment in self.segments:
            segment.sync_storage().wait()
            segment.changed()
            segment.renew()

    def update_statistics(self) -> UpdateReport:
        steps_taken = self._progress.global_steps
        return statistics.collect(self.plan, self._trained, self.updater, self.comm, steps_taken)

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        for unit in self.units:
            unit.detach()
        self.attached.leave()
        unpin(self.segments)
        self.gradients.callbacks = None


def _one_ahead(handles: Iterable[Handle]) -> None:
    """Wait for each when the one after it has been started."""
    last = Handle()
    for handle in handles:
        last.wait()
        last = handle
    last.wait()


def native(executor: Executor) -> NativeExecutor:
    """For whoever looks at segments, and is not asked to where there are none."""
    if not isinstance(executor, NativeExecutor):
        raise AssertionError(f"{type(executor).__name__} has no segments")
    return executor
