"""One flat buffer: its storage at rest, its full form in compute, its gradient, a view per parameter.

A segment knows where its bytes are and moves them when told; when to do so is `unit.py`'s and `grads.py`'s
affair, which dtype everything has is the plan's. The optimizer's side (master, state) is in `optim`.

Invariant: parameters are views of `full` wherever that is there, and never get other memory.

[Note: freeing] The memory of a gathered buffer is given back with `untyped_storage().resize_(0)`, and only
where the segment's own tensors are all that is left on it. Most kernels do not look whether memory is there,
so whoever else has a view (a user, a graph that is to be differentiated twice) keeps the buffer with its
values, and the segment takes another at the next gather. Autograd has none: `saved.py` packs what it saves.
What that does not find is safe too: a graph holds a view, or a parameter itself, which then stays full until
the graph goes or storage changes.
While a buffer is not there, a parameter is one NaN expanded to its shape, of a class that names it when it is
read or written; see `ungathered.py`.

[Note: writing] Between steps a parameter that rests whole is there to be written to, through itself (which
moves its version counter) or through `.data` (which does not). Where storage is the master a write is the new
value. Where an optimizer keeps more bits elsewhere, prints of storage tell that there was one: an fp32 master
takes over what differs from its rounding, which is exact. A split master cannot, because which elements of a
block were written, and so which low halves still count, is not known: that is an error, by name.
What is gathered for a forward goes with its memory. A write to a parameter moves its counter; for one through
`.data` this rank's slice is compared with its storage before it goes, in some releases only: who writes in a
forward does so in all of them. In the same way ranks compare what is frozen and whole now and then.

[Note: landing] Gradients are collected into a flat buffer of the accumulate dtype, to which
`param.grad_dtype` makes autograd cast. The first of a parameter is copied there when its unit's backward
is over, which costs less than a buffer of zeros to add to; from then on `param.grad` is preset to a view
of the buffer, so autograd adds in place, and so does whoever writes `param.grad` late. A gradient that was
put elsewhere (the user cleared or replaced `param.grad`) is folded in at the next collection: nothing that
reaches `param.grad` is lost. Between a backward and the step, what was collected is shown there without its
values; see `ungathered.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives, Handle
from zerodrift.comm.fold import Sum
from zerodrift.engine.buffers import GradientBuffers
from zerodrift.engine.ungathered import CollectedGradient, mark_gathered, mark_ungathered, ungathered_class
from zerodrift.kernels.prints import BYTES, prints
from zerodrift.optim.split import round_away
from zerodrift.optim.updater import Owned
from zerodrift.plan.table import Row, Segment
from zerodrift.policy.nouns import Master

SELDOM = 32
"""What is looked at now and then is looked at the first few times, and then once in so many."""


class FlatSegment:
    """The tensors of one segment of the plan on this rank."""

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
        self.number = number
        self.unit = unit
        """The unit's name."""
        self._of = f"`{unit or 'the root'}`, segment {number}"
        """For ranks that do not gather the same."""
        self.spec = spec
        self.rows = rows
        self.parameters = parameters
        self.update = spec.columns.update
        self._comm = comm
        whole = self.update is None or not self.update.accumulate.axis
        self._landing_pool = pools.sums if whole else pools.spare
        self._sum_pool = pools.spare if whole else pools.sums
        self.axis = spec.axis
        """The ranks that share the segment."""
        self.ranks = comm.mesh.size(self.axis)
        self.rank = comm.mesh.rank(self.axis)
        self._part = comm.mesh.rank("expert")
        columns = spec.columns
        self.sharded = columns.storage.axis != "" and self.ranks > 1
        device = comm.mesh.device
        numel = spec.padded // self.ranks if self.sharded else spec.padded
        self.storage = torch.empty(numel, dtype=columns.storage.dtype.torch, device=device)
        """At rest, in the storage dtype: `[padded]`, or this rank's `[padded / ranks]`.
        `place.py` fills it."""
        self._resident = not self.sharded and columns.storage.dtype is columns.compute
        self.full = self._make_full(device)
        """What parameters are views of, in the compute dtype: `[padded]`."""
        self.is_full = self._resident
        self._gathering: Handle | None = None
        self._wide: torch.Tensor | None = None
        self.landing: torch.Tensor | None = None
        """See [Note: landing]: `[padded]` in the accumulate dtype while gradients are on their way."""
        self.reduced: torch.Tensor | None = None
        """This rank's slice of the sum over ranks and micro-batches: `[padded / ranks]`."""
        self._whole: torch.Tensor | None = None
        """Stage 0: the buffer that `reduced` is a slice of, to be gathered in place."""
        self._grads: list[torch.Tensor] = []
        """Of `landing`, one per parameter."""
        self._opened: set[int] = set()
        """Parameters, by number, whose `grad` was preset to that."""
        self._collected: list[CollectedGradient] = []
        """What stands in `param.grad` while the engine has the gradients, one per parameter."""
        self._shows_collected = False
        self._views: list[torch.Tensor] = []
        """Of `full`, one per parameter."""
        self.stubs: list[torch.Tensor] = []
        """What parameters are while `full` is not there; see [Note: freeing]."""
        self._own = 0
        """How many tensors of this segment share the memory of `full` while no parameter does."""
        self.ends: list[Any] = []
        """Where the gradients of the parameters arrive in any graph; none where they are frozen."""
        self._counts: list[int] = []
        """How often each parameter is held while no graph has saved it."""
        self.starts = [row.offset for row in rows]
        """Of each row, in elements."""
        self._absences: list[type] = []
        """The class of each parameter while it is not there."""
        self._absent = torch.empty(0)
        """The one element of each of those."""
        self._lent = 0
        """How many want the full form to stay; see `lend`."""
        self._stale = False
        """Whether the full form holds values that are not storage's."""
        self._known: torch.Tensor | None = None
        """Prints of what the engine left in storage; see [Note: writing]."""
        self._lent_out: torch.Tensor | None = None
        """Prints of the full form as it was lent."""
        self._versions: list[int] = []
        """Of the parameters, as the engine left them."""
        self._overwritten: torch.Tensor | None = None
        """Blocks of this rank's slice that somebody wrote to while they were gathered, on the device."""
        self._frees = self._looks = 0
        """How often the full form has gone, and how often ranks were to compare what they hold."""

    def _make_full(self, device: torch.device) -> torch.Tensor:
        if self._resident:
            return self.storage
        full = torch.empty(self.spec.padded, dtype=self.spec.columns.compute.torch, device=device)
        full.untyped_storage().resize_(0)
        return full

    # --- the parameter --------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Turn the parameters into views; `place.py` fills storage."""
        if not self._resident:
            self._allocate(self.full)  # a view cannot be made of memory that is not there
        self._views = self._views_of_full()
        self._absent = self.full.new_full((len(self.rows),), _nowhere(self.full.dtype))
        self.stubs = [one.expand(row.shape) for one, row in zip(self._absent, self.rows, strict=True)]
        self._show(self._views)
        if self.update is not None:
            for parameter in self.parameters:
                # Sticks to the parameter: autograd casts what it leaves to this dtype before adding.
                parameter.grad_dtype = self.update.accumulate.dtype.torch
            self.ends = [torch.autograd.graph.get_gradient_edge(p).node for p in self.parameters]
        self._counts = [_uses(parameter) for parameter in self.parameters]
        if not self._resident:
            self._hide()
            self._own = _holders(self.full)
            self._stale = True  # there is nothing in it
            self._free()

    def _views_of_full(self) -> list[torch.Tensor]:
        return [self.view(self.full, row) for row in self.rows]

    def at_rest(self, values: torch.Tensor) -> torch.Tensor:
        """Values as storage holds them, rounded as the master scheme rounds: also where another rank owns
        them, and before the first update."""
        if self.update is not None and self.update.master is Master.SPLIT:
            return round_away(values)
        return values.to(self.storage.dtype)

    def _show(self, tensors: list[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            mark_gathered(parameter)
            parameter.data = tensor

    def _hide(self) -> None:
        self._show(self.stubs)
        if not self._absences:
            pairs = zip(self.parameters, self.rows, strict=True)
            self._absences = [ungathered_class(row.name) for parameter, row in pairs]
        for parameter, kind in zip(self.parameters, self._absences, strict=True):
            mark_ungathered(parameter, kind)

    @property
    def shown(self) -> list[torch.Tensor]:
        """What each parameter is a view of now."""
        return self._views if self.is_full else self.stubs

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's equal slice of a `[padded]` buffer."""
        count = flat.numel() // self.ranks
        return flat[self.rank * count : (self.rank + 1) * count]

    def first_of(self, row: Row) -> int:
        """Where in the whole parameter the row of this rank begins: an element of its flattening."""
        return self._part * row.numel if row.parts > 1 else 0

    @staticmethod
    def view(flat: torch.Tensor, row: Row) -> torch.Tensor:
        """A row's values inside a `[padded]` buffer, in the row's shape."""
        return flat[row.offset : row.offset + row.numel].view(row.shape)

    def start_gather(self) -> bool:
        """Begin to make the full form; does nothing where it is there or under way. Returns whether it took
        a collective."""
        if self.is_full or self._gathering is not None:
            return False
        if not self._views:
            self.full = torch.empty(self.spec.padded, dtype=self.full.dtype, device=self.full.device)
            self._views = self._views_of_full()
        self._allocate(self.full)
        with torch.no_grad():
            if not self.sharded:
                self.full.copy_(self.storage)
                self._gathering = Handle()
                return False
            columns = self.spec.columns
            target = self.full
            if columns.gather is not columns.compute:
                target = self._wide = torch.empty_like(self.full, dtype=columns.gather.torch)
            self._gathering = self._comm.start_all_gather(target, self.storage, self.axis, self._of)
            return True

    def finish_gather(self) -> None:
        """The full form is there when this returns."""
        self.start_gather()
        handle, self._gathering = self._gathering, None
        if handle is None:
            return
        handle.wait()
        if self._wide is not None:
            with torch.no_grad():
                self.full.copy_(self._wide)
            self._wide = None
        self._show(self._views)
        self.is_full = True

    def release(self) -> None:
        """Give the full form's memory back, where nobody needs it there. See [Note: freeing]."""
        if self._gathering is not None:
            self.finish_gather()
        if self.is_full and not self._resident and not self._is_saved:
            self.drop()

    def drop(self) -> None:
        """The same where storage is about to change: a graph that has saved the old values is out of date,
        and autograd says so."""
        if self._gathering is not None:
            self.finish_gather()
        if self.is_full and not self._resident and not self._lent:
            self._free()

    @property
    def _is_saved(self) -> bool:
        """Whether a graph holds a parameter itself, and will take what it shows then for what it showed."""
        return any(count != _uses(p) for p, count in zip(self.parameters, self._counts, strict=True))

    def _free(self) -> None:
        if not self._stale and self._is_due(self._frees):
            self._compare_with_storage()
        self._frees += 1
        self._hide()
        self.is_full = self._stale = False
        if _holders(self.full) > self._own:
            self.full, self._views = self.full.new_empty(0), []
        else:
            self.full.untyped_storage().resize_(0)

    @staticmethod
    def _is_due(count: int) -> bool:
        return count < 4 or count % SELDOM == 0

    def _compare_with_storage(self) -> None:
        """See [Note: writing]."""
        columns = self.spec.columns
        with torch.no_grad():
            own = self.slice_of(self.full) if self.sharded else self.full
            kept = self.storage.to(columns.gather.torch) if self.sharded else self.storage
            differ = prints(own) != prints(kept.to(own.dtype))
            self._overwritten = differ if self._overwritten is None else self._overwritten | differ

    def written_while_gathered(self) -> list[Row]:
        """The rows of this rank's slice that somebody wrote to while they were gathered: it was lost."""
        found, self._overwritten = self._overwritten, None
        if found is None or not found.any():
            return []
        first = self.rank * (self.spec.padded // self.ranks) if self.sharded else 0
        return self._rows_of(found, self.full, first)

    @property
    def gathers(self) -> bool:
        """Whether the full form is anything else than storage."""
        return not self._resident

    @staticmethod
    def _allocate(flat: torch.Tensor) -> None:
        flat.untyped_storage().resize_(flat.numel() * flat.element_size())

    # --- the gradient -----------------------------------------------------------------------------------

    def open_gradients(self) -> None:
        """Preset every `param.grad` to its place in the landing buffer, where there is one already."""
        if self.update is None:
            return
        for number, (parameter, grad) in enumerate(zip(self.parameters, self._grads, strict=False)):
            if parameter.grad is None:
                parameter.grad = grad
                self._opened.add(number)

    @property
    def loose(self) -> str:
        """The first parameter with a gradient that was not collected; "" where there is none."""
        if self.update is None:
            return ""
        given = self._given()
        if not any(grad is not None for grad in given):
            return ""
        return next(row.name for row, grad in zip(self.rows, given, strict=True) if grad is not None)

    def _given(self) -> list[torch.Tensor | None]:
        """What is in `param.grad` of each, where that is not what the engine has."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [parameter.grad for parameter in self.parameters]
        return [None if type(grad) is CollectedGradient else grad for grad in found]

    def _clear(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                parameter.grad = None

    @property
    def waits(self) -> bool:
        """Whether gradients have landed that were not reduced."""
        return self.landing is not None and self.landing is not self.reduced

    def collect_gradients(self) -> None:
        """Bring what autograd left into the landing buffer and take `param.grad` away.

        A parameter without a gradient counts as zero, so every rank reduces the same segments whatever its
        data did.
        """
        arrived = self._given()
        with torch.no_grad():
            if self.landing is None:
                self._land_first(arrived)
            else:
                for number, (grad, home) in enumerate(zip(arrived, self._grads, strict=True)):
                    if grad is None or grad is home or grad.data_ptr() == home.data_ptr():
                        continue
                    if number in self._opened:
                        home.copy_(_dense(grad))  # `create_graph` puts old + new in the old one's place
                    else:
                        home.add_(_dense(grad))
        self._clear()
        self._opened.clear()
        if self._shows_collected:
            self.show_collected()

    def show_collected(self) -> None:
        """Say of every gradient that the engine has it, until `hide_collected`."""
        if self.update is None:
            return
        self._shows_collected = True
        with torch._C.DisableTorchFunctionSubclass():
            if not self._collected:
                pairs = zip(self.parameters, self.rows, strict=True)
                self._collected = [CollectedGradient.of(parameter, row.name) for parameter, row in pairs]
            for parameter, collected in zip(self.parameters, self._collected, strict=True):
                if parameter.grad is None:
                    parameter.grad = collected

    def hide_collected(self) -> str:
        """Say nothing any more. Returns the first parameter of which somebody has taken it away; "" where
        nobody has."""
        if not self._shows_collected:
            return ""
        self._shows_collected = False
        cleared = ""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, row in zip(self.parameters, self.rows, strict=True):
                found = parameter.grad
                if found is None or (type(found) is CollectedGradient and found.cleared):
                    cleared = cleared or row.name
                if type(found) is CollectedGradient:
                    parameter.grad, found.cleared = None, False
        return cleared

    def _land_first(self, arrived: list[torch.Tensor | None]) -> None:
        """Copy the first gradients into a buffer; zero what got none, and the gaps between parameters."""
        if self.update is None:
            raise AssertionError("unreachable")
        dtype = self.update.accumulate.dtype.torch
        landing = self._landing_pool.take(self.spec.padded, dtype, self.full.device)
        self._grads = [self.view(landing, row) for row in self.rows]
        pairs = list(zip(self._grads, arrived, strict=True))
        here = [(home, _dense(grad)) for home, grad in pairs if grad is not None]
        empty = [home for home, grad in pairs if grad is None] + [landing[gap] for gap in self._gaps]
        if here:
            torch._foreach_copy_([home for home, _ in here], [grad for _, grad in here])
        if empty:
            torch._foreach_zero_(empty)
        self.landing = landing

    @functools.cached_property
    def _gaps(self) -> list[slice]:
        """What of the buffer belongs to no parameter."""
        starts = [row.offset + row.numel for row in self.rows]
        ends = [*(row.offset for row in self.rows[1:]), self.spec.padded]
        return [
            slice(start, end)
            for start, end in zip([0, *starts], [self._first, *ends], strict=True)
            if start < end
        ]

    @property
    def _first(self) -> int:
        return self.rows[0].offset if self.rows else 0

    def start_reduce(self, before: float) -> Handle:
        """Begin to add this rank's slice of the ranks' sum to `reduced`. The landing buffer stays until
        `finish_reduce`. `before` divides what travels."""
        if self.update is None or self.landing is None:
            raise AssertionError(f"segment {self.number} has no gradient to reduce")
        if self.ranks == 1:
            return Handle()
        # What arrives while this travels must not be added to what travels.
        self._grads = []
        flat, reduce = self.landing, self.update.reduce
        with torch.no_grad():
            if before != 1.0:
                flat.div_(before)
            if reduce.wire.torch is not flat.dtype:
                flat = flat.to(reduce.wire.torch)
        first = self.reduced is None
        if first:
            self.reduced = self._place_of_sum(flat)
        if self.reduced is None:
            raise AssertionError("unreachable")
        how = Sum(reduce.sum.torch, add=not first)
        return self._comm.start_reduce_scatter(self.reduced, flat, self.axis, how, self._of)

    def _place_of_sum(self, flat: torch.Tensor) -> torch.Tensor:
        """Where the sum goes: a slice of its own, or at stage 0 its place among what will be gathered."""
        if self.update is not None and not self.update.axis and flat is self.landing:
            self._whole = self.landing
            return self.slice_of(self.landing)
        dtype = flat.dtype if self.landing is None else self.landing.dtype
        return self._sum_pool.take(self.spec.padded // self.ranks, dtype, flat.device)

    def finish_reduce(self) -> None:
        """The reduction is done: the landing buffer is given back, or is itself what was reduced."""
        if self.ranks == 1:
            self.reduced = self.landing
            return
        if self.landing is not None and self.landing is not self._whole:
            self._landing_pool.give(self.landing)
        self.landing = None
        self._grads = []

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
        if self.update is None:
            raise AssertionError(f"segment {self.number} is frozen")
        reduce = self.update.reduce
        with torch.no_grad():
            if before != 1.0 and self.ranks == 1:
                flat.div_(before)
            wire = flat if flat.dtype is reduce.wire.torch else flat.to(reduce.wire.torch)
        self._comm.all_reduce(flat, wire, "replicate", Sum(reduce.sum.torch), self._of)

    def whole_gradient(self) -> torch.Tensor:
        """The reduced gradient on every rank, `[padded]` in the accumulate dtype."""
        if self.reduced is None:
            raise AssertionError(f"segment {self.number} has no reduced gradient")
        if self.ranks == 1:
            return self.reduced
        whole = self._whole
        if whole is None:
            whole = self._landing_pool.take(self.spec.padded, self.reduced.dtype, self.reduced.device)
        self._comm.all_gather(whole, self.reduced, self.axis, self._of)
        return whole

    def give_back(self, whole: torch.Tensor) -> None:
        """The buffer of `whole_gradient` is not needed any more."""
        if whole is not self.reduced and whole is not self._whole:
            self._landing_pool.give(whole)

    def drop_gradients(self) -> None:
        """Forget every gradient, landed or reduced."""
        self._shows_collected = False
        self._clear()
        if self.reduced is not None and self._whole is None and self.reduced is not self.landing:
            self._sum_pool.give(self.reduced)
        for flat in (self.landing, self._whole):
            if flat is not None:
                self._landing_pool.give(flat)
        self.landing = self.reduced = self._whole = None
        self._grads = []
        self._opened.clear()

    # --- after the update -------------------------------------------------------------------------------

    @property
    def owned(self) -> torch.Tensor:
        """The part of storage that this rank's optimizer writes."""
        if self.update is None:
            raise AssertionError(f"segment {self.number} is frozen")
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
        return Owned(self.number, self.spec, rows, self.owned, initial, start, self._part)

    def sync_storage(self) -> Handle:
        """After the update: storage that is whole gets the other ranks' slices."""
        if self.update is None or self.ranks == 1 or self.sharded or not self.update.axis:
            return Handle()
        return self._comm.start_all_gather(self.storage, self.owned, self.axis, self._of)

    def changed(self) -> None:
        """The values are others now: a backward through a graph that used the old ones must raise, as it
        does in plain torch. Gathers write the same values again, and count for nothing."""
        torch.autograd.graph.increment_version(self.parameters)
        self.know()

    # --- who writes -------------------------------------------------------------------------------------

    def lend(self) -> None:
        """Keep the full form for somebody, until `take_back`; the gather must have been started on all ranks
        alike. Where parameters show storage itself they show a copy meanwhile, so that at every stage what is
        taken out of it stays as it is, and what is written to it can be dropped."""
        self._lent += 1
        if self._lent > 1:
            return
        self.finish_gather()
        if self._resident:
            self._turn_to(self.storage.clone())
        self._lent_out = prints(self.full)

    def take_back(self, *, keep: bool = False) -> None:
        """Nobody needs it any more; unless `keep`, and it is as it was lent, it goes."""
        self._lent -= 1
        if self._lent:
            return
        self._lent_out = None
        self._know_versions()
        if self._resident:
            self._turn_to(self.storage)
            self._stale = False
        elif self._stale:
            self.drop()
        elif not keep:
            self.release()

    def part(self) -> None:
        """The engine is gone: what is lent stays with the parameters, which are plain ones."""
        self._lent += bool(self._lent)
        for parameter in self.parameters:
            parameter.grad_dtype = parameter.dtype

    def drop_writes(self) -> None:
        """What was written to the lent form is not to be seen by anybody else."""
        self._stale = True

    def renew(self) -> None:
        """Storage has new values: what is lent shows them. A call of all ranks, where anything is lent."""
        if not self._lent:
            return
        if self._resident:
            with torch.no_grad():
                self.full.copy_(self.storage)
        else:
            self.is_full = False
            self.finish_gather()
        self._stale = False
        self._lent_out = prints(self.full)

    def written_while_lent(self) -> list[Row]:
        """The rows that were written to since the form was lent, or was made anew."""
        return [] if self._lent_out is None else self._rows_of(self._lent_out != prints(self.full), self.full)

    def _turn_to(self, flat: torch.Tensor) -> None:
        self.full = flat
        self._views = self._views_of_full()
        self._show(self._views)

    @property
    def apart(self) -> bool:
        """Whether parameters show storage that an optimizer keeps more bits of elsewhere."""
        return self._resident and self.update is not None and self.update.master is not Master.SAME

    def know(self) -> None:
        """What storage holds is what the engine put there."""
        self._know_versions()
        if self.apart:
            self._known = prints(self.storage)

    def _know_versions(self) -> None:
        self._versions = [parameter._version for parameter in self.parameters]

    @property
    def moved(self) -> list[Row]:
        """The rows whose parameters were written in place, by their version counters."""
        if not self._versions:
            return []
        found = zip(self.rows, self.parameters, self._versions, strict=True)
        return [row for row, parameter, version in found if parameter._version != version]

    def written_while_absent(self) -> list[Row]:
        """The rows of which somebody has written an element while they were not there: such a write reaches
        the one that stands for all. They are as before afterwards."""
        nowhere = _nowhere(self.full.dtype)
        absent = self._absent.isnan() if isinstance(nowhere, float) else self._absent == nowhere
        if absent.all():
            return []
        self._absent.fill_(nowhere)
        return [row for row, alike in zip(self.rows, absent.tolist(), strict=True) if not alike]

    def look(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(Whether others than the engine have written to storage, a checksum of what all ranks hold alike),
        on the device; None where it tells nothing."""
        if not self._resident:
            lost = self._overwritten
            return None if lost is None else (lost.any().long(), lost.new_zeros((), dtype=torch.int64))
        due = self.update is not None or self._is_due(self._looks)
        self._looks += 1
        alike = self.axis == "shard" and not self.sharded and due
        if not (alike or self._known is not None):
            return None
        now = prints(self.storage)
        written = now.new_zeros(()) if self._known is None else (now != self._known).any().long()
        return written, now.sum() & 0xFFFFFFFF if alike else now.new_zeros(())

    @property
    def written(self) -> list[Row]:
        """The rows of storage that others than the engine have written to."""
        return [] if self._known is None else self._rows_of(self.others, self.storage)

    @property
    def others(self) -> torch.Tensor:
        """`[blocks]` of storage: whether others than the engine have written there."""
        if self._known is None:
            raise AssertionError("nothing is known of storage")
        return self._known != prints(self.storage)

    def _rows_of(self, blocks: torch.Tensor, like: torch.Tensor, first: int = 0) -> list[Row]:
        """The rows that have a part in some of the blocks of what holds elements like `like`, from element
        `first` on; the memory of `like` itself need not be there."""
        size = like.element_size()
        if not blocks.any():
            return []
        spans = ((max(0, row.offset - first), max(0, row.offset + row.numel - first)) for row in self.rows)
        return [
            row
            for row, (start, end) in zip(self.rows, spans, strict=True)
            if blocks[start * size // BYTES : -(-end * size // BYTES)].any()
        ]


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _holders(flat: torch.Tensor) -> int:
    """How many tensors share the memory of one; a relative figure. Private in torch (2.13 to 2.15)."""
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


def _uses(parameter: Any) -> int:
    """How often a tensor is held outside of Python; a relative figure. Private in torch (2.13 to 2.15)."""
    return int(parameter._use_count())


def _nowhere(dtype: torch.dtype) -> float | int:
    """A value that cannot pass for one: NaN, or the least whole number; of truth values there is none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min
