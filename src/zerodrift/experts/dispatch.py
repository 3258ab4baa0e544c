"""Run a layer of experts on several ranks: send tokens to the ranks of their experts, and results back.

A module with a stack of experts, which is called with tokens, each token's experts and their weights, keeps
its own forward. Each token goes to the ranks of its experts, the module runs the tokens that arrive on this
rank's experts, and the results are added up with their weights on the token's rank.

Invariant: all ranks exchange equally often and in the same order, forward and backward, whatever the data.
Every sum is in the order of experts, whatever their ranks.

[Note: no token] If no token comes to a rank, its module runs one row of zeros, which is dropped. So the
result has the module's dtype and graph on every rank, and the exchange of gradients takes place.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zerodrift.comm import Collectives
from zerodrift.errors import ModelError
from zerodrift.experts.turns import Turns
from zerodrift.plan import Plan

_Travel = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]

COUNT = "num_experts"
"""The attribute in which a module may count its experts; it becomes the number of this rank's experts."""


def distribute_experts(plan: Plan, model: nn.Module, comm: Collectives, turns: Turns) -> list[Exchange]:
    """Run every module that the plan divides over ranks through an exchange; returns the handles."""
    counts: dict[str, int] = {}
    for row in plan.rows:
        if row.parts > 1:
            counts.setdefault(row.name.rpartition(".")[0], row.whole_shape[0])
    return [Exchange(path, model.get_submodule(path), count, comm, turns) for path, count in counts.items()]


