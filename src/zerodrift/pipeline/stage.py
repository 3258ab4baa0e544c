"""Run one piece of a pipeline between torch's schedule and an engine.

torch's schedule decides the order of actions, sends and receives. `Piece` runs them: it gathers the
parameters, enters the precision of the plan, and tells the engine when a micro-batch has ended. `Stage` is
the one subclass here, of the class that torch's schedules take; it uses only documented or public names
(tested with 2.13 to 2.15).

Invariant: after its last action of a micro-batch a piece's weight gradients are in `param.grad`, each once;
and the run by which torch learns shapes leaves nothing behind.

[Note: learning shapes] Before its first step a schedule runs a forward and a backward of every piece to learn
the shapes of messages. That forward may change buffers, such as running means, so the first real forward of a
step restores the buffers.

[Note: random numbers] A forward draws from generators that are seeded for its piece and its micro-batch, and
restored after it. So pieces draw different numbers, the same under every schedule, but not those of a run
without a pipeline. Under `reduce.order: tree` they do draw those: each micro-batch has a seed, with which its
first piece begins, and the state of the generators travels from piece to piece.

[Note: tied by the tree] Without a pipeline, autograd adds the gradients of all uses of a parameter, the last
use first. At the ends of a V the last piece's gradients come first too, then those of the first piece. The
sum is the same only if the first piece has a single gradient, which is not of a copy under autocast. So an
embedding must be looked up exactly once.

[Note: whose error] torch raises an error of its own when a piece raises. A run ends with the error of the
piece, which is kept. Any other error of a schedule means that a message did not arrive.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from zerodrift.comm import Mesh
from zerodrift.engine import ForwardPrecision, generators, one_number
from zerodrift.errors import ModelError, UnsupportedError
from zerodrift.experts import PairAborted
from zerodrift.pipeline.cut import Cut, Hidden
from zerodrift.pipeline.deferred import WeightQueue
from zerodrift.pipeline.products import hooked, is_found
from zerodrift.pipeline.stage_units import StageUnits

Kinds = tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
"""(shape, dtype, whether a gradient returns) of each tensor that leaves a piece."""


class RandomStreams:
    """Random numbers of one rank's forwards. See [Note: random numbers]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators = generators(device)
        self._key = b""
        self._seeds: tuple[int, ...] = ()
        self.drew = False
        """Whether any forward has drawn a number since `begin`."""

    def begin(self, seeds: tuple[int, ...]) -> None:
        self._key = hashlib.sha256(self._generators[0].get_state().numpy().tobytes()).digest()
        self._seeds = seeds
        self.drew = False

    @property
    def travel(self) -> bool:
        """Whether a piece starts with the generators' state at the end of the piece before it."""
        return bool(self._seeds)

    @contextlib.contextmanager
    def of(self, piece: int, micro_batch: int, came: torch.Tensor | None = None) -> Iterator[None]:
        """Seed a forward."""
        before = [generator.get_state() for generator in self._generators]
        if came is None:
            for generator in self._generators:
                generator.manual_seed(self._seed(piece, micro_batch))
        else:
            parts = came.cpu().split([state.numel() for state in before])
            for generator, state in zip(self._generators, parts, strict=True):
                generator.set_state(state.clone())  # a view with an offset crashes torch (2.13)
        begun = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state, first in zip(self._generators, before, begun, strict=True):
                self.drew = self.drew or not torch.equal(generator.get_state(), first)
                generator.set_state(state)

    def _seed(self, piece: int, micro_batch: int) -> int:
        if self._seeds:
            return self._seeds[micro_batch]
        name = self._key + f" {piece} {micro_batch}".encode()
        return int.from_bytes(hashlib.sha256(name).digest()[:8], "little") >> 1

    def state(self) -> torch.Tensor:
        """Return the states of the generators, as bytes on the device."""
        return torch.cat([generator.get_state() for generator in self._generators]).to(self._device)

    def advance(self) -> None:
        torch.rand((), generator=self._generators[0], device="cpu")


