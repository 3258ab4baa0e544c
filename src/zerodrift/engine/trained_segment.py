"""A trained segment: the way of its gradients to a sum over ranks, and the slice that this rank updates.

`step/reduce.py` decides when gradients are collected and reduced. `optim` has masters and optimizer state.

[Note: landing] Gradients are collected in a flat landing buffer of the accumulate dtype, to which
`param.grad_dtype` makes autograd cast. The first gradient of a parameter is copied there when its unit's
backward is over. From then on `param.grad` is preset to a view of the buffer, so that autograd adds in place,
as does user code that writes `param.grad` late. The next collection adds a gradient that was put elsewhere:
nothing that reaches `param.grad` is lost.

[Note: tree] Under `reduce.order: tree` micro-batches are the leaves of a sum that is not formed in the order
of arrival. So each has a landing buffer of its own, or is reduced at once where every micro-batch is reduced.
A right leaf is added to its left neighbour in place. In a pipeline the gradients of a micro-batch may arrive
in several turns, so its buffer is kept from `open_part` to `take_part`, and begins with zeros. Unless the
plan requires the tree, a step leaves it when a gradient comes late, is set by hand, or is read before the
last micro-batch. All gradients so far are summed then, and later ones are added as they come.

[Note: zeros] -0.0 + 0.0 is 0.0, and a missing gradient counts as 0.0. So that bits depend neither on buffers
that begin with zeros nor on missing gradients, no sum by the tree has a negative zero. On a CPU the pass that
copies gradients turns negative zeros into positive ones. On a device that would take another launch per
micro-batch, so one launch goes over this rank's slice of the finished sum, which has a negative zero only
where all parts do. A single part is no sum, and keeps its zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zerodrift.comm import Collectives, Handle, Sum
from zerodrift.engine.accumulation import (
    GradientBuffers,
    LandingLayout,
    TreeSum,
    copy_without_negative_zeros,
    dense,
)
from zerodrift.engine.habits.absent_parameter import CollectedGradient
from zerodrift.engine.habits.gradient_exposure import GradientExposure
from zerodrift.engine.narrow_wire import NarrowWire, start_narrow_sum, sum_narrow_replicas
from zerodrift.engine.segment import FlatSegment
from zerodrift.optim import Owned, Updater, keys_of_blocks, round_away
from zerodrift.plan import Row, Segment
from zerodrift.policy import Master, Update

_TRAINABLE, _GRAD = operator.attrgetter("requires_grad"), operator.attrgetter("grad")
_NO_GRADIENT = {type(None), CollectedGradient}
"""Types of `param.grad` that mean no new gradient has arrived."""


class TrainedSegment(FlatSegment):
    """A segment with gradients, of which this rank updates a slice or all."""

    def __init__(
        self,
        number: int,
        spec: Segment,
        rows: list[Row],
        parameters: list[nn.Parameter],
        comm: Collectives,
        pools: GradientBuffers,
        unit: str = "",
    ) -> None:
        super().__init__(number, spec, rows, parameters, comm, unit)
        update = spec.columns.update
        assert update is not None
        self.update: Update = update
        reduce = update.reduce
        keys = None
        if reduce.rounding == "stochastic":
            keys = keys_of_blocks(rows, 0, spec.padded, self._expert_rank).to(comm.mesh.device)
        is_narrow = reduce.wire.format is not None
        self.wire = NarrowWire(reduce, comm.mesh.rank("data"), keys) if is_narrow else None
        self.has_separate_master = not self.gathers and update.master is not Master.SAME
        self._sums_whole = not update.accumulate.axis
        self._layout = LandingLayout(rows, spec.padded)
        self._landing_pool = pools.sums if self._sums_whole else pools.spare
        self._sum_pool = pools.spare if self._sums_whole else pools.sums
        self.landing: torch.Tensor | None = None
        """Landing buffer until gradients are reduced. Shape [padded], accumulate dtype."""
        self.reduced: torch.Tensor | None = None
        """This rank's slice of the sum over ranks and micro-batches. Shape [padded / ranks]."""
        self._whole: torch.Tensor | None = None
        """Stage 0 only: the buffer of which `reduced` is a slice, to be gathered in place."""
        self._is_travelling = False
        self._grads: list[torch.Tensor] = []
        self._opened: set[int] = set()
        """Parameters, by number, whose `grad` was preset to their view."""
        self.tree = update.reduce.order == "tree"
        """Whether this step's micro-batches are summed by the tree; False from `leave_tree` on."""
        self._sum = TreeSum(self._give)
        """Sum of a step's micro-batches so far; see [Note: tree]. Empty without the tree."""
        self._parts: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """Pipelines only: (landing buffer, its views) by micro-batch, until `take_part`."""
        self.arrived: set[int] = set()
        """Parameters, by number, that got a gradient in this step."""
        self.exposure = GradientExposure(parameters, rows, self.arrived)
        self.ends: list[Any] = []
        """Autograd nodes at which the gradients of the parameters arrive, in any graph."""

    def _expect_gradients(self) -> None:
        for parameter in self.parameters:
            # Stays with the parameter: autograd casts gradients to this dtype before it adds them.
            parameter.grad_dtype = self.update.accumulate.dtype.torch
        self.ends = [torch.autograd.graph.get_gradient_edge(p).node for p in self.parameters]

    def detach(self) -> None:
        super().detach()
        self.ends = []  # a node would refuse gradients if the parameter is resized afterwards

    def at_rest(self, values: torch.Tensor) -> torch.Tensor:
        """Round values as the master scheme rounds."""
        return round_away(values) if self.update.master is Master.SPLIT else super().at_rest(values)

    def open_gradients(self) -> None:
        """Preset every `param.grad` to its view of the landing buffer, if there is one."""
        for number, (parameter, grad) in enumerate(zip(self.parameters, self._homes, strict=False)):
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = grad
                self._opened.add(number)

    def preset_addresses(self) -> dict[int, int]:
        """Return the address that each preset `param.grad` must have, by the parameter's number."""
        return {number: self._homes[number].data_ptr() for number in self._opened}

    @property
    def first_uncollected_gradient(self) -> str:
        """The first parameter with a gradient that was not collected, or ""."""
        with torch._C.DisableTorchFunctionSubclass():
            if {*map(type, map(_GRAD, self.parameters))} <= _NO_GRADIENT:
                return ""
        pairs = zip(self.rows, self._new_gradients(), strict=True)
        return next((row.name for row, grad in pairs if grad is not None), "")

    def _new_gradients(self) -> list[torch.Tensor | None]:
        """Return each `param.grad`, or None where it only shows that the engine has collected it."""
        with torch._C.DisableTorchFunctionSubclass():
            return [None if type(grad) is CollectedGradient else grad for grad in map(_GRAD, self.parameters)]

    @property
    def has_unreduced_gradients(self) -> bool:
        """Whether gradients were collected and not reduced."""
        if self.tree:
            return bool(self._sum) and self._sums_whole and self.ranks > 1
        return self.landing is not None and self.landing is not self.reduced

    @property
    def rows_without_update(self) -> list[Row]:
        """The rows that this step does not update, as in plain torch: user code has frozen them or removed
        their gradient."""
        removed = self.exposure.removed
        with torch._C.DisableTorchFunctionSubclass():
            if not removed and all(map(_TRAINABLE, self.parameters)):
                return []
            wanted = [n in removed or not p.requires_grad for n, p in enumerate(self.parameters)]
        return [self.rows[n] for n, alone in enumerate(wanted) if alone and n not in self.arrived]

    def collect_gradients(self) -> None:
        """Move gradients from `param.grad` into the landing buffer. A parameter without a gradient counts as
        zero, so that every rank reduces the same segments whatever its data did."""
        arrived = self._new_gradients()
        self.arrived.update([number for number, grad in enumerate(arrived) if grad is not None])
        neighbour = self._sum.neighbour if self._sums_whole or self.ranks == 1 else None
        with torch.no_grad():
            if self.landing is None and neighbour is not None:
                self._land_on(neighbour, arrived)
            elif self.landing is None:
                self._land_first(arrived)
            else:
                for number, (grad, home) in enumerate(zip(arrived, self._homes, strict=True)):
                    if grad is None or grad is home or grad.data_ptr() == home.data_ptr():
                        continue
                    if number in self._opened:  # `create_graph` puts old + new in its place
                        copy = copy_without_negative_zeros if self.tree else torch._foreach_copy_
                        copy([home], [dense(grad)])
                    else:
                        home.add_(dense(grad))
        super().drop_gradients()
        self._opened.clear()
        if self.exposure.is_shown:
            self.exposure.show()

    def expose_gradients(self, complete: bool, scale: Callable[[bool], float]) -> None:
        """Let user code read and change gradients, if every rank has all of them. They are the sum of all
        ranks if `complete`, else of this rank. `scale(complete)` is their factor."""
        if self.update.axis or self.comm.mesh.size("replicate") > 1:
            return
        if complete:
            self.end_sum()
        elif self.landing is None and not (self._sum and (self._sums_whole or self.ranks == 1)):
            return
        if complete and self.reduced is None:
            return
        whole = self.whole_gradient() if complete else None

        def values() -> torch.Tensor:
            if whole is not None:
                return whole
            self.leave_tree()
            assert self.landing is not None
            return self.landing

        def end(changed: bool) -> None:
            if whole is None:
                return
            if changed and self.reduced is not None:
                mine = self.slice_of(whole)
                if mine.data_ptr() != self.reduced.data_ptr():
                    self.reduced.copy_(mine)
            self.give_back(whole)

        self.exposure.expose_gradients(values, scale(complete), end)

    @property
    def _homes(self) -> list[torch.Tensor]:
        """The view of the landing buffer for each parameter; none while it is missing or travels."""
        if self.landing is None or self._is_travelling:
            return []
        if not self._grads:
            self._grads = [self.view(self.landing, row) for row in self.rows]
        return self._grads

    def _land_first(self, arrived: list[torch.Tensor | None]) -> None:
        dtype = self.update.accumulate.dtype.torch
        self.landing, self._grads = self._landing_pool.take(self.spec.padded, dtype, self.full.device), []
        self._layout.fill(self.landing, arrived, negative_zeros=not self.tree)

    def _land_on(self, left: torch.Tensor, arrived: list[torch.Tensor | None]) -> None:
        """Add the gradients to their left neighbour in the tree, without a landing buffer."""
        pairs = [(self.view(left, row), grad) for row, grad in zip(self.rows, arrived, strict=True)]
        here = [(home, dense(grad).to(home.dtype)) for home, grad in pairs if grad is not None]
        if here:
            torch._foreach_add_([home for home, _ in here], [grad for _, grad in here])
        self._sum.added()

    # --- the tree over micro-batches --------------------------------------------------------------------

    def add_to_sum(self) -> None:
        """Add the landing buffer to the tree."""
        if self.landing is not None:
            self._sum.add(self.landing)
            self.landing, self._grads = None, []

    def open_part(self, number: int) -> None:
        """Add gradients in place to part `number` of the tree, until `close_part`."""
        part = self._parts.pop(number, None)
        if part is None:
            self._land_first([None] * len(self.parameters))
        else:
            self.landing, self._grads = part
        self.open_gradients()

    def close_part(self, number: int) -> None:
        """Put the part aside until `open_part` or `take_part`."""
        self.collect_gradients()
        assert self.landing is not None
        self._parts[number] = self.landing, self._grads
        self.landing, self._grads = None, []

    def take_part(self) -> None:
        """Make the next part of the tree, which must be complete, the landing buffer."""
        self.landing, self._grads = self._parts.pop(self._sum.count)

    def leave_tree(self) -> None:
        """Sum the micro-batches so far, and add the rest of the step's gradients as they come."""
        if self.tree and (self._sum or self.ranks == 1):
            total = self._sum.take() if self._sum else self.reduced
            if self._sums_whole or self.ranks == 1:
                self.landing, self._grads = total, []
            else:
                self.reduced = total
        self.tree = False

    def end_sum(self) -> None:
        """Make `reduced` the sum of all micro-batches of the step."""
        is_single = self._sum.count < 2 and self.ranks == self.comm.mesh.size("replicate") == 1
        if self._sum:
            self.reduced = self._sum.take()
        if self.tree and self.reduced is not None and not (is_single or self.reduced.is_cpu):
            with torch.no_grad():
                self.reduced.add_(0.0)  # see [Note: zeros]

    def _give(self, flat: torch.Tensor) -> None:
        """Return a buffer of the tree to its pool, unless it is a part of `_whole`."""
        if self._whole is None or flat.data_ptr() != self.slice_of(self._whole).data_ptr():
            (self._landing_pool if flat.numel() == self.spec.padded else self._sum_pool).give(flat)

    # --- over ranks -------------------------------------------------------------------------------------

    def start_reduce(self, before: float) -> Handle:
        """Begin to add this rank's slice of the ranks' sum to `reduced`."""
        if self.has_unreduced_gradients and self.tree:
            if self.landing is not None:
                self._sum.add(self.landing)
            self.landing = self._sum.take()
        assert self.landing is not None
        if self.ranks == 1:
            return Handle()
        self._is_travelling = True
        flat, reduce = self.landing, self.update.reduce
        if self.wire is not None:
            flat = self.wire.encode(flat, before, self.ranks)
        elif before != 1.0 or reduce.wire.torch is not flat.dtype:
            with torch.no_grad():
                flat = (flat if before == 1.0 else flat.div_(before)).to(reduce.wire.torch)
        reduced = self._place_of_sum(flat, self.landing) if self.reduced is None else self.reduced
        how = Sum(reduce.sum.torch, add=self.reduced is not None, order=reduce.order)
        self.reduced = reduced
        if self.wire is not None:
            return start_narrow_sum(self.comm, reduced, flat, reduce.wire, self.axis, how, self.label)
        return self.comm.start_reduce_scatter(reduced, flat, self.axis, how, self.label)

    def _place_of_sum(self, flat: torch.Tensor, landing: torch.Tensor) -> torch.Tensor:
        """Return a buffer for the reduced slice; at stage 0 a part of the buffer that is gathered later."""
        if not self.update.axis and flat is landing and self._whole is None:
            self._whole = landing
            return self.slice_of(landing)
        return self._sum_pool.take(self.spec.padded // self.ranks, landing.dtype, flat.device)

    def finish_reduce(self) -> None:
        """Return the landing buffer to its pool after the reduction, unless `reduced` is a part of it."""
        if self.ranks == 1:
            self.reduced = self.landing
            return
        if self.landing is not None and self.landing is not self._whole:
            self._landing_pool.give(self.landing)
        self.landing, self._grads, self._is_travelling = None, [], False
        if self.tree and not self._sums_whole and self.reduced is not None:
            self._sum.add(self.reduced)
            self.reduced = None

    def add_replicas(self, flat: torch.Tensor, before: float) -> None:
        """Add the slices of the other replicas in place, once per step."""
        reduce = self.update.reduce
        how = Sum(reduce.sum.torch, order=reduce.order)
        with torch.no_grad():
            if before != 1.0 and self.ranks == 1:
                flat.div_(before)
            if self.wire is not None:
                packed = self.wire.encode_slice(flat, self.rank, self.ranks)
                sum_narrow_replicas(self.comm, flat, packed, reduce.wire, how, self.label)
                return
            wire = flat if flat.dtype is reduce.wire.torch else flat.to(reduce.wire.torch)
        self.comm.all_reduce(flat, wire, "replicate", how, self.label)

    def whole_gradient(self) -> torch.Tensor:
        """Gather the reduced gradient on every rank. Shape [padded], accumulate dtype."""
        whole, handle = self.start_whole_gradient()
        handle.wait()
        return whole

    def start_whole_gradient(self) -> tuple[torch.Tensor, Handle]:
        assert self.reduced is not None
        if self.ranks == 1:
            return self.reduced, Handle()
        whole = self._whole
        if whole is None:
            whole = self._landing_pool.take(self.spec.padded, self.reduced.dtype, self.reduced.device)
        return whole, self.comm.start_all_gather(whole, self.reduced, self.axis, self.label)

    def give_back(self, whole: torch.Tensor) -> None:
        """Return the buffer of `whole_gradient`."""
        if whole is not self.reduced and whole is not self._whole:
            self._landing_pool.give(whole)

    def drop_gradients(self) -> None:
        """Forget all gradients, collected or reduced."""
        self.exposure.drop()
        self.arrived.clear()
        super().drop_gradients()
        for waiting in self._sum.drop():
            self._give(waiting)
        for landing, _ in self._parts.values():
            self._landing_pool.give(landing)
        self._parts.clear()
        if self.tree and self.reduced is not None:
            self._give(self.reduced)
        elif self.reduced is not None and self._whole is None and self.reduced is not self.landing:
            self._sum_pool.give(self.reduced)
        for flat in (self.landing, self._whole):
            if flat is not None:
                self._landing_pool.give(flat)
        self.landing = self.reduced = self._whole = None
        self.tree = self.update.reduce.order == "tree"
        self._grads, self._is_travelling = [], False
        self._opened.clear()

    @property
    def owned(self) -> torch.Tensor:
        """The part of storage that this rank's optimizer writes."""
        if self.update.axis and not self.sharded and self.ranks > 1:
            return self.slice_of(self.storage)
        return self.storage

    def owned_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of a [padded] buffer that corresponds to `owned`."""
        return flat if self.owned.numel() == flat.numel() else self.slice_of(flat)

    def piece(self, initial: torch.Tensor) -> Owned:
        """Return `owned` for the optimizer; `initial` is its first master."""
        rows, start, expert = tuple(self.rows), self.start_of(self.owned), self._expert_rank
        return Owned(self.number, self.spec, self.update, rows, self.owned, initial, start, expert)

    def sync_storage(self, updater: Updater | None) -> Handle:
        if self.shows_narrow_values:
            return self.show_master(self.owned if updater is None else updater.master(self.number))
        if self.ranks == 1 or self.sharded or not self.update.axis:
            return Handle()
        return self.comm.start_all_gather(self.storage, self.owned, self.axis, self.label)

    @property
    def shows_narrow_values(self) -> bool:
        """Whether storage rests whole and holds the masters rounded to the narrow format."""
        return self.narrow is not None and not self.spec.columns.storage.axis


def trained_of(segments: Iterable[FlatSegment]) -> list[TrainedSegment]:
    return [segment for segment in segments if isinstance(segment, TrainedSegment)]
