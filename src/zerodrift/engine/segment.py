"""One flat buffer: its storage at rest, its full form in compute, a view per parameter.

A segment knows where its bytes are and moves them when told: `unit.py` tells it when, the plan which dtype
everything has. One that is trained has gradients too, in `trained.py`.

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
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives, Handle
from zerodrift.engine.ungathered import mark_gathered, mark_ungathered, ungathered_class
from zerodrift.kernels import resting
from zerodrift.kernels.prints import BYTES, prints
from zerodrift.plan.table import Row, Segment

SELDOM = 32
"""What is looked at now and then is looked at the first few times, and then once in so many."""


def is_due(count: int) -> bool:
    """Whether it is this time, after so many."""
    return count < 4 or count % SELDOM == 0


class FlatSegment:
    """The tensors of one segment of the plan on this rank; as it is, of a frozen one."""

    def __init__(
        self,
        number: int,
        spec: Segment,
        rows: list[Row],
        parameters: list[nn.Parameter],
        comm: Collectives,
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
        self._comm = comm
        self.axis = spec.axis
        """The ranks that share the segment."""
        self.ranks = comm.mesh.size(self.axis)
        self.rank = comm.mesh.rank(self.axis)
        self._part = comm.mesh.rank("expert")
        columns = spec.columns
        self.sharded = columns.storage.axis != "" and self.ranks > 1
        device = comm.mesh.device
        numel = spec.padded // self.ranks if self.sharded else spec.padded
        self.storage = resting.zeros(numel, columns.storage.dtype.torch, device)
        """At rest, in the storage dtype: `[padded]`, or this rank's `[padded / ranks]`.
        `place.py` fills it."""
        self._resident = not self.sharded and columns.storage.dtype is columns.compute
        self.full = self._make_full(device)
        """What parameters are views of, in the compute dtype: `[padded]`."""
        self.is_full = self._resident
        self._gathering: Handle | None = None
        self._wide: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        """Of `full`, one per parameter."""
        self.stubs: list[torch.Tensor] = []
        """What parameters are while `full` is not there; see [Note: freeing]."""
        self._stub_addresses: list[int] = []
        self._own = 0
        """How many tensors of this segment share the memory of `full` while no parameter does."""
        self._counts: list[int] = []
        """How often each parameter is held while no graph has saved it."""
        self._kinds: list[tuple[Any, ...]] = []
        """(dtype, shape, whether it is trained) of each parameter, as planned."""
        self.starts = [row.offset for row in rows]
        """Of each row, in elements."""
        self.lender: Callable[[], Callable[[], bool] | None] | None = None
        """A weak reference to what gathers the unit for somebody else's forward; see `LiveUnit.borrow`."""
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
        self.stand_in(self.full.new_full((len(self.rows),), nowhere(self.full.dtype)))
        trained = self.spec.columns.trained
        self._kinds = [(self.full.dtype, row.shape, trained) for row in self.rows]
        self._show(self._views)
        self._expect_gradients()
        self._counts = _uses(self.parameters)
        if not self._resident:
            self._hide()
            self._own = _holders(self.full)
            self._stale = True  # there is nothing in it
            self._free()

    def stand_in(self, absent: torch.Tensor) -> None:
        """From now on parameters are these elements, one each, expanded, while they are not there."""
        self._absent = absent
        self.stubs = [one.expand(row.shape) for one, row in zip(absent, self.rows, strict=True)]
        self._stub_addresses = list(map(torch.Tensor.data_ptr, self.stubs))
        if not self.is_full and self._absences:
            with torch._C.DisableTorchFunctionSubclass():
                for parameter, stub in zip(self.parameters, self.stubs, strict=True):
                    parameter.data = stub

    def _expect_gradients(self) -> None:
        """Of parameters that are trained."""

    def _views_of_full(self) -> list[torch.Tensor]:
        return [self.view(self.full, row) for row in self.rows]

    def at_rest(self, values: torch.Tensor) -> torch.Tensor:
        """Values as storage holds them: also where another rank owns them, and before the first update."""
        return values.to(self.storage.dtype)

    def _show(self, tensors: list[torch.Tensor]) -> None:
        mark_gathered(self.parameters)
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def _hide(self) -> None:
        for parameter, stub in zip(self.parameters, self.stubs, strict=True):
            parameter.data = stub
        if not self._absences:
            pairs = zip(self.parameters, self.rows, strict=True)
            borrow = _borrow(weakref.ref(self))
            self._absences = [ungathered_class(row.name, borrow) for parameter, row in pairs]
        mark_ungathered(self.parameters, self._absences)

    @property
    def shown(self) -> list[torch.Tensor]:
        """What each parameter is a view of now."""
        return self._views if self.is_full else self.stubs

    @property
    def is_shown(self) -> bool:
        """Whether every parameter is such a view, and trained or frozen as planned."""
        addresses = list(map(torch.Tensor.data_ptr, self.parameters))
        if self.is_full:
            expected = list(map(torch.Tensor.data_ptr, self._views))
            return addresses == expected and list(map(_KIND, self.parameters)) == self._kinds
        # What stands for a value cannot be viewed as anything else.
        trained = {*map(_TRAINED, self.parameters)}
        return addresses == self._stub_addresses and trained == {self.spec.columns.trained}

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
        if not self.sharded:
            with torch.no_grad():
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
        if self._gathering is None:
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
    def is_held(self) -> bool:
        """Whether anything but the parameters, and the segment itself, holds the full form's memory."""
        return _holders(self.full) > self._own + len(self.parameters) or self._is_saved

    @property
    def _is_saved(self) -> bool:
        """Whether a graph holds a parameter itself, and will take what it shows then for what it showed."""
        return _uses(self.parameters) != self._counts

    def _free(self) -> None:
        if not self._stale and is_due(self._frees):
            self._compare_with_storage()
        self._frees += 1
        self._hide()
        self.is_full = self._stale = False
        if _holders(self.full) > self._own:
            self.full, self._views = self.full.new_empty(0), []
        else:
            self.full.untyped_storage().resize_(0)

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
        overwritten, self._overwritten = self._overwritten, None
        if overwritten is None or not overwritten.any():
            return []
        first = self.rank * (self.spec.padded // self.ranks) if self.sharded else 0
        return self._rows_of(overwritten, self.full, first)

    def nobody_wrote(self) -> None:
        """Ranks have agreed on it, for all that was looked at so far."""
        self._overwritten = None

    @property
    def gathers(self) -> bool:
        """Whether the full form is anything else than storage."""
        return not self._resident

    @staticmethod
    def _allocate(flat: torch.Tensor) -> None:
        flat.untyped_storage().resize_(flat.numel() * flat.element_size())

    @property
    def owned(self) -> torch.Tensor:
        """The part of storage that this rank writes, whether in updates or with somebody else's values."""
        return self.storage

    def sync_storage(self) -> Handle:
        """After a write to what is owned: storage that is whole gets the other ranks' slices."""
        return Handle()

    def changed(self) -> None:
        """The values are others now: a backward through a graph that used the old ones must raise, as it
        does in plain torch. Gathers write the same values again, and count for nothing."""
        torch.autograd.graph.increment_version(self.parameters)
        self.know()

    def drop_gradients(self) -> None:
        """Forget every gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                parameter.grad = None

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
        return False

    def know(self) -> None:
        """What storage holds is what the engine put there."""
        self._know_versions()
        if self.apart:
            self._known = prints(self.storage)

    def _know_versions(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = list(map(_VERSION, self.parameters))

    @property
    def moved(self) -> list[Row]:
        """The rows whose parameters were written in place, by their version counters."""
        with torch._C.DisableTorchFunctionSubclass():
            if not self._versions or list(map(_VERSION, self.parameters)) == self._versions:
                return []
        versions = zip(self.rows, self.parameters, self._versions, strict=True)
        return [row for row, parameter, version in versions if parameter._version != version]

    def written_while_absent(self) -> list[Row]:
        """The rows of which somebody has written an element while they were not there: such a write reaches
        the one that stands for all. They are as before afterwards."""
        alike = are_nowhere(self._absent)
        if alike.all():
            return []
        self._absent.fill_(nowhere(self.full.dtype))
        return [row for row, same in zip(self.rows, alike.tolist(), strict=True) if not same]

    def look(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(Whether others than the engine have written to storage, a checksum of what all ranks hold alike),
        on the device; None where it tells nothing."""
        if not self._resident:
            lost = self._overwritten
            return None if lost is None else (lost.any().long(), lost.new_zeros((), dtype=torch.int64))
        alike = self.axis == "shard" and not self.sharded and self._is_compared
        self._looks += 1
        if not (alike or self._known is not None):
            return None
        now = prints(self.storage)
        written = now.new_zeros(()) if self._known is None else (now != self._known).any().long()
        return written, now.sum() & 0xFFFFFFFF if alike else now.new_zeros(())

    @property
    def _is_compared(self) -> bool:
        """Whether ranks compare what they hold alike this time."""
        return is_due(self._looks)

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


def _borrow(segment: weakref.ref[FlatSegment]) -> Callable[[], bool]:
    """What the parameters of a segment ask while they are not there; they do not keep it alive."""

    def borrow() -> bool:
        held = segment()
        lender = None if held is None or held.lender is None else held.lender()
        return lender is not None and lender()

    return borrow


def _holders(flat: torch.Tensor) -> int:
    """How many tensors share the memory of one; a relative figure. Private in torch (2.13 to 2.15)."""
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


def _uses(parameters: Iterable[torch.Tensor]) -> list[int]:
    """How often tensors are held outside of Python; relative figures. Private in torch (2.13 to 2.15)."""
    return list(map(torch.Tensor._use_count, parameters))  # type: ignore[attr-defined]


_KIND = operator.attrgetter("dtype", "shape", "requires_grad")
_TRAINED = operator.attrgetter("requires_grad")
_VERSION = operator.attrgetter("_version")


def nowhere(dtype: torch.dtype) -> float | int:
    """A value that cannot pass for one: NaN, or the least whole number; of truth values there is none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def are_nowhere(elements: torch.Tensor) -> torch.Tensor:
    """Which of them still are that value."""
    value = nowhere(elements.dtype)
    return elements.isnan() if isinstance(value, float) else elements == value


def stand_ins(segments: Iterable[FlatSegment]) -> list[torch.Tensor]:
    """The elements that parameters are while they are not there, of all segments: one tensor for each dtype,
    so that it takes one look for many."""
    together: dict[torch.dtype, list[FlatSegment]] = {}
    for segment in segments:
        together.setdefault(segment.full.dtype, []).append(segment)
    shared = []
    for dtype, alike in together.items():
        counts = [len(segment.rows) for segment in alike]
        shared.append(alike[0].full.new_full((sum(counts),), nowhere(dtype)))
        for segment, absent in zip(alike, shared[-1].split(counts), strict=True):
            segment.stand_in(absent)
    return shared
