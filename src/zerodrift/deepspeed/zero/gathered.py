"""`zero.GatheredParameters`: the full values of some parameters, to read, or for one rank to write.

Parameters may be an engine's, or in pieces from `zero.Init`; one that is neither is whole already and left
alone, as is one that a context around this one has put together. Inside, `ds_status` says that it is there.
With `modifier_rank`, that rank's values become everybody's at the end, masters included, at every stage.
Without it nothing may be written: a change that would be lost is an error on every rank.

Invariant: every rank enters and leaves together, and gathers in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from zerodrift.deepspeed import comm
from zerodrift.deepspeed.parameters import ZeroParamStatus, engine_parameter
from zerodrift.deepspeed.zero.external import register_external_parameter
from zerodrift.deepspeed.zero.slices import ParameterSlice, hide, show, slice_of
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError


class GatheredParameters:
    """The context; `with zero.GatheredParameters(weight, modifier_rank=0): ...`."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._writer = modifier_rank
        self._pieces: list[tuple[ParameterSlice, nn.Parameter]] = []
        self._whole: list[nn.Parameter] = []
        """What `zero.Init` left whole, on one rank."""
        self._outer: list[nn.Parameter] = []
        """Pieces that a context around this one has put together, and takes apart."""
        self._shown: list[nn.Parameter] = []
        """Whose `ds_status` says that it is there because of this one."""
        self._engines: dict[int, tuple[Engine, dict[str, nn.Parameter]]] = {}
        self._stack = contextlib.ExitStack()
        self._marks: list[tuple[nn.Parameter, int, int]] = []
        """Parameters that nobody may write, where each lies, and its fingerprint."""
        if not enabled:
            return
        given = [params] if params is None or isinstance(params, torch.Tensor) else list(params)
        for parameter in dict.fromkeys(each for each in given if isinstance(each, nn.Parameter)):
            owner, piece = engine_parameter(parameter), slice_of(parameter)
            if owner is not None:
                engine = owner.running()
                self._engines.setdefault(id(engine), (engine, {}))[1][owner.name] = parameter
            elif piece is not None:
                self._pieces.append((piece, parameter))
            elif hasattr(parameter, "ds_status"):
                self._whole.append(parameter)
            if fwd_module is not None:
                register_external_parameter(fwd_module, parameter)
        self._pieces.sort(key=lambda pair: pair[0].number)

    def __enter__(self) -> None:
        writes = self._writer is not None
        self._outer = [parameter for piece, parameter in self._pieces if piece.is_together]
        self._pieces = [pair for pair in self._pieces if not pair[0].is_together]
        with torch.no_grad():
            for piece, parameter in self._pieces:
                show(parameter, piece)
            for engine, held in self._engines.values():
                names = [row.name for row in engine.plan.rows if row.name in held]
                self._stack.enter_context(engine.gathered(names, write=writes))
        for there in self._held():
            if getattr(there, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE:
                there.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
                self._shown.append(there)
        if not writes:
            self._marks = [(held, held.data_ptr(), fingerprint(held)) for held in self._held()]

    def _held(self) -> list[nn.Parameter]:
        pieces = [parameter for _, parameter in self._pieces]
        return self._whole + pieces + [each for _, held in self._engines.values() for each in held.values()]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            # Nobody can be asked any more: nothing is sent, and what was changed is dropped.
            self._hide()
            self._stack.__exit__(kind, error, trace)
            return
        changed = self._changed()
        if self._writer is not None:
            self._send(self._writer)
        self._hide()
        try:
            self._stack.close()
        except ModelError:
            if not changed:
                raise  # else it is said in DeepSpeed's words
        if changed:
            raise ModelError(
                "GatheredParameters",
                "must have a `modifier_rank` where parameters are written",
                got=f"changed values of {changed} of them without one, which would be lost",
                do="Pass `modifier_rank=0`.",
            )

    def _changed(self) -> int:
        """How many parameters were written that nobody may write, on any rank."""
        if self._writer is not None or not self._marks:
            return 0
        # A forward inside the context has released the units that it went through.
        changes = sum(
            held.data_ptr() == place and fingerprint(held) != mark for held, place, mark in self._marks
        )
        if not comm.is_initialized() or comm.get_world_size() == 1:
            return changes
        count = torch.tensor([changes], device=self._marks[0][0].device)
        comm.all_reduce(count, comm.ReduceOp.MAX)
        return int(count)

    def _send(self, writer: int) -> None:
        """The writer's values to everybody."""
        with torch.no_grad():
            for piece, parameter in self._pieces:
                values = parameter.data.contiguous().to(piece.flat)
                comm.broadcast(values, writer)
                piece.replace(values)
            for parameter in self._outer:
                values = parameter.data.contiguous()
                comm.broadcast(values, writer)
                parameter.data.copy_(values)
            if writer == 0:
                return  # the engine sends rank 0's by itself
            for _, held in self._engines.values():
                for name in sorted(held):
                    values = held[name].data.contiguous()
                    comm.broadcast(values, writer)
                    held[name].data.copy_(values)

    def _hide(self) -> None:
        for held in self._shown:
            held.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
        for piece, parameter in self._pieces:
            hide(parameter, piece)


def fingerprint(parameter: torch.Tensor) -> int:
    """A number that changes with the bits: one read, no memory."""
    values = parameter.detach()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return int(values.contiguous().view(-1).view(integer).sum(dtype=torch.int64))
