"""Tokens to the ranks that have their experts, and back: a layer of experts run on several ranks.

A module that holds a stack of experts, and is called with tokens, the experts that each token goes to, and
their weights, keeps its own forward. Around it each token goes to the ranks of its experts, the module runs
what arrives on its own experts, and results are added up with the weights where the token came from.

Invariant: all ranks exchange as often and in the same order, forward and backward, whatever the data does;
and the order of every sum is the order of experts, on whatever rank they are.

[Note: no token] Where no token comes to a rank, its module runs one row of zeros, which is dropped. So the
result has the module's dtype and its graph on every rank, and the exchange of gradients takes place.
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
"""Attribute in which a module may count its experts; becomes the count of this rank's own."""


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
                raise ModelError(
                    f"{path}.{name}",
                    f"must be a parameter to be spread over ranks with {experts} experts",
                    got=f"a buffer {list(buffer.shape)}",
                    do=f"Make it one, or leave `{path}` out of `experts.parameters`.",
                )
        names = list(inspect.signature(self._forward).parameters.values())
        if len(names) < 3 or any(
            parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in names[:3]
        ):
            raise ModelError(
                path,
                "must have a forward of tokens `[tokens, width]`, their experts `[tokens, k]` and "
                f"the weights of these `[tokens, k]`, to run its experts on {self._ranks} ranks",
                got=inspect.signature(self._forward),
                do="Write it so, or leave it out of `experts.parameters`.",
            )
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
            raise ModelError(
                self._path,
                f"must be called with {', '.join(self._names)}",
                got=", ".join(given) or "none of them",
                do=_CALL,
            )
        hidden, index, weights = (given[name] for name in self._names)
        if index.shape != weights.shape or index.shape[:-1].numel() != hidden.shape[:-1].numel():
            raise ModelError(
                self._path,
                "must be called with experts and weights of one shape, `[tokens, k]`",
                got=f"{list(index.shape)} and {list(weights.shape)} for tokens {list(hidden.shape)}",
                do=_CALL,
            )
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
        """Exchange rows. Of two computations in turns the other goes on meanwhile. Counts are exchanged
        without a turn: they are small, and so each has as many turns in a forward as in a backward."""
        with torch.profiler.record_function(f"exchange of {self._path}"):
            arrived, under_way = self._comm.start_all_to_all(rows, send, receive, "expert")
            self._turns.hand_over()
            under_way.wait()
        return arrived

    def _run(
        self, rest: tuple[Any, ...], named: dict[str, Any], arrived: torch.Tensor, kinds: torch.Tensor
    ) -> torch.Tensor:
        """The module's own forward on what has arrived: each row a token with one expert, and weight 1."""
        rows = arrived.shape[0]
        if rows == 0:  # see [Note: no token]
            arrived, kinds = torch.cat([arrived, arrived.new_zeros(1, arrived.shape[1])]), kinds.new_zeros(1)
        ones = torch.ones_like(arrived[:, :1])
        done = self._forward(arrived, kinds.unsqueeze(1), ones, *rest, **named)
        if not isinstance(done, torch.Tensor) or done.shape != arrived.shape:
            got = list(done.shape) if isinstance(done, torch.Tensor) else type(done).__name__
            raise ModelError(
                self._path,
                f"must return one tensor in the shape of its tokens, {list(arrived.shape)}",
                got=got,
                do="Its experts cannot run on several ranks.",
            )
        return done[:rows]


class TokenRouting:
    """The way of one rank's tokens: its (token, expert) pairs in the order of experts."""

    def __init__(self, index: torch.Tensor, experts: int) -> None:
        """`index` `[tokens, k]`; an expert that is not below `experts` is none."""
        self._k = index.shape[1]
        self._tokens = index.shape[0]
        flat = index.reshape(-1)
        found = torch.bincount(flat, minlength=experts)[:experts]
        self.counts = found
        """`[experts]`: pairs of each."""
        order = flat.argsort(stable=True)
        self._pair = order[: int(found.sum())]
        self._token = self._pair // self._k
        """`[pairs]`: the token of each, in the order of experts, and of tokens for one expert."""
        # Which of its token's experts a pair's is, counted in the order of experts.
        place = index.argsort(dim=1, stable=True).argsort(dim=1).reshape(-1)
        self._slot = self._token * self._k + place[self._pair]

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[pairs, width]`: the token of each pair."""
        rows: torch.Tensor = _Copies.apply(tokens, self._token, self._slot, self._k)
        return rows

    def combine(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[tokens, width]`: each token's rows, as they were sent, added up with their weights, the expert of
        the lowest number first."""
        wide = torch.promote_types(torch.promote_types(rows.dtype, weights.dtype), torch.float32)
        weighted = rows.to(wide) * weights.reshape(-1)[self._pair].to(wide).unsqueeze(1)
        slots = weighted.new_zeros(self._tokens * self._k, rows.shape[1]).index_copy(0, self._slot, weighted)
        return functools.reduce(torch.add, slots.view(self._tokens, self._k, -1).unbind(1))


class _Copies(torch.autograd.Function):
    """A row of each token for each of its experts; the gradients of a token's rows are added up in fp32 and
    rounded once, in the order of experts."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, token: torch.Tensor, slot: torch.Tensor, k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(slot)
        ctx.shape = (tokens.shape[0], k, tokens.shape[1])
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (slot,) = ctx.saved_tensors
        count, k, width = ctx.shape
        slots = grad.new_zeros(count * k, width).index_copy_(0, slot, grad).view(count, k, width)
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = functools.reduce(torch.add, [part.to(wide) for part in slots.unbind(1)])
        return total.to(grad.dtype), None, None, None


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks of the expert axis; their gradients come back the same way."""

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
