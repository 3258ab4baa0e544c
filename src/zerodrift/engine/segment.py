"""One segment: a flat buffer at rest, its gathered form in the compute dtype, and a view per parameter.

`step/gather.py` decides when a segment is gathered, and the plan in which dtype. `trained_segment.py` adds
gradients. `habits/storage_writes.py` notices writes of user code between steps.

Invariant: parameters are views of `full` whenever that has memory, and never get other memory.

[Note: freeing] The memory of a gathered buffer is freed with `untyped_storage().resize_(0)`, unless tensors
of others share it. Most kernels do not check for missing memory. So a view that a user or a graph holds keeps
the buffer with its values, and the segment takes a new one at the next gather. Autograd holds no views,
because `habits/saved_views.py` packs what it saves. A parameter without memory is one NaN expanded to its
shape, and its class raises an error when its values are used (`habits/absent_parameter.py`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zerodrift.comm import AxisName, Collectives, Handle, Recorded
from zerodrift.engine.habits.absent_parameter import AbsentParameter, absent_class, mark_absent, mark_gathered
from zerodrift.engine.nested import in_backward
from zerodrift.kernels import PackedRun, narrow, prints, resting_zeros
from zerodrift.optim import Updater
from zerodrift.plan import Row, Segment


def is_due(count: int) -> bool:
    """Return True for the first four of `count` times, then once in 32: when a costly check runs."""
    return count < 4 or count % 32 == 0


class SecondaryCopy:
    """This rank's part of a second copy of a segment, sharded over few neighbouring ranks.

    A forward gathers over all ranks of the shard axis, and every rank keeps its part of the gathered values.
    A backward gathers these parts, without traffic between nodes if the neighbours share a node. This is hpZ
    of ZeRO++, and `reshard_after_forward` of `fully_shard` with a number.
    """

    def __init__(self, comm: Collectives, spec: Segment, axis: AxisName, label: str) -> None:
        self._comm = comm
        self._spec = spec
        self._axis = comm.mesh.axis(axis)
        self._label = label
        dtype, numel = spec.columns.regather, spec.padded // self._axis.size
        self._wire = dtype if dtype.format is not None else None
        length = numel if self._wire is None else dtype.nbytes(numel)
        self.part = resting_zeros(length, dtype.torch, comm.mesh.device)
        self.is_current = False
        """Whether `part` has the values of storage. The same on all ranks, because only a gather or a change
        of values on all ranks sets it."""

    @torch.no_grad()
    def keep(self, gathered: torch.Tensor) -> None:
        """Keep this rank's part of gathered values, which may be packed."""
        self.part.copy_(self._axis.slice(gathered, self._axis.rank))
        self.is_current = True

    def start_gather(self, out: torch.Tensor) -> Handle:
        """Begin to gather into `out` what `keep` was given."""
        axis, wire = self._axis.name, self._wire
        note = None if wire is None else Recorded("all_gather", wire, self._spec.padded, axis, None)
        return self._comm.start_all_gather(out, self.part, axis, self._label, note)


class FlatSegment:
    """The tensors of one segment of the plan on this rank, without gradients."""

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
        self.label = f"`{unit or 'the root'}`, segment {number}"
        self.spec = spec
        self.rows = rows
        self.parameters = parameters
        self.comm = comm
        self.axis = spec.axis
        self.ranks = comm.mesh.size(self.axis)
        self.rank = comm.mesh.rank(self.axis)
        self._expert_rank = comm.mesh.rank("expert")
        columns = spec.columns
        self.sharded = columns.storage.axis != "" and self.ranks > 1
        device = comm.mesh.device
        numel = spec.padded // self.ranks if self.sharded else spec.padded
        dtype, is_packed = columns.storage.dtype, columns.storage.dtype.format is not None
        length = dtype.nbytes(numel) if is_packed else numel
        self.storage = resting_zeros(length, dtype.torch, device)
        """Values at rest. Shape [padded] or [padded / ranks], storage dtype; or the bytes of `packed`."""
        self.packed = PackedRun(dtype, self.storage, numel) if is_packed else None
        """Frozen values in a narrow format."""
        self.narrow = columns.gather if columns.gather.format is not None else None
        """The narrow format in which values travel. The model computes with values of this format, even where
        nothing travels."""
        self.gathers = self.sharded or columns.encodes or columns.storage.dtype is not columns.compute
        """Whether the full form is another buffer than storage."""
        if self.gathers:
            full = torch.empty(spec.padded, dtype=columns.compute.torch, device=device)
            full.untyped_storage().resize_(0)
        self.full = full if self.gathers else self.storage
        """The buffer that parameters are views of. Shape [padded], compute dtype."""
        self.is_full = not self.gathers
        self.has_separate_master = False
        """Whether parameters show storage while an optimizer keeps more bits elsewhere."""
        self.secondary: SecondaryCopy | None = None
        """The copy that a backward gathers from, if the plan has one."""
        self._gathering: Handle | None = None
        self._arriving: torch.Tensor | None = None
        """The buffer of a gather in another dtype than compute, or of packed runs."""
        self._is_regathered = False
        """Whether the running gather is from the second copy."""
        self._views: list[torch.Tensor] = []
        self.placeholders: list[torch.Tensor] = []
        """Tensors of one expanded element each, which parameters show while `full` has no memory."""
        self.placeholder_elements = torch.empty(0)
        self._placeholder_addresses: list[int] = []
        self._absent_classes: list[type[AbsentParameter]] = []
        self._own_holders = 0
        """Number of the segment's tensors that share the memory of `full` while no parameter does."""
        self._use_counts: list[int] = []
        self._kinds: list[tuple[Any, ...]] = []
        """(dtype, shape, is trained) of each parameter, as planned."""
        self.starts = [row.offset for row in rows]
        self.holds = 0
        """Contexts that keep the full form gathered."""
        self.is_stale = False
        """Whether the full form has other values than storage."""
        self.storage_prints: torch.Tensor | None = None
        """Prints of storage as the engine wrote it; see `habits/storage_writes.py`."""
        self.held_prints: torch.Tensor | None = None
        """Prints of the full form when a context opened it."""
        self.versions: list[int] = []
        """Version counters of the parameters as the engine left them."""
        self.overwritten: torch.Tensor | None = None
        """Mask on the device: blocks of this rank's slice that user code wrote to while they were
        gathered."""
        self.storage_checks = 0
        self._frees = 0

    # --- the parameters ---------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Turn the parameters into views. Storage has no values yet."""
        if self.gathers:
            self._allocate(self.full)  # a view cannot be made of memory that is not there
        self._views = self._views_of_full()
        self.use_placeholders(self.full.new_full((len(self.rows),), missing_value(self.full.dtype)))
        trained = self.spec.columns.trained
        self._kinds = [(self.full.dtype, row.shape, trained) for row in self.rows]
        self._show(self._views)
        self._expect_gradients()
        self._use_counts = _use_counts(self.parameters)
        if self.gathers:
            self._hide()
            self._own_holders = _holders(self.full)
            self.is_stale = True  # it has no values yet
            self._free()

    def use_placeholders(self, elements: torch.Tensor) -> None:
        """Show one of these elements per parameter while the full form has no memory."""
        self.placeholder_elements = elements
        self.placeholders = [one.expand(row.shape) for one, row in zip(elements, self.rows, strict=True)]
        self._placeholder_addresses = list(map(torch.Tensor.data_ptr, self.placeholders))
        if self._absent_classes and not self.is_full:
            self._hide()

    def _expect_gradients(self) -> None:
        """Prepare trained parameters for gradients."""

    def _views_of_full(self) -> list[torch.Tensor]:
        return [self.view(self.full, row) for row in self.rows]

    def at_rest(self, values: torch.Tensor) -> torch.Tensor:
        """Round values as storage does."""
        return values.to(self.storage.dtype)

    def as_shown(self, values: torch.Tensor) -> torch.Tensor:
        """Round values as a gather does, and return them in the compute dtype. The first value begins a
        block."""
        if self.narrow is not None and self.packed is None:
            return narrow.round_trip(self.narrow, values, self.full.dtype)
        return (values if self.packed is not None else self.at_rest(values)).to(self.full.dtype)

    def _show(self, tensors: list[torch.Tensor]) -> None:
        mark_gathered(self.parameters)
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def _hide(self) -> None:
        for parameter, placeholder in zip(self.parameters, self.placeholders, strict=True):
            parameter.data = placeholder
        self._absent_classes = self._absent_classes or [absent_class(row.name) for row in self.rows]
        mark_absent(self.parameters, self._absent_classes)

    def lend(self, lender: weakref.WeakMethod[Callable[[bool], bool]]) -> None:
        """Let the forward of another unit gather absent parameters; `lender` is `LiveUnit.borrow`."""

        def borrow(keep: bool) -> bool:
            gather = lender()
            return gather is not None and gather(keep)

        for absent in self._absent_classes:
            absent.borrow = staticmethod(borrow)

    @property
    def expected_views(self) -> list[torch.Tensor]:
        """The tensor of which each parameter must be a view now."""
        return self._views if self.is_full else self.placeholders

    @property
    def has_views_in_place(self) -> bool:
        """Whether every parameter is its expected view, and trained or frozen as planned."""
        addresses = list(map(torch.Tensor.data_ptr, self.parameters))
        if self.is_full:
            expected = list(map(torch.Tensor.data_ptr, self._views))
            return addresses == expected and list(map(_KIND, self.parameters)) == self._kinds
        # A placeholder cannot be viewed as anything else.
        trained = {*map(_REQUIRES_GRAD, self.parameters)}
        return addresses == self._placeholder_addresses and trained == {self.spec.columns.trained}

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        count = flat.numel() // self.ranks
        return flat[self.rank * count : (self.rank + 1) * count]

    def start_of(self, flat: torch.Tensor) -> int:
        """Return the element of the segment with which a buffer begins, whole or this rank's slice."""
        return 0 if flat.numel() == self.spec.padded else self.rank * flat.numel()

    def first_of(self, row: Row) -> int:
        """Return the place in the flattened whole parameter at which this rank's row begins."""
        return self._expert_rank * row.numel if row.parts > 1 else 0

    @staticmethod
    def view(flat: torch.Tensor, row: Row) -> torch.Tensor:
        """Return a row's values inside a [padded] buffer, in the row's shape."""
        return flat[row.offset : row.offset + row.numel].view(row.shape)

    # --- gathering --------------------------------------------------------------------------------------

    def start_gather(self) -> bool:
        """Begin to gather, unless the full form is there or on its way. Return whether a collective was
        started."""
        if self.is_full or self._gathering is not None:
            return False
        if not self._views:
            self.full = torch.empty(self.spec.padded, dtype=self.full.dtype, device=self.full.device)
            self._views = self._views_of_full()
        self._allocate(self.full)
        if self.secondary is not None and self.secondary.is_current and in_backward():
            return self._start_regather(self.secondary)
        if self.spec.columns.encodes or self.packed is not None:
            runs = self.ranks if self.sharded else 1
            self._arriving, self._gathering = self.start_packed_gather(self.storage, runs)
            return self.sharded
        if not self.sharded:
            with torch.no_grad():
                self.full.copy_(self.storage)
            self._gathering = Handle()
            return False
        columns = self.spec.columns
        target = self.full
        if columns.gather is not columns.compute:
            target = self._arriving = torch.empty_like(self.full, dtype=columns.gather.torch)
        self._gathering = self.comm.start_all_gather(target, self.storage, self.axis, self.label)
        return True

    def _start_regather(self, secondary: SecondaryCopy) -> bool:
        """Begin to gather from the second copy."""
        target, self._is_regathered = self.full, True
        if self.narrow is not None:
            run = self.narrow.nbytes(self.spec.padded // self.ranks)
            target = self._arriving = self.storage.new_empty(self.ranks * run, dtype=torch.uint8)
        elif secondary.part.dtype is not self.full.dtype:
            target = self._arriving = torch.empty_like(self.full, dtype=secondary.part.dtype)
        self._gathering = secondary.start_gather(target)
        return True

    def start_packed_gather(self, values: torch.Tensor, runs: int) -> tuple[torch.Tensor, Handle]:
        """Encode this rank's values as one packed run, unless they rest packed, and begin to gather the
        `runs` of all ranks. Return (buffer, handle)."""
        assert self.narrow is not None
        own = values if self.packed is not None else narrow.encode_runs(self.narrow, values, 1)
        if runs == 1:
            return own, Handle()
        packed = own.new_empty(runs * own.numel())
        note = Recorded("all_gather", self.narrow, self.spec.padded, self.axis, None)
        return packed, self.comm.start_all_gather(packed, own, self.axis, self.label, note)

    def show_master(self, master: torch.Tensor) -> Handle:
        """Begin to fill whole storage with the masters of all ranks, rounded to the narrow format."""
        runs = self.spec.padded // master.numel()
        packed, handle = self.start_packed_gather(master, runs)

        def finish() -> None:
            handle.wait()
            narrow.decode_runs(self.spec.columns.gather, packed, self.storage, runs)

        return Handle(finish)

    def finish_gather(self, *, is_evaluated: bool = False) -> None:
        """Wait for the gather and show its values. An evaluation keeps no second copy, because no backward
        follows."""
        if self._gathering is None:
            self.start_gather()
        handle, self._gathering = self._gathering, None
        if handle is None:
            return
        handle.wait()
        arrived, self._arriving = self._arriving, None
        if arrived is not None and self.narrow is not None:
            narrow.decode_runs(self.narrow, arrived, self.full, self.ranks if self.sharded else 1)
        elif arrived is not None:
            with torch.no_grad():
                self.full.copy_(arrived)
        self._show(self._views)
        self.is_full = True
        regathered, self._is_regathered = self._is_regathered, False
        if self.secondary is not None and not regathered and not is_evaluated:
            is_narrower = arrived is not None and arrived.dtype is self.secondary.part.dtype
            self.secondary.keep(arrived if arrived is not None and is_narrower else self.full)

    def release(self) -> None:
        """Free the full form, unless a context or a graph holds it. See [Note: freeing]."""
        if self._gathering is not None:
            self.finish_gather()
        if self.is_full and self.gathers and not self.holds and not self._is_saved:
            self._free()

    def drop(self, *, alone: bool = False) -> None:
        """Free the full form because storage is about to change. autograd raises for a graph that has saved
        the old values. A rank that does this `alone` keeps the second copy for the others."""
        if self._gathering is not None:
            self.finish_gather()
        if self.secondary is not None and not alone:
            self.secondary.is_current = False
        if self.is_full and self.gathers and not self.holds:
            self._free()

    @property
    def is_held(self) -> bool:
        """Whether a tensor of others shares the full form's memory."""
        return _holders(self.full) > self._own_holders + len(self.parameters) or self._is_saved

    @property
    def _is_saved(self) -> bool:
        """Whether a graph has saved a parameter itself, whose values it will read later."""
        return _use_counts(self.parameters) != self._use_counts

    def _free(self) -> None:
        if not self.is_stale and is_due(self._frees):
            self._compare_with_storage()
        self._frees += 1
        self._hide()
        self.is_full = self.is_stale = False
        if _holders(self.full) > self._own_holders:
            self.full, self._views = self.full.new_empty(0), []
        else:
            self.full.untyped_storage().resize_(0)

    @torch.no_grad()
    def _compare_with_storage(self) -> None:
        """Record in `overwritten` where user code wrote to the full form, which is about to be freed."""
        columns = self.spec.columns
        own = self.slice_of(self.full) if self.sharded else self.full
        if self.packed is not None:
            kept = self.packed.values(own.dtype)
        elif columns.encodes:
            kept = self.as_shown(self.storage)
        else:
            kept = self.storage.to(columns.gather.torch) if self.sharded else self.storage
        differ = prints(own) != prints(kept.to(own.dtype))
        self.overwritten = differ if self.overwritten is None else self.overwritten | differ

    @staticmethod
    def _allocate(flat: torch.Tensor) -> None:
        flat.untyped_storage().resize_(flat.numel() * flat.element_size())

    def replace_full(self, flat: torch.Tensor) -> None:
        """Make another buffer the full form, and show it."""
        self.full = flat
        self._views = self._views_of_full()
        self._show(self._views)

    # --- values -----------------------------------------------------------------------------------------

    @property
    def owned(self) -> torch.Tensor:
        """The part of storage that this rank updates and loads."""
        return self.storage

    def sync_storage(self, updater: Updater | None) -> Handle:
        """Begin to gather the other ranks' slices into whole storage, after a write to `owned`."""
        return Handle()

    def drop_gradients(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                parameter.grad = None

    def detach(self) -> None:
        """Leave plain parameters behind when the engine ends; a held full form stays with them."""
        self.holds += bool(self.holds)
        for parameter in self.parameters:
            parameter.grad_dtype = parameter.dtype


def _holders(flat: torch.Tensor) -> int:
    """Count the tensors that share a tensor's memory, to compare with an earlier count. Private in torch
    (2.13 to 2.15)."""
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


def _use_counts(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Count how often C++ holds each tensor, to compare with an earlier count. Private in torch (2.13 to
    2.15)."""
    return list(map(torch.Tensor._use_count, parameters))  # type: ignore[attr-defined]


_KIND = operator.attrgetter("dtype", "shape", "requires_grad")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


def missing_value(dtype: torch.dtype) -> float | int:
    """Return the value of a placeholder: NaN, the least integer, or False."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min
