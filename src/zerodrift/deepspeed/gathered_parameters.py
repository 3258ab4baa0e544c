"""`zero.GatheredParameters`: the full values of some parameters, to read, or for one rank to write.

Parameters may be an engine's or sharded by `zero.Init`. Any other parameter is whole already and left alone,
and so is one that an outer context has gathered. With `modifier_rank`, that rank's values become those of all
ranks at the end, master weights included, at every stage. Without it a change would be lost, and is an error
on every rank.

Invariant: all ranks enter and leave together, and gather in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from zerodrift.deepspeed import collectives as comm
from zerodrift.deepspeed.marks import register_external_parameter
from zerodrift.deepspeed.parameter_shards import ParameterShard, shard_of
from zerodrift.deepspeed.parameters import ZeroParamStatus, engine_parameter
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError


class GatheredParameters:
    """The context: `with zero.GatheredParameters(weight, modifier_rank=0): ...`."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._writer = modifier_rank
        self._sharded: list[tuple[ParameterShard, nn.Parameter]] = []
        self._whole: list[nn.Parameter] = []
        """Parameters that `zero.Init` left whole, on one rank."""
        self._outer: list[nn.Parameter] = []
        """Sharded parameters that an outer context has gathered, and releases."""
        self._engines: dict[int, tuple[Engine, dict[str, nn.Parameter]]] = {}
        self._available: list[nn.Parameter] = []
        """Parameters whose `ds_status` this context sets to AVAILABLE."""
        self._fingerprints: list[tuple[nn.Parameter, int, int]] = []
        """Parameters that may not be written, each with its address and fingerprint."""
        self._stack = contextlib.ExitStack()
        if not enabled:
            return
        given = [params] if params is None or isinstance(params, torch.Tensor) else list(params)
        for parameter in dict.fromkeys(each for each in given if isinstance(each, nn.Parameter)):
            owner, shard = engine_parameter(parameter), shard_of(parameter)
            if owner is not None:
                engine = owner.running()
                self._engines.setdefault(id(engine), (engine, {}))[1][owner.name] = parameter
            elif shard is not None:
                self._sharded.append((shard, parameter))
            elif hasattr(parameter, "ds_status"):
                self._whole.append(parameter)
            if fwd_module is not None:
                register_external_parameter(fwd_module, parameter)
        self._sharded.sort(key=lambda pair: pair[0].number)

    def __enter__(self) -> None:
        writes = self._writer is not None
        self._outer = [parameter for shard, parameter in self._sharded if shard.is_gathered]
        self._sharded = [pair for pair in self._sharded if not pair[0].is_gathered]
        with torch.no_grad():
            for shard, parameter in self._sharded:
                shard.gather(parameter)
            for engine, held in self._engines.values():
                names = [row.name for row in engine.plan.rows if row.name in held]
                self._stack.enter_context(engine.gathered(names, write=writes))
        for parameter in self._gathered():
            if getattr(parameter, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE:
                parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
                self._available.append(parameter)
        if not writes:
            self._fingerprints = [(held, held.data_ptr(), fingerprint(held)) for held in self._gathered()]

    def _gathered(self) -> list[nn.Parameter]:
        sharded = [parameter for _, parameter in self._sharded]
        return self._whole + sharded + [each for _, held in self._engines.values() for each in held.values()]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            # The other ranks may not come here: nothing is sent, and changes are dropped.
            self._release()
            self._stack.__exit__(kind, error, trace)
            return
        changed = self._count_changed()
        if self._writer is not None:
            self._send(self._writer)
        self._release()
        try:
            self._stack.close()
        except ModelError:
            if not changed:
                raise  # else the error below says it in DeepSpeed's words
        if changed:
            raise ModelError(
                "GatheredParameters",
                "must have a `modifier_rank` where parameters are written",
                got=f"changed values of {changed} of them without one, which would be lost",
                do="Pass `modifier_rank=0`.",
            )

    def _count_changed(self) -> int:
        """Return the number of parameters that were written and may not be, on any rank."""
        if self._writer is not None or not self._fingerprints:
            return 0
        # A forward inside the context releases the units that it runs, and changes addresses.
        changes = sum(
            held.data_ptr() == place and fingerprint(held) != before
            for held, place, before in self._fingerprints
        )
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return changes
        count = torch.tensor([changes], device=self._fingerprints[0][0].device)
        comm.all_reduce(count, dist.ReduceOp.MAX)
        return int(count)

    def _send(self, writer: int) -> None:
        """Broadcast the writer's values."""
        with torch.no_grad():
            for shard, parameter in self._sharded:
                values = parameter.data.contiguous().to(shard.flat)
                comm.broadcast(values, writer)
                shard.replace(values)
            held = self._outer
            if writer != 0:  # an engine broadcasts rank 0's values itself
                held = [*held, *(held[name] for _, held in self._engines.values() for name in sorted(held))]
            for parameter in held:
                values = parameter.data.contiguous()
                comm.broadcast(values, writer)
                parameter.data.copy_(values)

    def _release(self) -> None:
        for parameter in self._available:
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
        for shard, parameter in self._sharded:
            shard.release(parameter)


def fingerprint(parameter: torch.Tensor) -> int:
    """Return a number that changes with the bits, by one read without memory."""
    values = parameter.detach()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return int(values.contiguous().view(-1).view(integer).sum(dtype=torch.int64))