class Exchange:
    """Replaces a module's forward until `remove`."""

    def __init__(self, path: str, module: nn.Module, experts: int, comm: Collectives, turns: Turns) -> None:
        self._path, self._module, self._experts = path, module, experts
        self._comm, self._turns = comm, turns
        self._forward = module.forward
        self._ranks = comm.mesh.size("expert")
        self.own = experts // self._ranks
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.shape[:1] == (experts,):
                must = f"must be a parameter to be spread over ranks with {experts} experts"
                do = f"Make it one, or leave `{path}` out of `experts.parameters`."
                raise ModelError(f"{path}.{name}", must, got=f"a buffer {list(buffer.shape)}", do=do)
        names = list(inspect.signature(self._forward).parameters.values())
        if len(names) < 3 or any(each.kind is not each.POSITIONAL_OR_KEYWORD for each in names[:3]):
            must = "must have a forward of tokens `[tokens, width]`, their experts `[tokens, k]` and "
            must += f"the weights of these `[tokens, k]`, to run its experts on {self._ranks} ranks"
            do = "Write it so, or leave it out of `experts.parameters`."
            raise ModelError(path, must, got=inspect.signature(self._forward), do=do)
        self._names = [parameter.name for parameter in names[:3]]
        self._counted = getattr(module, COUNT, None) == experts
        if self._counted:
            setattr(module, COUNT, self.own)
        object.__setattr__(module, "forward", self)

    def remove(self) -> None:
        if isinstance(self._module.__dict__.get("forward"), Exchange):
            object.__delattr__(self._module, "forward")
            if self._counted:
                setattr(self._module, COUNT, self._experts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        # A copy of the module has the same experts and talks to the same ranks.
        copied = copy.copy(self)
        copied._forward = copy.deepcopy(self._forward, memo)
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = dict(zip(self._names, args, strict=False))
        given |= {name: kwargs.pop(name) for name in self._names if name in kwargs}
        if len(given) < len(self._names):
            must, got = f"must be called with {', '.join(self._names)}", ", ".join(given) or "none of them"
            raise ModelError(self._path, must, got=got, do=_CALL)
        hidden, index, weights = (given[name] for name in self._names)
        if index.shape != weights.shape or index.shape[:-1].numel() != hidden.shape[:-1].numel():
            must = "must be called with experts and weights of one shape, `[tokens, k]`"
            got = f"{list(index.shape)} and {list(weights.shape)} for tokens {list(hidden.shape)}"
            raise ModelError(self._path, must, got=got, do=_CALL)
        run = functools.partial(self._run, args[3:], kwargs)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        k = index.shape[-1]
        output = self._exchange(tokens, index.reshape(-1, k), weights.reshape(-1, k), run)
        return output.view(hidden.shape)

    def _exchange(
        self,
        tokens: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        going = TokenRouting(index, self._experts)
        counts = going.counts.view(self._ranks, self.own)
        ones = [1] * self._ranks
        coming, under_way = self._comm.start_all_to_all(counts, ones, ones, "expert")
        under_way.wait()
        send, receive = torch.stack([counts.sum(1), coming.sum(1)]).tolist()
        arrived = _AllToAll.apply(self._travel, going.rows_of(tokens), send, receive)
        kinds = torch.arange(self.own, device=index.device).repeat(self._ranks)
        done = run(arrived, kinds.repeat_interleave(coming.view(-1)).to(index.dtype))
        back = _AllToAll.apply(self._travel, done, receive, send)
        return going.combine(back, weights).to(tokens.dtype)

    def _travel(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Exchange rows; of two computations in turns, the other goes on meanwhile. The exchange of counts
        takes no turn: it is small, and a forward then has as many turns as a backward."""
        with torch.profiler.record_function(f"exchange of {self._path}"):
            arrived, under_way = self._comm.start_all_to_all(rows, send, receive, "expert")
            self._turns.hand_over()
            under_way.wait()
        return arrived

    def _run(
        self, rest: tuple[Any, ...], named: dict[str, Any], arrived: torch.Tensor, kinds: torch.Tensor
    ) -> torch.Tensor:
        """Run the module's own forward on the arrived rows, each a token with one expert and weight 1."""
        rows = arrived.shape[0]
        if rows == 0:  # see [Note: no token]
            arrived, kinds = torch.cat([arrived, arrived.new_zeros(1, arrived.shape[1])]), kinds.new_zeros(1)
        ones = torch.ones_like(arrived[:, :1])
        done = self._forward(arrived, kinds.unsqueeze(1), ones, *rest, **named)
        if not isinstance(done, torch.Tensor) or done.shape != arrived.shape:
            got = list(done.shape) if isinstance(done, torch.Tensor) else type(done).__name__
            must = f"must return one tensor in the shape of its tokens, {list(arrived.shape)}"
            raise ModelError(self._path, must, got=got, do="Its experts cannot run on several ranks.")
        return done[:rows]


class TokenRouting:
    """The (token, expert) pairs of one rank's tokens, in the order of experts."""

    def __init__(self, index: torch.Tensor, experts: int) -> None:
        """`index` has the experts of each token; numbers from `experts` on are none. Shape [tokens, k]."""
        self._tokens, self._k = index.shape
        flat = index.reshape(-1)
        self.counts = torch.bincount(flat, minlength=experts)[:experts]
        """The number of pairs of each expert. Shape [experts]."""
        self._pair = flat.argsort(stable=True)[: int(self.counts.sum())]
        self._token = self._pair // self._k
        """The token of each pair; the pairs of one expert are in the order of tokens. Shape [pairs]."""
        # The place of each pair's expert among its token's experts, in the order of experts.
        place = index.argsort(dim=1, stable=True).argsort(dim=1).reshape(-1)
        self._slot = self._token * self._k + place[self._pair]

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the token of each pair. Shape [pairs, width]."""
        rows: torch.Tensor = _Copies.apply(tokens, self._token, self._slot, self._k)
        return rows

    def combine(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Add up each token's rows, as they were sent, with their weights, in the order of experts.

        Shape [tokens, width].
        """
        wide = torch.promote_types(torch.promote_types(rows.dtype, weights.dtype), torch.float32)
        weighted = rows.to(wide) * weights.reshape(-1)[self._pair].to(wide).unsqueeze(1)
        return _sum_slots(weighted, self._slot, self._tokens, self._k, wide)


def _sum_slots(
    rows: torch.Tensor, slot: torch.Tensor, tokens: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    """Add up the k slots of each token, in their order and in `dtype`. `slot` has the place of each row."""
    width = rows.shape[1]
    slots = rows.new_zeros(tokens * k, width).index_copy_(0, slot, rows).view(tokens, k, width)
    return functools.reduce(torch.add, [part.to(dtype) for part in slots.unbind(1)])


class _Copies(torch.autograd.Function):
    """A row of each token for each of its experts. In the backward, the gradients of a token's rows are added
    in fp32, in the order of experts, and rounded once."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, token: torch.Tensor, slot: torch.Tensor, k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(slot)
        ctx.tokens, ctx.k = tokens.shape[0], k
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (slot,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        return _sum_slots(grad, slot, ctx.tokens, ctx.k, wide).to(grad.dtype), None, None, None


class _AllToAll(torch.autograd.Function):
    """Rows sent to other ranks of the expert axis; their gradients travel the same way back."""

    @staticmethod
    def forward(
        ctx: Any, travel: _Travel, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        ctx.travel, ctx.send, ctx.receive = travel, send, receive
        return travel(rows.contiguous(), send, receive)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, _AllToAll.apply(ctx.travel, grad, ctx.receive, ctx.send), None, None


_CALL = "Call it so, or leave it out of `experts.parameters`."
