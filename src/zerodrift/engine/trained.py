"""A segment that is trained: its gradients on their way to a sum, and what of storage this rank updates.

`grads.py` tells it when to collect and reduce. The optimizer's side (master, state) is in `optim`.

[Note: landing] Gradients are collected into a flat buffer of the accumulate dtype, to which
`param.grad_dtype` makes autograd cast. The first of a parameter is copied there when its unit's backward
is over, which costs less than a buffer of zeros to add to; from then on `param.grad` is preset to a view
of the buffer, so autograd adds in place, and so does whoever writes `param.grad` late. A gradient that was
put elsewhere (the user cleared or replaced `param.grad`) is folded in at the next collection: nothing that
reaches `param.grad` is lost. Between a backward and the step, what was collected is shown there without its
values; see `ungathered.py`.

[Note: tree] Under `reduce.order: tree` a micro-batch is a part of a sum that is not formed in the order of
arrival. So each lands once, and goes at once to where it is added by the tree: whole where it waits for
others of this rank, reduced where every micro-batch is. `end_sum` ends that. A right leaf needs no buffer of
its own: it is added to its left neighbour as it lands.

In a pipeline the backwards of micro-batches are mixed, and a gradient may come in several turns. There each
part has a buffer, which begins as zeros that are added to, from `open_part` to `take_part`. So a negative
zero becomes a positive one there, and `_copy` lets none land elsewhere: a sum with a part that has none has
none, whatever is added to it. That is done in the pass that lands it, because one over the sum would move as
much again as the sum of two ranks' parts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives, Handle
from zerodrift.comm.fold import Sum
from zerodrift.dtypes import BLOCK
from zerodrift.engine.buffers import GradientBuffers
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.treesum import TreeSum
from zerodrift.engine.ungathered import CollectedGradient
from zerodrift.optim.rounding import round_away
from zerodrift.optim.updater import Owned
from zerodrift.plan.table import Row, Segment
from zerodrift.policy.nouns import Master, Update

_TRAINABLE, _GRAD = operator.attrgetter("requires_grad"), operator.attrgetter("grad")
_NO_GRADIENT = {type(None), CollectedGradient}
"""What is in `param.grad` of one that autograd, or somebody else, has given none."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A buffer that gradients land in, and its views."""

    landing: torch.Tensor
    grads: list[torch.Tensor]


@dataclass(slots=True)
class _Seen:
    """The gradients of a segment as they may be seen: `values` times `scale`."""

    values: torch.Tensor
    """`[padded]`: the sum of all ranks, or in the middle of a step of this one."""
    complete: bool
    scale: float
    shown: bool = False
    """Whether somebody has looked, and may have changed them."""


