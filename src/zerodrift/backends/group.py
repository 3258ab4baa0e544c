"""One group of `fully_shard` in a run: its parameters in both forms, its switches, its gradients.

torch gathers, frees and reduces by hooks of its own. What is added here, with public calls only: gradients
are summed in the accumulate dtype (`Parameter.grad_dtype` on the gathered parameters), a parameter that
got no gradient counts as zero on every rank, and what was not reduced by the last backward is reduced in
the step.

Invariant: between a step's first backward and its update, every gradient is in `Member.full.grad` (waiting
to be reduced) or in `Member.sharded.grad` (reduced over the shard axis), and nowhere else.

[Note: zeros] torch leaves out parameters without a gradient, so ranks whose experts got no token would
reduce buffers of other sizes; its own cure makes zeros in the wrong dtype. So zeros are put into
`full.grad` when the group's backward is over: before torch looks, because our hook is on what torch's
identity around the inputs returns, and our callback at the end of a backward was queued before torch's.

[Note: several uses] What several uses of a parameter contribute is added by autograd before it reaches
`grad`: in the dtype that `grad_dtype` names, and where it names none in that of the contributions. Since
2.15 torch takes the name away while a group's backward runs, to save a cast. It is given again by a hook on
the same outputs as torch's own, behind it.

[Note: replicas] Copies of the model are summed by a hook during the backward where all that the step has
summed so far is in the buffer at hand, and otherwise in the step, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerodrift.backends import fsdp_collectives
from zerodrift.backends.dtensors import DTensorLayout
from zerodrift.backends.group_collectives import GroupCollectives
from zerodrift.backends.shard_range import ShardRange, padded_to, whole_of
from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import Mesh
from zerodrift.engine.forward_inputs import ForwardInputs
from zerodrift.engine.nested import tensors_in
from zerodrift.engine.unit import in_backward
from zerodrift.plan.groups import Group
from zerodrift.plan.table import Row


@dataclass(slots=True)
class Member:
    """A parameter of a group."""

    row: Row
    range: ShardRange
    places: tuple[tuple[nn.Module, str], ...]
    """Where it hangs: (module, attribute)."""
    sharded: nn.Parameter
    """A DTensor over the shard axis: storage, what the optimizer updates."""
    full: nn.Parameter
    """In the compute dtype, gathered: what the module computes with. It has memory only while it is used."""
    layout: DTensorLayout | None
    """How it is a DTensor of the user's, of which `row` and `range` are the local part."""

    def storage(self) -> torch.Tensor:
        """`[range.numel]`: this rank's part of storage, as a view."""
        return local(self.sharded.detach()).view(-1)

    def gradient(self) -> torch.Tensor:
        """`[range.numel]`: this rank's part of what was reduced, as a view; zeros where nothing was."""
        if self.sharded.grad is None:
            self.sharded.grad = torch.zeros_like(self.sharded)
        return local(self.sharded.grad).view(-1)

    def waiting(self) -> torch.Tensor:
        """`[row.shape]`: this rank's gradient that was not reduced; zeros where there is none."""
        grad = self.full.grad
        if grad is None:
            grad = torch.zeros_like(self.full, dtype=self.accumulate)
        if self.layout is None:
            return grad
        if not isinstance(grad, DTensor):
            raise AssertionError(f"{self.row.name} has a plain gradient")
        return grad.redistribute(placements=self.layout.placements).to_local()

    @property
    def accumulate(self) -> torch.dtype:
        """What this rank's gradients are summed in; of a trained parameter."""
        update = self.row.columns.update
        if update is None:
            raise AssertionError(f"{self.row.name} is frozen")
        return update.accumulate.dtype.torch

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self.row.shape if self.layout is None else self.layout.shape

    def whole(self, mine: torch.Tensor, comm: Collectives) -> torch.Tensor:
        """The whole parameter, of which `mine` is `[range.numel]` on each rank."""
        here = whole_of(self.range, mine, comm)
        return here if self.layout is None else self.layout.whole(here)

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """`[range.numel]`: this rank's part of a whole tensor that every rank has."""
        return self.range.of(whole if self.layout is None else self.layout.mine(whole))

    def keep_switch(self) -> None:
        """Where the gathered form hangs in the model, its `requires_grad` is what was asked for last: torch
        takes it from sharded to gathered and not back."""
        module, attribute = self.places[0]
        hanging_now = module._parameters.get(attribute)
        if hanging_now is self.full and hanging_now.requires_grad != self.sharded.requires_grad:
            self.sharded.requires_grad_(hanging_now.requires_grad)

    def counts(self, mesh: Mesh) -> bool:
        """Whether this rank's part is in sums over all ranks that have parts: each part is, once."""
        return mesh.rank("tensor") == 0 or (self.layout is not None and self.layout.divided)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, as a view."""
    if not isinstance(tensor, DTensor):
        raise AssertionError(f"a DTensor is expected, not {type(tensor).__name__}")
    return tensor.to_local()


class Backwards(Protocol):
    """What groups tell."""

    def forward_begins(self, group: LiveGroup) -> None:
        """A forward comes to a group outside of any backward."""

    def begin(self) -> None:
        """A gradient has arrived; the first call of a backward arms its end."""


class LiveGroup:
    """A group of the plan with its modules."""

    def __init__(
        self, number: int, spec: Group, modules: list[Any], comm: Collectives, before: float
    ) -> None:
        self.number = number
        self.spec = spec
        self.modules = modules
        """`FSDPModule`s, of which the first stands for the group."""
        self.members: list[Member] = []
        self.collectives = GroupCollectives(comm)
        self._mesh = comm.mesh
        self._before = before
        self.owes = False
        """Whether gradients of this step were summed over shards and not over replicas."""
        self.shared = False
        """Whether they were summed over replicas; never together with `owes`."""
        self.waits = False
        """Whether gradients of this step were not reduced."""
        self._filled = True
        self._syncs = True
        self._shares = False

    @property
    def trained(self) -> list[Member]:
        return [member for member in self.members if member.row.trained]

    def __repr__(self) -> str:
        return f"LiveGroup({', '.join(path or 'root' for path in self.spec.paths)})"

    # --- hooks ------------------------------------------------------------------------------------------

    def watch(self, backwards: Backwards) -> list[Any]:
        """Before `fully_shard`, so that our hooks on outputs come before torch's; returns their handles."""

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not in_backward():
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: backwards.begin())

        return [module.register_forward_hook(after) for module in self.modules]

    def mark(self, backwards: Backwards) -> list[Any]:
        """After `fully_shard`: our hooks are on what torch's identity returns, and behind torch's on outputs.
        Returns the handles."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not in_backward():
                backwards.forward_begins(self)
            if torch.is_grad_enabled():
                ForwardInputs.of(args, kwargs).tell(self.fill, inside=in_backward())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: self.name_dtypes())

        before_each = [module.register_forward_pre_hook(before, with_kwargs=True) for module in self.modules]
        return before_each + [module.register_forward_hook(after) for module in self.modules]

    def all_reduce_hook(self) -> Callable[[torch.Tensor], None] | None:
        """See [Note: replicas]."""
        update = self.spec.kind.update
        if update is None or self._mesh.size("replicate") == 1:
            return None
        return fsdp_collectives.all_reduce_hook(
            self.collectives, update[2], self._before, lambda: self._shares
        )

    # --- one backward -----------------------------------------------------------------------------------

    def open(self, last: bool, keep: bool) -> None:
        """A backward begins. `keep`: what is gathered stays for the next micro-batch."""
        for member in self.members:
            member.keep_switch()
        update = self.spec.kind.update
        self._syncs = update is not None and (last or update[2].when == "every")
        self._shares = self._syncs and (self.shared or (last and not self.owes))
        self._filled = not self._syncs
        module = self.modules[0]
        module.set_requires_gradient_sync(self._syncs, recurse=False)
        module.set_reshard_after_backward(not keep, recurse=False)
        if update is None:
            return
        self.waits = not self._syncs
        if self._syncs:
            self.shared, self.owes = self._shares, not self._shares

    def name_dtypes(self) -> None:
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
        """Reduce what waits for a last micro-batch that did not come."""
        update = self.spec.kind.update
        if not self.waits or update is None:
            return
        self.waits = False
        ranks = self._mesh.size("shard")
        for member in self.trained:
            full = padded_to(member.waiting().reshape(-1), member.range.chunk * ranks).clone()
            out = full
            if ranks > 1:
                out = full.new_empty(member.range.chunk)
                fsdp_collectives.over_shards(self.collectives, out, full, update[2], self._before)
            if self.shared:
                fsdp_collectives.over_replicas(self.collectives, out, update[2], self._before)
            member.gradient().add_(out[: member.range.numel])
            member.full.grad = None
        self.owes = not self.shared

    def sum_over_replicas(self) -> None:
        """What the hook could not."""
        update = self.spec.kind.update
        if not self.owes or update is None or self._mesh.size("replicate") == 1:
            return
        self.owes, self.shared = False, True
        trained = self.trained
        flat = torch.cat([member.gradient() for member in trained])
        # In the accumulate dtype, which storage holds exactly.
        summed = flat.to(update[1].torch)
        fsdp_collectives.over_replicas(self.collectives, summed, update[2], self._before)
        for member, part in zip(trained, summed.split([m.range.numel for m in trained]), strict=True):
            member.gradient().copy_(part)

    def drop(self) -> None:
        """Give up what is gathered, because values are about to change or somebody else shows them."""
        for member in self.members:
            member.keep_switch()
        self.modules[0].reshard()

    def drop_gradients(self) -> None:
        for member in self.members:
            member.sharded.grad = None
            member.full.grad = None
        self.owes = self.shared = self.waits = False
