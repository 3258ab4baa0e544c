"""The updater of a plan, and offload: masters and moments in host memory.

`make_updater` chooses the algorithm that steps the shards of this rank, and the memory that it works in.

`OffloadedUpdater` wraps an `Updater` whose shards are in host memory and which runs the CPU's kernels. The
host has an image (a copy) of every shard's storage, which the update writes. Segment by segment, gradients
are copied down and images up: while one segment is updated, the next gradient and the last image are copied.
Gradients share `AHEAD` buffers, and more if the inner updater holds several at once, as torch's classes do.

`SideStreams` has a stream for each direction. Copies start after the work that was queued on the device
before `begin`; work that is queued after `end` starts after the copies.

Invariant: the bits are those of the same updater on a CPU. A gradient is read only after its copy has
arrived, and no memory is written while a copy reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerodrift.optim import flat, torch_optimizer
from zerodrift.optim.elementwise import require_elementwise
from zerodrift.optim.fused import UpdateFunction, update
from zerodrift.optim.updater import Owned, Updater, Written, no_callback, refuse_calls
from zerodrift.plan import Plan

AHEAD = 2
"""Number of gradients that are copied or read at a time, for an updater that reads one after the other."""

HostBuffers = defaultdict[tuple[int, torch.dtype], list[Tensor]]
"""Free buffers by size and dtype, kept from step to step: pinning a page takes longer than copying to it."""


class OffloadedUpdater:
    """An `Updater` in host memory for shards on a device. `build` makes the one in host memory."""

    def __init__(
        self,
        owned: Sequence[Owned],
        build: Callable[[Sequence[Owned]], Updater],
        transfers: SideStreams,
    ) -> None:
        self._transfers = transfers
        self._on_device = {piece.number: piece.storage for piece in owned}
        self._images: dict[int, Tensor] = {}
        self._uploads: dict[int, torch.Event] = {}
        self._free: HostBuffers = defaultdict(list)
        self._inner = build([self._to_host(piece) for piece in owned])
        inner = self._inner  # the same in any memory
        self.groups, self.group_of, self.kind = inner.groups, inner.group_of, inner.kind
        self.counters, self.set_counters = inner.counters, inner.set_counters
        self.leave_alone = inner.leave_alone
        self.moment_names, self.resting = inner.moment_names, inner.resting
        self._upload_all(self._on_device)

    def _to_host(self, piece: Owned) -> Owned:
        image = self._transfers.host(piece.storage.numel(), piece.storage.dtype)
        image.copy_(piece.storage)
        self._images[piece.number] = image
        # Without a separate master the first values are storage itself.
        same = piece.initial.dtype is piece.storage.dtype
        return replace(piece, storage=image, initial=image if same else piece.initial.to("cpu", copy=True))

    @torch.no_grad()
    def update(
        self, gradients: Mapping[int, Tensor], multiplier: float, written: Written = no_callback
    ) -> None:
        self._wait_for_uploads()
        self._transfers.begin()
        downloads = GradientDownloads(gradients, self._free, self._transfers)

        def upload(number: int) -> None:
            downloads.release(number)
            self._upload(number)
            written(number)

        try:
            self._inner.update(downloads, multiplier, upload)
        finally:
            self._transfers.end()

    def _wait_for_uploads(self) -> None:
        """Wait until no copy reads the images, so that they may be written."""
        for copy in self._uploads.values():
            copy.synchronize()
        self._uploads.clear()

    def _upload(self, number: int) -> None:
        self._uploads[number] = self._transfers.up(self._on_device[number], self._images[number])

    def _upload_all(self, numbers: Iterable[int]) -> None:
        """Copy images that were written outside of an update."""
        self._transfers.begin()
        for number in numbers:
            self._upload(number)
        self._transfers.end()

    # --- values in and out ------------------------------------------------------------------------------

    def master(self, number: int) -> Tensor:
        return self._inner.master(number).to(self._on_device[number].device)

    @torch.no_grad()
    def set_master(self, number: int, values: Tensor) -> None:
        self._wait_for_uploads()
        self._inner.set_master(number, values.to("cpu"))
        self._upload_all([number])

    def states(self, number: int) -> dict[str, Tensor]:
        device = self._on_device[number].device
        return {name: moment.to(device) for name, moment in self._inner.states(number).items()}

    def set_state(self, number: int, key: str, values: Tensor) -> None:
        self._inner.set_state(number, key, values.to("cpu"))

    @property
    def statistics(self) -> Mapping[int, Tensor]:
        return {
            number: room.to(self._on_device[number].device) for number, room in self._inner.statistics.items()
        }


class GradientDownloads(Mapping[int, Tensor]):
    """Gradients: each is copied to the host on request, and the next ones ahead of time."""

    def __init__(self, gradients: Mapping[int, Tensor], free: HostBuffers, transfers: SideStreams) -> None:
        self._gradients = gradients
        self._free = free
        self._transfers = transfers
        self._pending = list(gradients)
        self._on_host: dict[int, Tensor] = {}
        """Arrived or on their way."""
        self._copies: dict[int, torch.Event] = {}

    def __getitem__(self, number: int) -> Tensor:
        if number in self._pending:
            self._begin(number)
        while self._pending and len(self._on_host) < AHEAD:
            self._begin(self._pending[0])
        copy = self._copies.pop(number, None)
        if copy is not None:
            copy.synchronize()
        return self._on_host[number]

    def _begin(self, number: int) -> None:
        self._pending.remove(number)
        source = self._gradients[number]
        free = self._free[source.numel(), source.dtype]
        self._on_host[number] = free.pop() if free else self._transfers.host(source.numel(), source.dtype)
        self._copies[number] = self._transfers.down(self._on_host[number], source)

    def release(self, number: int) -> None:
        """Free the buffer of a gradient that has been used, for the next one."""
        buffer = self._on_host.pop(number)
        self._free[buffer.numel(), buffer.dtype].append(buffer)

    def __contains__(self, number: object) -> bool:
        return number in self._gradients

    def __iter__(self) -> Iterator[int]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)


# --- copies -----------------------------------------------------------------------------------------------


class SideStreams:
    """Copies between device and host on two streams of the device, between `begin` and `end` of a step. On a
    CPU, whose streams do nothing, copies are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._streams: Any = torch.get_device_module(device)  # torch.cuda, torch.xpu, torch.cpu
        self._pinned = device.type != "cpu"
        self._device = device
        with self._on_device():
            self._down, self._up = self._streams.Stream(), self._streams.Stream()

    def _on_device(self) -> Any:
        """Return a context in which the device is current, as its streams and events need."""
        return torch.device(self._device) if not self._pinned else self._streams.device(self._device)

    def host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized host memory, pinned for copies of a device."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def begin(self) -> None:
        """Let the following copies wait for all work that is queued on the device."""
        with self._on_device():
            for stream in (self._down, self._up):
                stream.wait_stream(self._streams.current_stream())

    def down(self, host: Tensor, source: Tensor) -> torch.Event:
        """Start to copy from the device to the host. Return an event behind the copy."""
        return self._copy(host, source, self._down)

    def up(self, target: Tensor, host: Tensor) -> torch.Event:
        """Start to copy from the host to the device. Return an event behind the copy."""
        return self._copy(target, host, self._up)

    def _copy(self, target: Tensor, source: Tensor, stream: Any) -> torch.Event:
        with self._on_device(), self._streams.stream(stream):
            target.copy_(source, non_blocking=True)
            event: torch.Event = self._streams.Event()
            event.record(stream)
        return event

    def end(self) -> None:
        """Let the next work of the device wait for every copy."""
        with self._on_device():
            for stream in (self._down, self._up):
                self._streams.current_stream().wait_stream(stream)


