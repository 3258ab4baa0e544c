"""Small networks for tests that need tensors: a dense GPT, a mixture of experts, and their data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH = 61, 32, 12


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)) / x.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return self.out(scores.masked_fill(~mask, -1e4).softmax(-1) @ v)


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Router(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width).normal_(std=0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Experts(nn.Module):
    """Top-1 experts; one without tokens is not called, and has no gradient."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = Router(width, experts)
        self.experts = nn.ModuleList(Dense(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            picked = (choice == number).nonzero()[:, 0]
            if len(picked):
                scaled = expert(flat[picked]) * weights[picked, None].to(flat.dtype)
                out = out.index_add(0, picked, scaled)
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, moe: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp: nn.Module = Experts(width) if moe else Dense(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder that returns the loss of predicting the next token.

    `recompute` runs each block under activation checkpointing, reentrant or not. Dropout is behind the
    embedding, inside and behind of what is recomputed.
    """

    def __init__(
        self,
        layers: int = 2,
        moe: bool = False,
        tied: bool = True,
        width: int = WIDTH,
        seed: int = 0,
        dropout: float = 0.0,
        recompute: bool | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.recompute = dropout, recompute
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, moe) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.3333333))

    def blocks(self) -> Iterable[nn.Module]:
        """Return the blocks in the order in which they run."""
        return self.layers

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self._dropped(self.embed(tokens))
        for block in self.blocks():
            again, inside = self.recompute, partial(self._block, block)
            x = inside(x) if again is None else checkpoint(inside, x, use_reentrant=again)
        return self.head(self.norm(self._dropped(x)))

    def _block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self._dropped(block(x))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.logits(tokens)[:, :-1]
        return F.cross_entropy(logits.float().reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def batch(step: int, rank: int = 0, micro: int = 0, samples: int = 2) -> torch.Tensor:
    """Return tokens that depend on the step, the rank and the micro-batch."""
    generator = torch.Generator().manual_seed(7919 * step + 104729 * rank + 15485863 * micro + 1)
    return torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