@dataclass(frozen=True, slots=True)
class PieceContext:
    """Objects that all pieces of a rank use."""

    scheduled: StageUnits
    precision: ForwardPrecision
    draws: RandomStreams
    mesh: Mesh
    tied: Mapping[str, torch.Tensor]
    """Parameters, by name, whose gradients of the first and the last piece form one sum by the tree."""


class Piece(nn.Module):
    """A piece of the model."""

    def __init__(self, number: int, count: int, module: nn.Module, cut: Cut, shared: PieceContext) -> None:
        super().__init__()
        self.number, self.count = number, count
        self.module = module
        self._cut = cut
        self.shared = shared
        self.queue: WeightQueue | None = None
        """Queue of the weight gradients that the schedule defers; None where autograd keeps them."""
        self.batches: list[Any] = []
        self.losses: dict[int, torch.Tensor] = {}
        self.before: dict[str, torch.Tensor] | None = None
        """Buffers from before torch learns shapes; None when it has."""
        self.failed: BaseException | None = None
        """Exception of a forward or a backward here: see [Note: whose error]."""
        self._agreed: dict[bool, Kinds] = {}
        """Kinds of the outputs that torch has learnt, by whether gradients return."""

    def forward(self, *hidden: torch.Tensor, number: torch.Tensor) -> Hidden:
        """Return the output of the piece for micro-batch `number`; in the last piece, the loss."""
        precision, draws = self.shared.precision, self.shared.draws
        try:
            micro_batch = int(number)
            state = None
            if draws.travel and self.number > 0:
                *rest, last = hidden
                hidden, state = tuple(rest), None if self.learning else last  # empty while torch learns
            with self.gathered(), precision.forward(), draws.of(self.number, micro_batch, state):
                output = self._made(hidden, micro_batch)
                left = output if isinstance(output, tuple) else (output,)
                if torch.is_grad_enabled() and self.number == 0:
                    for name, parameter in self.shared.tied.items():
                        _require_one_lookup(name, parameter, left)
                if torch.is_grad_enabled() and not self.learning:
                    self.shared.scheduled.pack(self.number, left)
                if draws.travel and self.number < self.count - 1:
                    return (*left, draws.state())
                return output
        except PairAborted:
            raise
        except BaseException as error:
            self.failed = error
            raise

    def _made(self, hidden: tuple[torch.Tensor, ...], micro_batch: int) -> Hidden:
        batch = self.batches[micro_batch]
        came: Hidden = hidden[0] if len(hidden) == 1 else hidden
        if self.number == 0:
            return self._leaving(self._cut.first(self.module, batch), hidden, micro_batch)
        if self.number < self.count - 1:
            return self._leaving(self._cut.middle(self.module, came, batch), hidden, micro_batch)
        loss = one_number(self._cut.last(self.module, came, batch))
        self.losses[micro_batch] = loss.detach()
        return loss

    def _leaving(self, output: Any, came: tuple[torch.Tensor, ...], micro_batch: int) -> Hidden:
        """Check an output against the memory that was laid out for it on the next piece's rank."""
        leaves = tuple(output) if isinstance(output, tuple | list) else (output,)
        other = next((tensor for tensor in leaves if not isinstance(tensor, torch.Tensor)), None)
        if not leaves or other is not None:
            got = type(other).__name__ if leaves else "an empty one"
            must = f"must be a tensor or a tuple of tensors, to go from piece {self.number} to the next"
            raise ModelError("hidden", must, got=f"{got} for micro-batch {micro_batch}")
        kinds = tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in leaves)
        agreed = self._agreed.get(torch.is_grad_enabled())
        if self.learning or agreed is None:
            self._agreed[torch.is_grad_enabled()] = kinds
        elif kinds != agreed:
            must = "must have the same shapes and dtypes in every micro-batch: memory for it is laid out once"
            got = f"{_words(kinds)} from piece {self.number} for micro-batch {micro_batch}, and "
            raise ModelError("hidden", must, got=f"{got}{_words(agreed)} before", do="Pad it to one length.")
        # torch detaches outputs in place, which views and tensors of the user do not allow.
        must_clone = [
            tensor._is_view() or tensor.is_leaf or any(tensor is one for one in came) for tensor in leaves
        ]
        sent = tuple(tensor.clone() if must_clone[place] else tensor for place, tensor in enumerate(leaves))
        return sent[0] if len(sent) == 1 else sent

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep its parameters full inside the context."""
        self.shared.scheduled.gather(self.number)
        try:
            yield
        finally:
            if not self.learning:
                self.shared.scheduled.release(self.number)

    @contextlib.contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """Return the context of a micro-batch's backward, or of one of its two parts."""
        scheduled = self.shared.scheduled
        with self.gathered(), self.shared.precision.backward(), scheduled.backward(self.number, micro_batch):
            yield

    @property
    def learning(self) -> bool:
        """Whether torch is learning shapes: parameters stay full, since that backward runs without hooks."""
        return self.before is not None

    @torch.no_grad()
    def end_learning(self) -> None:
        saved, self.before = self.before or {}, None
        for name, buffer in self.module.named_buffers():
            buffer.copy_(saved[name])