class TrainedSegment(FlatSegment):
    """The tensors of one trained segment of the plan on this rank."""

    def __init__(
        self,
        update: Update,
        number: int,
        spec: Segment,
        rows: list[Row],
        parameters: list[nn.Parameter],
        comm: Collectives,
        pools: GradientBuffers,
        unit: str = "",
    ) -> None:
        super().__init__(number, spec, rows, parameters, comm, unit)
        self.update = update
        whole = not update.accumulate.axis
        self._landing_pool = pools.sums if whole else pools.spare
        self._sum_pool = pools.spare if whole else pools.sums
        self.landing: torch.Tensor | None = None
        """See [Note: landing]: `[padded]` in the accumulate dtype while gradients are on their way."""
        self.reduced: torch.Tensor | None = None
        """This rank's slice of the sum over ranks and micro-batches: `[padded / ranks]`."""
        self._whole: torch.Tensor | None = None
        """Stage 0: the buffer that `reduced` is a slice of, to be gathered in place."""
        self._grads: list[torch.Tensor] = []
        """Of `landing`, one per parameter, as soon as somebody asked; see `_homes`."""
        self._travels = False
        """Whether `landing` is on its way to other ranks."""
        self._opened: set[int] = set()
        """Parameters, by number, whose `grad` was preset to that."""
        self.tree = update.reduce.order == "tree"
        self._sum = TreeSum(self._give)
        """See [Note: tree]: what has come of a step's micro-batches; empty in the order of ranks."""
        self._parts: dict[int, _Part] = {}
        """Of a pipeline, parts of the tree that are not complete, or wait for one before them, by number."""
        self._collected: list[CollectedGradient] = []
        """What stands in `param.grad` while the engine has the gradients, one per parameter."""
        self._shows_collected = False
        self._seen: _Seen | None = None
        """What of the gradients may be seen, and changed."""
        self.arrived: set[int] = set()
        """Parameters, by number, that got a gradient in this step."""
        self._gone: set[int] = set()
        """Those of which somebody has taken it away."""
        self.ends: list[Any] = []
        """Where the gradients of the parameters arrive in any graph."""

    def _expect_gradients(self) -> None:
        for parameter in self.parameters:
            # Sticks to the parameter: autograd casts what it leaves to this dtype before adding.
            parameter.grad_dtype = self.update.accumulate.dtype.torch
        self.ends = [torch.autograd.graph.get_gradient_edge(p).node for p in self.parameters]

    # --- storage and master -----------------------------------------------------------------------------

    def at_rest(self, values: torch.Tensor) -> torch.Tensor:
        """Rounded as the master scheme rounds."""
        return round_away(values) if self.update.master is Master.SPLIT else super().at_rest(values)

    @property
    def apart(self) -> bool:
        return self._resident and self.update.master is not Master.SAME

    @property
    def _is_compared(self) -> bool:
        return True

    # --- the gradient -----------------------------------------------------------------------------------

    def open_gradients(self) -> None:
        """Preset every `param.grad` to its place in the landing buffer, where there is one already."""
        for number, (parameter, grad) in enumerate(zip(self.parameters, self._homes, strict=False)):
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = grad
                self._opened.add(number)

    @property
    def loose(self) -> str:
        """The first parameter with a gradient that was not collected; "" where there is none."""
        with torch._C.DisableTorchFunctionSubclass():
            if {*map(type, map(_GRAD, self.parameters))} <= _NO_GRADIENT:
                return ""
        pairs = zip(self.rows, self._given(), strict=True)
        return next((row.name for row, grad in pairs if grad is not None), "")

    def _given(self) -> list[torch.Tensor | None]:
        """What is in `param.grad` of each, where that is not what the engine has."""
        with torch._C.DisableTorchFunctionSubclass():
            return [None if type(grad) is CollectedGradient else grad for grad in map(_GRAD, self.parameters)]

    @property
    def waits(self) -> bool:
        """Whether gradients have landed that were not reduced."""
        if self.tree:
            return bool(self._sum) and self._sums_whole and self.ranks > 1
        return self.landing is not None and self.landing is not self.reduced

    def collect_gradients(self) -> None:
        """Bring what autograd left into the landing buffer and take `param.grad` away.

        A parameter without a gradient counts as zero, so every rank reduces the same segments whatever its
        data did.
        """
        arrived = self._given()
        self.arrived.update([number for number, grad in enumerate(arrived) if grad is not None])
        neighbour = self._sum.neighbour if self._sums_whole else None
        with torch.no_grad():
            if self.landing is None and neighbour is not None:
                self._land_on(neighbour, arrived)
            elif self.landing is None:
                self._land_first(arrived)
            else:
                for number, (grad, home) in enumerate(zip(arrived, self._homes, strict=True)):
                    if grad is None or grad is home or grad.data_ptr() == home.data_ptr():
                        continue
                    if number in self._opened:
                        self._copy([home], [_dense(grad)])  # `create_graph` puts old + new in its place
                    else:
                        home.add_(_dense(grad))
        super().drop_gradients()
        self._opened.clear()
        if self._shows_collected:
            self.show_collected()

    def show_collected(self) -> None:
        """Say of every gradient that the engine has it, until `hide_collected`."""
        self._shows_collected = True
        with torch._C.DisableTorchFunctionSubclass():
            if not self._collected:
                pairs = zip(self.parameters, self.rows, strict=True)
                self._collected = [CollectedGradient.of(parameter, row.name) for parameter, row in pairs]
            for parameter, collected in zip(self.parameters, self._collected, strict=True):
                if parameter.grad is None:
                    parameter.grad = collected

    @property
    def can_be_seen(self) -> bool:
        """Whether every rank has all of a gradient at the end of a step, and nobody adds to it then."""
        return not self.update.axis and not self.tree and self._comm.mesh.size("replicate") == 1

    def let_see(self, complete: bool, scale: Callable[[bool], float]) -> None:
        """What was collected may be seen and changed, times `scale` of whether it is of all ranks: the sum at
        the end of a step, before it what this rank has."""
        if (self.reduced if complete else self.landing) is None:
            return
        values = self.whole_gradient() if complete else self.landing
        assert values is not None
        self._seen = seen = _Seen(values, complete, scale(complete))
        for collected in self._collected:
            collected.reveal = lambda: self._reveal(seen)

    def _reveal(self, seen: _Seen) -> None:
        seen.shown = True
        values = seen.values * seen.scale
        for row, collected in zip(self.rows, self._collected, strict=True):
            collected.shows(self.view(values, row))
        self._collected = []

    def _take_changes(self, seen: _Seen) -> None:
        """What somebody has made of the gradients that could be seen becomes what the engine has."""
        for number, (parameter, row) in enumerate(zip(self.parameters, self.rows, strict=True)):
            home, grad = self.view(seen.values, row), parameter.grad
            if grad is None:
                self.arrived.discard(number)
                self._gone.add(number)
                home.zero_()
            elif seen.shown and not torch.equal(grad, home * seen.scale):
                self.arrived.add(number)
                home.copy_(grad / seen.scale)
            parameter.grad = None
        if seen.complete and self.reduced is not None:
            mine = self.slice_of(seen.values)
            if mine.data_ptr() != self.reduced.data_ptr():
                self.reduced.copy_(mine)

    def _end_seeing(self) -> None:
        seen, self._seen = self._seen, None
        for collected in self._collected:
            collected.reveal = None
        if seen is not None and seen.complete:
            self.give_back(seen.values)

    @property
    def left_alone(self) -> list[Row]:
        """The rows that a step has no gradient for because somebody wants it so: frozen for a while, or with
        a gradient that was taken away. As in plain torch, these are not updated."""
        with torch._C.DisableTorchFunctionSubclass():
            if not self._gone and all(map(_TRAINABLE, self.parameters)):
                return []
            wanted = [n in self._gone or not p.requires_grad for n, p in enumerate(self.parameters)]
        return [self.rows[n] for n, alone in enumerate(wanted) if alone and n not in self.arrived]

    def hide_collected(self) -> str:
        """Say nothing any more. Returns the first parameter of which somebody has taken it away; "" where
        nobody has."""
        if not self._shows_collected:
            return ""
        self._shows_collected = False
        if self._seen is not None:
            with torch._C.DisableTorchFunctionSubclass():
                self._take_changes(self._seen)
            self._end_seeing()
            return ""
        cleared = ""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, row in zip(self.parameters, self.rows, strict=True):
                grad = parameter.grad
                if grad is None or (type(grad) is CollectedGradient and grad.cleared):
                    cleared = cleared or row.name
                if type(grad) is CollectedGradient:
                    parameter.grad, grad.cleared = None, False
        return cleared

    @property
    def _homes(self) -> list[torch.Tensor]:
        """The place of each parameter in the landing buffer; none where what arrives must not be added to
        it, because it is not there, or travels."""
        if self.landing is None or self._travels:
            return []
        if not self._grads:
            self._grads = [self.view(self.landing, row) for row in self.rows]
        return self._grads

    def _land_first(self, arrived: list[torch.Tensor | None]) -> None:
        """Copy the first gradients into a buffer; zero what got none, and the gaps between parameters."""
        dtype = self.update.accumulate.dtype.torch
        landing = self._landing_pool.take(self.spec.padded, dtype, self.full.device)
        self.landing, self._grads = landing, []
        if self.tree:
            self._land_without_negative_zeros(landing, arrived)
            return
        pieces = []
        for row, gap, grad in zip(self.rows, self._gaps, arrived, strict=True):
            if grad is None:
                pieces += [gap, self._zeros(row.numel)]
            else:
                pieces += [gap, (grad.to_dense() if grad.is_sparse else grad).reshape(-1)]
        end = self.spec.padded - self._lengths[-1]
        torch.cat(pieces, out=landing[:end])
        landing[end:].zero_()

    def _land_without_negative_zeros(self, landing: torch.Tensor, arrived: list[torch.Tensor | None]) -> None:
        """See [Note: tree]."""
        pairs = list(zip(self._homes, arrived, strict=True))
        here = [(home, _dense(grad)) for home, grad in pairs if grad is not None]
        if here:
            self._copy([home for home, _ in here], [grad for _, grad in here])
        gaps = landing.split(self._lengths)[::2]
        torch._foreach_zero_([*gaps, *(home for home, grad in pairs if grad is None)])

    @functools.cached_property
    def _lengths(self) -> list[int]:
        """Of the buffer: elements of no parameter and of one, in turn, to its end."""
        lengths, end = [], 0
        for row in self.rows:
            lengths += [row.offset - end, row.numel]
            end = row.offset + row.numel
        return [*lengths, self.spec.padded - end]

    @functools.cached_property
    def _gaps(self) -> list[torch.Tensor]:
        """Zeros for what lies before each parameter."""
        return [self._zeros(length) for length in self._lengths[:-1:2]]

    def _zeros(self, count: int) -> torch.Tensor:
        """So many, in little memory."""
        dtype = self.update.accumulate.dtype.torch
        few = torch.zeros(min(count, BLOCK), dtype=dtype, device=self.full.device)
        return few if count <= BLOCK else few[:1].expand(count)

    def _copy(self, homes: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Under the tree without negative zeros: see [Note: tree]."""
        if not self.tree or self.full.is_cuda:
            torch._foreach_copy_(homes, grads)
        if self.tree and self.full.is_cuda:
            torch._foreach_add_(homes, 0.0)  # a few launches more, for all of them
        elif self.tree:
            for home, grad in zip(homes, grads, strict=True):
                torch.add(grad.to(home.dtype), 0.0, out=home)  # -0.0 + 0.0 is 0.0

    def _land_on(self, left: torch.Tensor, arrived: list[torch.Tensor | None]) -> None:
        """Add the gradients to the part of the tree before them: what a buffer of theirs would add."""
        pairs = [(self.view(left, row), grad) for row, grad in zip(self.rows, arrived, strict=True)]
        here = [(home, _dense(grad).to(home.dtype)) for home, grad in pairs if grad is not None]
        if here:
            torch._foreach_add_([home for home, _ in here], [grad for _, grad in here])
        self._sum.added()

    # --- the tree over micro-batches --------------------------------------------------------------------

    @property
    def _sums_whole(self) -> bool:
        return not self.update.accumulate.axis

    def wait_for_others(self) -> None:
        """What has landed is added to this rank's other micro-batches."""
        if self.landing is not None:
            self._sum.add(self.landing)
            self.landing, self._grads = None, []

    def open_part(self, number: int) -> None:
        """Until `close_part`, gradients are added in place to what has come of part `number` of the tree."""
        part = self._parts.pop(number, None)
        if part is None:
            self._land_first([None] * len(self.parameters))
        else:
            self.landing, self._grads = part.landing, part.grads
        self.open_gradients()

    def close_part(self, number: int) -> None:
        """More of it may come, in another `open_part`."""
        self.collect_gradients()
        if self.landing is None:
            raise AssertionError(f"segment {self.number} has no part {number}")
        self._parts[number] = _Part(self.landing, self._grads)
        self.landing, self._grads = None, []

    def take_part(self) -> None:
        """The part that comes after those in the tree is complete: it is what has landed."""
        part = self._parts.pop(self._sum.count)
        self.landing, self._grads = part.landing, part.grads

    def end_sum(self) -> None:
        """No micro-batch of the step is to come: `reduced` is the sum of all."""
        if self._sum:
            self.reduced = self._sum.take()

    def _give(self, flat: torch.Tensor) -> None:
        """A buffer of the tree goes back to where it came from; the first one's place may be in `_whole`."""
        if self._whole is not None and flat.data_ptr() == self.slice_of(self._whole).data_ptr():
            return
        whole = flat.numel() == self.spec.padded
        (self._landing_pool if whole else self._sum_pool).give(flat)

    # --- over ranks -------------------------------------------------------------------------------------

    def start_reduce(self, before: float) -> Handle:
        """Begin to add this rank's slice of the ranks' sum to `reduced`. The landing buffer stays until
        `finish_reduce`. `before` divides what travels."""
        if self.waits and self.tree:
            if self.landing is not None:
                self._sum.add(self.landing)
            self.landing = self._sum.take()
        if self.landing is None:
            raise AssertionError(f"segment {self.number} has no gradient to reduce")
        if self.ranks == 1:
            return Handle()
        self._travels = True
        flat, reduce = self.landing, self.update.reduce
        if before != 1.0 or reduce.wire.torch is not flat.dtype:
            with torch.no_grad():
                flat = (flat if before == 1.0 else flat.div_(before)).to(reduce.wire.torch)
        reduced = self._place_of_sum(flat, self.landing) if self.reduced is None else self.reduced
        how = Sum(reduce.sum.torch, add=self.reduced is not None, order=reduce.order)
        self.reduced = reduced
        return self._comm.start_reduce_scatter(reduced, flat, self.axis, how, self._of)

    def _place_of_sum(self, flat: torch.Tensor, landing: torch.Tensor) -> torch.Tensor:
        """Where the sum goes: a slice of its own, or at stage 0 its place among what will be gathered."""
        if not self.update.axis and flat is landing and self._whole is None:
            self._whole = landing
            return self.slice_of(landing)
        return self._sum_pool.take(self.spec.padded // self.ranks, landing.dtype, flat.device)

    def finish_reduce(self) -> None:
        """The reduction is done: the landing buffer is given back, or is itself what was reduced."""
        if self.ranks == 1:
            self.reduced = self.landing
            return
        if self.landing is not None and self.landing is not self._whole:
            self._landing_pool.give(self.landing)
        self.landing, self._grads, self._travels = None, [], False
        if self.tree and not self._sums_whole and self.reduced is not None:
            self._sum.add(self.reduced)
            self.reduced = None

    def sum_over_replicas(self, before: float) -> None:
        """Add the slices of the other replicas, once per step."""
        if self.reduced is None:
            raise AssertionError(f"segment {self.number} has nothing to sum over replicas")
        self._add_replicas(self.reduced, before)

    def over_replicas(self, gradient: torch.Tensor, before: float) -> torch.Tensor:
        """What a reduced gradient will be once replicas are summed: a copy, where there are any."""
        if self._comm.mesh.size("replicate") == 1:
            return gradient
        summed = gradient.clone()
        self._add_replicas(summed, before)
        return summed

    def _add_replicas(self, flat: torch.Tensor, before: float) -> None:
        reduce = self.update.reduce
        with torch.no_grad():
            if before != 1.0 and self.ranks == 1:
                flat.div_(before)
            wire = flat if flat.dtype is reduce.wire.torch else flat.to(reduce.wire.torch)
        self._comm.all_reduce(flat, wire, "replicate", Sum(reduce.sum.torch, order=reduce.order), self._of)

    def whole_gradient(self) -> torch.Tensor:
        """The reduced gradient on every rank, `[padded]` in the accumulate dtype."""
        whole, handle = self.start_whole_gradient()
        handle.wait()
        return whole

    def start_whole_gradient(self) -> tuple[torch.Tensor, Handle]:
        """The same, which is there when the handle was waited for."""
        if self.reduced is None:
            raise AssertionError(f"segment {self.number} has no reduced gradient")
        if self.ranks == 1:
            return self.reduced, Handle()
        whole = self._whole
        if whole is None:
            whole = self._landing_pool.take(self.spec.padded, self.reduced.dtype, self.reduced.device)
        return whole, self._comm.start_all_gather(whole, self.reduced, self.axis, self._of)

    def give_back(self, whole: torch.Tensor) -> None:
        """The buffer of `whole_gradient` is not needed any more."""
        if whole is not self.reduced and whole is not self._whole:
            self._landing_pool.give(whole)

    def drop_gradients(self) -> None:
        """Forget every gradient, landed or reduced."""
        self._shows_collected = False
        self._end_seeing()
        self.arrived.clear()
        self._gone.clear()
        super().drop_gradients()
        for waiting in self._sum.drop():
            self._give(waiting)
        for part in self._parts.values():
            self._landing_pool.give(part.landing)
        self._parts.clear()
        if self.tree and self.reduced is not None:
            self._give(self.reduced)
        elif self.reduced is not None and self._whole is None and self.reduced is not self.landing:
            self._sum_pool.give(self.reduced)
        for flat in (self.landing, self._whole):
            if flat is not None:
                self._landing_pool.give(flat)
        self.landing = self.reduced = self._whole = None
        self._grads, self._travels = [], False
        self._opened.clear()

    # --- after the update -------------------------------------------------------------------------------

    @property
    def owned(self) -> torch.Tensor:
        """The part of storage that this rank's optimizer writes."""
        if self.update.axis and not self.sharded and self.ranks > 1:
            return self.slice_of(self.storage)
        return self.storage

    def owned_of(self, flat: torch.Tensor) -> torch.Tensor:
        """What `owned` is of storage, of another `[padded]` buffer."""
        return flat if self.owned.numel() == flat.numel() else self.slice_of(flat)

    def piece(self, initial: torch.Tensor) -> Owned:
        """What the optimizer gets; `initial` is the first master of `owned`."""
        whole = self.owned.numel() == self.spec.padded
        start = 0 if whole else self.rank * self.owned.numel()
        rows = tuple(self.rows)
        return Owned(self.number, self.spec, self.update, rows, self.owned, initial, start, self._part)

    def sync_storage(self) -> Handle:
        if self.ranks == 1 or self.sharded or not self.update.axis:
            return Handle()
        return self._comm.start_all_gather(self.storage, self.owned, self.axis, self._of)


def make(
    number: int,
    spec: Segment,
    rows: list[Row],
    parameters: list[nn.Parameter],
    comm: Collectives,
    pools: GradientBuffers,
    unit: str = "",
) -> FlatSegment:
    """A segment of the plan, trained or frozen."""
    update = spec.columns.update
    if update is None:
        return FlatSegment(number, spec, rows, parameters, comm, unit)
    return TrainedSegment(update, number, spec, rows, parameters, comm, pools, unit)


def trained(segments: Iterable[FlatSegment]) -> list[TrainedSegment]:
    """Those that are."""
    return [segment for segment in segments if isinstance(segment, TrainedSegment)]


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad
