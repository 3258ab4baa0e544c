"""One group of `fully_shard` in a run: its parameters in both forms, its switches, its gradients.

torch's hooks gather, free and reduce. With public calls only, this file adds three things. Gradients are
summed in the accumulate dtype (`Parameter.grad_dtype` on the gathered parameters). A parameter without a
gradient counts as zero on every rank. Gradients that the last backward did not reduce are reduced in the
step. A model must use its groups in the same order on every rank; a checksum of that order travels with the
norm, and a difference is an error.

Invariants: between a step's first backward and its update, every gradient is in `Member.full.grad` (waiting
to be reduced) or in `Member.sharded.grad` (reduced over the shard axis), and nowhere else. The switches of
all groups are set before a backward reduces anything.

[Note: zeros] torch leaves out parameters without a gradient, so ranks whose experts got no token would reduce
buffers of other sizes; torch's own remedy makes zeros in the wrong dtype. So zeros are put into `full.grad`
when the group's backward is over. This comes before torch's reduction, because our hook is on the result of
torch's identity around the inputs, and our callback at the end of a backward was queued before torch's.

[Note: several uses] autograd adds the gradients of several uses of a parameter before they reach `grad`, in
`grad_dtype`, or in their own dtype if that is None. Since 2.15 torch sets it to None while a group's backward
runs, to save a cast. A hook behind torch's, on the same outputs, sets it again.

[Note: replicas] A hook sums over replicas during the backward if the buffer at hand has all gradients of the
step so far. Otherwise the step sums over replicas, once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerodrift.backends.adapters import DTensorLayout, GroupCollectives, sum_over_replicas, sum_over_shards
from zerodrift.comm import Collectives, Mesh
from zerodrift.engine import ForwardInputs, TrainingProgress, at_the_end, in_backward, tensors_in
from zerodrift.plan import Group, Row


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The part of a parameter on one rank, as a run of elements of the row-major flattening. `fully_shard`
    cuts the first dimension into equal runs of rows, of which the last ones may be short or empty."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    stop: int
    chunk: int
    """Elements of the longest part, to which others are padded in a collective."""

    @classmethod
    def of_rank(cls, shape: tuple[int, ...], ranks: int, rank: int) -> ShardRange:
        inner = math.prod(shape[1:])
        rows = -(-shape[0] // ranks)
        start, stop = (min(shape[0], rows * number) * inner for number in (rank, rank + 1))
        return cls(shape, start, stop, rows * inner)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor, as a view where the tensor is contiguous. Shape [numel]."""
        return whole.reshape(-1)[self.start : self.stop]

    def gather(self, mine: torch.Tensor, comm: Collectives) -> torch.Tensor:
        """Return the whole parameter, of which each rank of the shard axis has `mine`."""
        ranks = comm.mesh.size("shard")
        if ranks == 1:
            return mine.clone().view(self.shape)
        padded = _padded(mine, self.chunk)
        whole = padded.new_empty(self.chunk * ranks)
        comm.all_gather(whole, padded, "shard")
        return whole[: math.prod(self.shape)].view(self.shape)


def _padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    if flat.numel() == numel:
        return flat.contiguous()
    padded = flat.new_zeros(numel)
    padded[: flat.numel()] = flat
    return padded


Places = tuple[tuple[nn.Module, str], ...]
"""(module, attribute) where a parameter is registered."""


def registered(places: Places) -> Any:
    """Return what is registered in a parameter's first place."""
    module, attribute = places[0]
    return module._parameters.get(attribute)


def register(places: Places, parameter: nn.Parameter) -> None:
    """Put a parameter into all of its places."""
    for module, attribute in places:
        module._parameters[attribute] = parameter


@dataclass(slots=True)
class Member:
    """A parameter of a group."""

    row: Row
    range: ShardRange
    places: Places
    sharded: nn.Parameter
    """Storage, a DTensor over the shard axis, which the optimizer updates."""
    full: nn.Parameter
    """The gathered parameter in the compute dtype. It has memory only while the module uses it."""
    layout: DTensorLayout | None
    """Layout of a user's DTensor, of which `row` and `range` describe the local part."""

    def storage(self) -> torch.Tensor:
        """Return a view of this rank's part of storage. Shape [range.numel]."""
        return _local(self.sharded.detach()).view(-1)

    def gradient(self) -> torch.Tensor:
        """Return a view of this rank's part of the reduced gradient, which is set to zeros if there is none.
        Shape [range.numel]."""
        if self.sharded.grad is None:
            self.sharded.grad = torch.zeros_like(self.sharded)
        return _local(self.sharded.grad).view(-1)

    def unreduced(self) -> torch.Tensor:
        """Return this rank's unreduced gradient, or zeros. Shape [row.shape]."""
        grad = self.full.grad
        if grad is None:
            grad = torch.zeros_like(self.full, dtype=self.accumulate)
        if self.layout is None:
            return grad
        assert isinstance(grad, DTensor)
        return grad.redistribute(placements=self.layout.placements).to_local()

    @property
    def accumulate(self) -> torch.dtype:
        """The dtype in which gradients of a trained parameter are summed."""
        update = self.row.columns.update
        assert update is not None
        return update.accumulate.dtype.torch

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.row.shape if self.layout is None else self.layout.shape

    def whole(self, mine: torch.Tensor, comm: Collectives) -> torch.Tensor:
        """Return the whole parameter, of which each rank has `mine`. Shape of `mine` [range.numel]."""
        here = self.range.gather(mine, comm)
        return here if self.layout is None else self.layout.whole(here)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor that every rank has. Shape [range.numel]."""
        return self.range.of(whole if self.layout is None else self.layout.part_of(whole))

    def keep_requires_grad(self) -> None:
        """Copy `requires_grad` from the gathered form to the sharded one, if the gathered form is registered:
        torch copies it only the other way."""
        current = registered(self.places)
        if current is self.full and current.requires_grad != self.sharded.requires_grad:
            self.sharded.requires_grad_(current.requires_grad)

    def counts(self, mesh: Mesh) -> bool:
        """Return whether this rank's part counts in sums over all ranks: each part counts once."""
        return mesh.rank("tensor") == 0 or (self.layout is not None and self.layout.divided)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


class LiveGroup:
    """A group of the plan with its modules."""

    def __init__(
        self, number: int, spec: Group, modules: list[Any], comm: Collectives, before: float
    ) -> None:
        self.number = number
        self.spec = spec
        self.modules = modules
        """`FSDPModule`s, of which the first controls the group."""
        self.members: list[Member] = []
        self.collectives = GroupCollectives(comm)
        self._mesh = comm.mesh
        self._before = before
        self._needs_replicas = False
        """Whether gradients of this step were summed over shards and not over replicas."""
        self._has_replicas = False
        """Whether gradients of this step were summed over replicas too. Excludes `_needs_replicas`."""
        self._has_unreduced_gradients = self._sums_replicas = False
        self._filled = True

    @property
    def trained(self) -> list[Member]:
        return [member for member in self.members if member.row.trained]

    # --- hooks ------------------------------------------------------------------------------------------

    def attach_before(self, backwards: Backwards) -> list[Any]:
        """Put hooks on outputs before `fully_shard` does, so that they run first; returns handles."""

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not in_backward():
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: backwards.begin())

        return [module.register_forward_hook(after) for module in self.modules]

    def attach_after(self, backwards: Backwards) -> list[Any]:
        """Put hooks after those of `fully_shard`: on the result of torch's identity around the inputs, and on
        outputs. Returns the handles."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not in_backward():
                backwards.forward_begins(self)
            if torch.is_grad_enabled():
                ForwardInputs.of(args, kwargs).when_backward_ends(self.fill, inside=in_backward())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: self.set_gradient_dtypes())

        handles: list[Any] = []
        for module in self.modules:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        return handles

    def after_reduce(self, reduced: torch.Tensor) -> None:
        """Sum over replicas during the backward. See [Note: replicas]."""
        update = self.spec.kind.update
        if self._sums_replicas and update is not None:
            sum_over_replicas(self.collectives, reduced, update[2], self._before)
        if reduced.device.type != "cpu":
            # The buffer belongs to the stream of reduce-scatters. After this hook torch adds it to the
            # gradient on another stream and drops it, when the next reduce-scatter could write into it.
            reduced.record_stream(torch.accelerator.current_stream())

    # --- one backward -----------------------------------------------------------------------------------

    def open(self, last: bool, keep: bool) -> None:
        """Set the switches of a backward. With `keep`, the group stays gathered for the next micro-batch."""
        for member in self.members:
            member.keep_requires_grad()
        update = self.spec.kind.update
        syncs = update is not None and (last or update[2].when == "every")
        self._sums_replicas = syncs and (self._has_replicas or (last and not self._needs_replicas))
        self._filled = not syncs
        module = self.modules[0]
        module.set_requires_gradient_sync(syncs, recurse=False)
        module.set_reshard_after_backward(not keep, recurse=False)
        self._has_unreduced_gradients = update is not None and not syncs
        if syncs:
            self._has_replicas, self._needs_replicas = self._sums_replicas, not self._sums_replicas

    def set_gradient_dtypes(self) -> None:
        """See [Note: several uses]."""
        for member in self.trained:
            member.full.grad_dtype = member.accumulate

    def fill(self) -> None:
        """See [Note: zeros]."""
        if self._filled:
            return
        self._filled = True
        for member in self.trained:
            if member.full.grad is None:
                member.full.grad = torch.zeros_like(member.full, dtype=member.accumulate)

    # --- the step ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """Reduce gradients that wait for a last micro-batch."""
        update = self.spec.kind.update
        if not self._has_unreduced_gradients or update is None:
            return
        self._has_unreduced_gradients = False
        ranks = self._mesh.size("shard")
        for member in self.trained:
            full = _padded(member.unreduced().reshape(-1), member.range.chunk * ranks).clone()
            out = full
            if ranks > 1:
                out = full.new_empty(member.range.chunk)
                sum_over_shards(self.collectives, out, full, update[2], self._before)
            if self._has_replicas:
                sum_over_replicas(self.collectives, out, update[2], self._before)
            member.gradient().add_(out[: member.range.numel])
            member.full.grad = None
        self._needs_replicas = not self._has_replicas

    def sum_over_replicas(self) -> None:
        """Sum over replicas the gradients that the hook could not."""
        update = self.spec.kind.update
        if not self._needs_replicas or update is None or self._mesh.size("replicate") == 1:
            return
        self._needs_replicas, self._has_replicas = False, True
        trained = self.trained
        flat = torch.cat([member.gradient() for member in trained])
        # In the accumulate dtype, which storage holds exactly.
        summed = flat.to(update[1].torch)
        sum_over_replicas(self.collectives, summed, update[2], self._before)
        for member, part in zip(trained, summed.split([m.range.numel for m in trained]), strict=True):
            member.gradient().copy_(part)

    def drop(self) -> None:
        """Free gathered parameters, because values are about to change or another form is shown."""
        for member in self.members:
            member.keep_requires_grad()
        self.modules[0].reshard()

    def drop_gradients(self) -> None:
        for member in self.members:
            member.sharded.grad = None
            member.full.grad = None
        self._needs_replicas = self._has_replicas = self._has_unreduced_gradients = False


class Backwards:
    """The backwards of one engine, and the order in which its forwards used the groups."""

    def __init__(self, groups: Sequence[LiveGroup], keep: bool) -> None:
        """`keep` says that groups stay gathered for all micro-batches of a step."""
        self._groups = groups
        self._keep = keep
        self._running = self._began = False
        self.checksum = 0
        """Checksum of the groups that were used, in their order; the engine clears it in every step."""
        self.progress: TrainingProgress | None = None

    def forward_begins(self, group: LiveGroup) -> None:
        """Count a forward of a group outside of any backward."""
        if self._running and self.progress is not None:
            # autograd drops its callbacks when a backward raises, so the next forward finds out.
            self.progress.failed()
        self._began = True
        # Below 2^40, so that a sum over ranks stays far below 2^63.
        self.checksum = (self.checksum * 1_000_003 + group.number + 1) % (1 << 40)

    def begin(self) -> None:
        """Begin a backward when its first gradient arrives."""
        if self._running:
            return
        self._running = True
        last = self.progress is None or self.progress.is_last()
        for group in self._groups:
            group.open(last, self._keep and not last)
        at_the_end(self._end)

    def _end(self) -> None:
        """End a backward before torch's callback, which reduces groups whose inputs needed no gradient."""
        self._running = False
        for group in self._groups:
            group.fill()
        if self.progress is not None:
            self.progress.ended()

    def flush(self) -> None:
        """Reduce, in order, all gradients that were not reduced."""
        for group in self._groups:
            group.flush()
        for group in self._groups:
            group.sum_over_replicas()

    def abort(self) -> bool:
        """End a forward or a backward that has raised. Return whether torch has state to reset, which it has
        from the first forward on."""
        self._running = False
        return self._began

    def drop(self) -> None:
        self.abort()
        for group in self._groups:
            group.drop_gradients()