# --- the updater of a plan -------------------------------------------------------------------------------


def make_updater(
    plan: Plan,
    owned: Sequence[Owned],
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[int, str],
    transfers: SideStreams | None = None,
    update_slice: UpdateFunction = update,
) -> Updater:
    """Return the updater of the shards that this rank owns.

    `optimizer` is the caller's, over the model's own parameters; `names` has their names by `id`. Without one
    the plan's `optimizer` block is built. `update_slice` is the same on all ranks. If the plan offloads,
    `transfers` copies between device and host: by default streams of a device, and nothing for a CPU.
    """

    def make(owned: Sequence[Owned]) -> Updater:
        if optimizer is None:
            return flat.from_recipe(plan, owned, update_slice)
        group_of = torch_optimizer.group_of(optimizer, names, plan)
        known = flat.algorithm_of(optimizer)
        if known is not None:
            return flat.FlatUpdater(plan, owned, *known, optimizer, group_of, update_slice)
        require_elementwise(optimizer, group_of, plan)
        return torch_optimizer.TorchOptimizerUpdater(plan, owned, optimizer, group_of)

    device = owned[0].storage.device if owned else torch.device("cpu")
    made: Updater
    if not plan.policy.sharding.offload or (transfers is None and device.type == "cpu"):
        made = make(owned)
    else:
        made = OffloadedUpdater(owned, make, transfers or SideStreams(device))
    must, do = "must be called before the engine is made", "Give the optimizer all of its groups there."
    refuse_calls(made.groups, ["add_param_group"], must, do)
    must, do = (
        "must not be called: the engine has the moments",
        "Save and load with `zerodrift.Checkpoints`; ",
    )
    do += "`engine.parameter(name).state` has those of one parameter."
    refuse_calls(made.groups, ["state_dict", "load_state_dict"], must, do)
    return made


def hold_parameters(updater: Updater, model: nn.Module) -> None:
    """Put the model's parameters into the groups of a config's optimizer, where scripts look for them."""
    named = list(model.named_parameters())
    for number, group in enumerate(updater.groups.param_groups):
        group["params"] = [parameter for name, parameter in named if updater.group_of.get(name) == number]
