"""Where an `fsdp2` engine keeps what `observe` looks at: in the two forms of each parameter.

A parameter is computed with in its gathered form, whose gradient is what micro-batches are added in until
they are reduced; it rests in its sharded form, whose gradient they are added in where each is reduced.
Every group tells its own collectives, so whose a call was needs no guess.

Invariant: what is seen is a tensor's dtype or a recorded call; the plan only says where sums are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zerodrift.backends.fsdp2 import fully_sharded
from zerodrift.backends.group import LiveGroup, Member
from zerodrift.comm.collectives import Recorded
from zerodrift.engine.engine import Engine
from zerodrift.observer.observed import Observed, name


class Tensors:
    """`ObservedEngine` of an engine of backend fsdp2."""

    def __init__(self, engine: Engine) -> None:
        self._executor = fully_sharded(engine.executor)
        self._members = tuple(self._executor.members.values())
        self._names = {m.full.untyped_storage()._cdata: m.row.name for m in self._members}

    def parameter_of(self, tensor: torch.Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage()._cdata)

    def forwards(self) -> Sequence[torch.nn.Module]:
        return self._executor.forwards

    def trained(self) -> Mapping[int, str]:
        return {id(member.full): member.row.name for member in self._members if _is_trained(member)}

    @contextlib.contextmanager
    def watching(self, seen: Observed) -> Iterator[None]:
        """Sees what autograd adds in, what the update reads where that is a sum of its own, what is sent."""
        with contextlib.ExitStack() as stack:
            for member in self._members:
                if _is_trained(member):
                    stack.callback(
                        member.full.register_post_accumulate_grad_hook(_adding(member, seen)).remove
                    )
            groups = self._executor.units
            logs = [(group, stack.enter_context(group.collectives.record())) for group in groups]
            stack.enter_context(self._watching_update(seen))
            yield
        for group, log in logs:
            _sent(group, log, seen)

    @contextlib.contextmanager
    def _watching_update(self, seen: Observed) -> Iterator[None]:
        updater = self._executor.updater
        if updater is None:
            yield
            return
        step = updater.step

        def watched(multiplier: float) -> None:
            for member in self._members:
                update = member.row.columns.update
                if update is not None and update.reduce.when == "every":
                    seen.see(member.row.name, "accumulate", name(member.gradient().dtype))
            step(multiplier)

        updater.step = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            del updater.step

    def resting(self, seen: Observed) -> None:
        updater = self._executor.updater
        for member in self._members:
            called = member.row.name
            seen.see(called, "storage", name(member.storage().dtype))
            if updater is None or not _is_trained(member):
                continue
            # torch's optimizers update storage itself.
            seen.see(called, "master", "same")
            for moment in updater.moments(called).values():
                seen.see(called, "state", name(moment.dtype))


def _is_trained(member: Member) -> bool:
    return member.row.trained


def _adding(member: Member, seen: Observed) -> Callable[[Any], None]:
    def added(parameter: Any) -> None:
        if parameter.grad is not None:
            seen.see(member.row.name, "accumulate", name(parameter.grad.dtype))

    return added


def _sent(group: LiveGroup, log: list[Recorded], seen: Observed) -> None:
    """What one group sent is what each of its parameters was sent in."""
    for call in log:
        wire = name(call.dtype.torch)
        if call.op == "all_gather":
            # torch packs a group of several dtypes as bytes, which say nothing of any of them.
            rows = [] if call.dtype.torch is torch.uint8 else [member.row for member in group.members]
            for row in rows:
                seen.see(row.name, "gather", wire)
            continue
        total = name((call.sum or call.dtype).torch)
        for member in group.trained:
            seen.see(member.row.name, "reduce", wire if wire == total else f"{wire}>{total}")
