"""One piece of a pipeline as torch's schedules see it, and its forwards and backwards as an engine runs them.

torch's schedule decides what happens when, sends and receives; `Piece` runs what happens: it gathers the
parameters, enters the precision of the plan, says whose micro-batch it is, and tells the engine when a
micro-batch has ended. `Stage` is the one subclass here, of the class that torch's schedules take; it uses
what that documents or names without an underscore (tested with 2.13).

Invariant: a piece's weight gradients are in `param.grad`, each once, when its last action of a micro-batch
has ended; and nothing that torch runs to learn shapes leaves anything behind.

[Note: learning shapes] Before its first step a schedule runs a forward and a backward of every piece to
learn what will travel. That backward forms gradients of inputs alone, but on its way puts weight gradients
into a queue, and the forward may change buffers, such as running means, and draws random numbers where
there is dropout. So the first real forward of a step clears the queues, and puts buffers and generators
back: a run that goes on in another process has the losses of one that was never stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from zerodrift.engine.engine import Engine
from zerodrift.engine.held import Held
from zerodrift.errors import ModelError
from zerodrift.pipeline.cut import Cut, Hidden
from zerodrift.pipeline.deferred import WeightQueue


class Piece(nn.Module):
    """One piece of the model, and what it does with a micro-batch."""

    def __init__(self, number: int, count: int, module: nn.Module, cut: Cut, engine: Engine) -> None:
        super().__init__()
        self.number, self.count = number, count
        self.module = module
        self._cut = cut
        # Not as attributes that are modules: the parameters of this one are the piece's alone.
        self._engine = [engine]
        self.queue: WeightQueue | None = None
        """Of the weight gradients that the schedule puts off; None where autograd keeps them."""
        self.batches: list[Any] = []
        """The micro-batches of the step, as the cut takes them."""
        self.losses: dict[int, torch.Tensor] = {}
        """Of the last piece: micro-batch -> its loss."""
        self.learning = False
        """Whether torch is about to learn shapes: parameters stay full for a backward that nobody tells
        of."""

    @property
    def engine(self) -> Engine:
        return self._engine[0]

    @property
    def held(self) -> Held:
        if self.engine.held is None:
            raise AssertionError("an engine without a pipeline")
        return self.engine.held

    def forward(self, *hidden: torch.Tensor, number: torch.Tensor) -> Hidden:
        """What leaves the piece for micro-batch `number`; of the last piece, the loss."""
        batch = self.batches[int(number)]
        came: Hidden = hidden[0] if len(hidden) == 1 else hidden
        with self.gathered(), self.engine.precision.forward():
            if self.number == 0:
                return self._no_views(self._cut.first(self.module, batch))
            if self.number < self.count - 1:
                return self._no_views(self._cut.middle(self.module, came, batch))
            loss = self._checked(self._cut.last(self.module, came, batch))
            self.losses[int(number)] = loss.detach()
            return loss

    @staticmethod
    def _no_views(leaves: Hidden) -> Hidden:
        """torch detaches what has left in place, which a view refuses."""
        if isinstance(leaves, torch.Tensor):
            return leaves.clone() if leaves._is_view() else leaves
        return tuple(each.clone() if each._is_view() else each for each in leaves)

    def _checked(self, loss: Any) -> torch.Tensor:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ModelError(f"`loss`: must be one number per micro-batch, of the last piece; got {got}.")
        return loss if loss.dim() == 0 else loss.sum()  # a view could not be detached in place, as torch does

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Its parameters are full inside."""
        self.held.gather(self.number)
        try:
            yield
        finally:
            if not self.learning:
                self.held.release(self.number)

    @contextlib.contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """Around a backward of a micro-batch, or the first part of one."""
        ledger = self.engine.gradients.ledger
        if ledger is not None:
            ledger.turn_to(micro_batch)
        if self.queue is not None and self.queue.ended != micro_batch:
            raise AssertionError(f"backward {micro_batch} after {self.queue.ended} others")
        with self.gathered(), self.engine.precision.backward():
            yield

    def arrived(self, late: list[torch.Tensor]) -> None:
        """Autograd's second pass has added weight gradients."""
        ledger = self.engine.gradients.ledger
        if ledger is not None:
            for parameter in dict.fromkeys(late):
                ledger.late(parameter, ledger.now)

    def buffers_now(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    @torch.no_grad()
    def put_buffers(self, saved: dict[str, torch.Tensor]) -> None:
        for name, buffer in self.module.named_buffers():
            buffer.copy_(saved[name])


@dataclass(frozen=True, slots=True)
class Before:
    """What torch's learning of shapes may change: see [Note: learning shapes]."""

    buffers: tuple[dict[str, torch.Tensor], ...] = ()
    """Of each piece."""
    random: tuple[torch.Tensor, ...] = ()
    """States of the generators that a forward draws from."""

    @staticmethod
    def of(pieces: Sequence[Piece], device: torch.device) -> Before:
        drawn = [torch.get_rng_state()]
        if device.type == "cuda":
            drawn.append(torch.cuda.get_rng_state(device))
        return Before(tuple(piece.buffers_now() for piece in pieces), tuple(drawn))

    def put_back(self, pieces: Sequence[Piece], device: torch.device) -> None:
        for piece, saved in zip(pieces, self.buffers, strict=True):
            piece.put_buffers(saved)
        torch.set_rng_state(self.random[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.random[1], device)


class Stage(PipelineStage):
    """A piece between torch's schedule and an engine."""

    def __init__(
        self, piece: Piece, begin: Callable[[], None], record: Callable[[str, int, int], None]
    ) -> None:
        """`begin` is called before the first action of a step, `record` with (kind, piece, micro-batch)
        before each."""
        engine = piece.engine
        queue = piece.queue
        super().__init__(
            piece,
            piece.number,
            piece.count,
            engine.mesh.device,
            group=engine.mesh.group("pipeline"),
            dw_builder=None if queue is None else queue.dw_builder,
        )
        self.piece = piece
        self._begin = begin
        self._record = record

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        self._record("F", self.piece.number, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if not self.has_backward:
            return
        self._record("B" if full_backward else "I", self.piece.number, bwd_chunk_id)
        with self.piece.backward(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.piece.held.ended(self.piece.number)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        self._record("W", self.piece.number, bwd_chunk_id)
        if self.dw_builder is not None:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        else:
            with self.piece.backward(bwd_chunk_id):
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.piece.held.ended(self.piece.number)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        late: list[torch.Tensor] = []
        if backward_type == "weight":
            groups = bwd_kwargs["param_groups"]
            late = [node.variable for group in groups for node in group["params"]]
        made = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self.piece.arrived(late)
        return made

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The engine's step reduces, and takes the average."""
