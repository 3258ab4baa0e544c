"""A user's mixture of experts: stacked, with the forward that an exchange of tokens requires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.numerics.runs import config
from zerodrift.engine.engine import Engine

WIDTH, INNER, EXPERTS, TOKENS = 24, 40, 4, 18


class Stack(nn.Module):
    """Stacked experts; one without tokens is not run. Shapes [experts, ...]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / INNER**0.5)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self.up.shape[0]):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                inner = F.silu(F.linear(tokens[row], self.up[number], self.bias[number]))
                made = F.linear(inner, self.down[number]) * weights[row, place, None]
                out = out.index_add(0, row, made.to(out.dtype))
        return out


class Layer(nn.Module):
    """A router with experts. `skew` is added to the router's logits; `dropped` tokens go to no expert."""

    def __init__(self, skew: Sequence[float], dropped: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Stack()
        self.register_buffer("skew", torch.tensor(skew), persistent=False)
        self.dropped = dropped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x)
        logits = self.router(tokens) + self.skew.to(x.dtype)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        keep = torch.arange(len(x)) >= self.dropped
        chosen = chosen.where(keep[:, None], EXPERTS)
        return x + self.experts(tokens, chosen, weights)


class Network(nn.Module):
    """A network that returns a loss."""

    def __init__(
        self, skew: Sequence[float] = (0.0,) * EXPERTS, dropped: int = 0, recompute: bool | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(skew, dropped) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            again = self.recompute
            x = layer(x) if again is None else checkpoint(layer, x, use_reentrant=again)
        return (self.last(x) ** 2).mean()


def batch(step: int, rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(TOKENS + 2 * rank, WIDTH, generator=generator)


def config_of(
    experts: int, stage: int, mode: str = "fp32", micro_batches: int = 1, **rest: Any
) -> dict[str, Any]:
    """Return a config with experts on so many ranks; 1 is no expert parallelism."""
    spread = {"experts": {"ranks": experts}} if experts > 1 else {}
    return {**config(stage, mode, micro_batches, **rest), **spread}


def accumulate(engine: Engine, micro_batches: int) -> list[float]:
    """Run the micro-batches of a step and return their losses."""
    losses = []
    for micro in range(micro_batches):
        loss = engine(batch(0, engine.mesh.rank("data"), micro))
        engine.backward(loss)
        losses.append(loss.item())
    return losses


def reference(ranks: int, micro_batches: int, **network: Any) -> dict[str, torch.Tensor]:
    """Return the averaged gradient in one process, in fp64."""
    model = Network(**network).double()
    for rank in range(ranks):
        for micro in range(micro_batches):
            (model(batch(0, rank, micro).double()) / (ranks * micro_batches)).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error by norm; for a gradient of zero, the absolute one."""
    size = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / (size or 1.0)