def _require_one_lookup(name: str, parameter: torch.Tensor, left: Sequence[torch.Tensor]) -> None:
    """Refuse other uses of a tied parameter; see [Note: tied by the tree]."""
    end = torch.autograd.graph.get_gradient_edge(parameter).node
    found = [node.name() for node in _nodes(left) for after, _ in node.next_functions if after is end]
    if found != ["EmbeddingBackward0"]:
        must = "must be looked up once in the first piece, and used for nothing else there, to be tied to "
        must += "the last under `precision.reduce.order: tree`"
        do = "Untie it, or leave `order` out."
        raise UnsupportedError(name, must, got=", ".join(found) or "no use", do=do)


def _nodes(tensors: Sequence[torch.Tensor]) -> Iterator[torch.autograd.graph.Node]:
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        waiting += new


def _words(kinds: Kinds) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype, _ in kinds)


class Stage(PipelineStage):
    """A piece between torch's schedule and an engine."""

    def __init__(
        self, piece: Piece, begin: Callable[[], None], record: Callable[[str, int, int], None]
    ) -> None:
        """`begin` is called before the first action of a step, `record` with (kind, piece, micro-batch)
        before each action."""
        mesh = piece.shared.mesh
        queue = piece.queue
        super().__init__(
            piece,
            piece.number,
            piece.count,
            mesh.device,
            group=mesh.group("pipeline"),
            dw_builder=None if queue is None else queue.dw_builder,
        )
        self.piece = piece
        self._begin = begin
        self._record = record
        self._at_once: set[int] = set()
        """Micro-batches whose weight gradients came with those of the input."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        self._record("F", self.piece.number, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        self._record("B" if full_backward else "I", self.piece.number, bwd_chunk_id)
        whole = full_backward or self._leaves_weights(bwd_chunk_id)
        with self._raising(), self.piece.backward(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)
        if full_backward:
            self.piece.shared.scheduled.ended(self.piece.number, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        self._record("W", self.piece.number, bwd_chunk_id)
        if bwd_chunk_id in self._at_once:
            self._at_once.discard(bwd_chunk_id)
        elif self.dw_builder is not None:
            with self._raising():
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        else:
            with self._raising(), self.piece.backward(bwd_chunk_id):
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.piece.shared.scheduled.ended(self.piece.number, bwd_chunk_id)

    def _leaves_weights(self, micro_batch: int) -> bool:
        """Return whether weight gradients must come with those of the input. torch's second pass runs a
        parameter's hooks not at all or once per group, and skips a parameter whose node it does not find."""
        if self.dw_builder is not None or self.is_first:
            return False
        leaves = any(
            parameter.requires_grad and (hooked(parameter) or not is_found(parameter))
            for parameter in self.piece.module.parameters()
        )
        if leaves:
            self._at_once.add(micro_batch)
        return leaves

    @contextlib.contextmanager
    def _raising(self) -> Iterator[None]:
        """Keep what is raised; see [Note: whose error]."""
        try:
            yield
        except PairAborted:
            raise
        except BaseException as error:
            told_by_torch = isinstance(error, RuntimeError) and "Failed to run stage backward" in str(error)
            self.piece.failed = (error.__cause__ if told_by_torch else None) or error
            raise

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the engine's step reduces and averages."""
