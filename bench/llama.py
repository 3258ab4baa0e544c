"""A decoder in the shapes of Llama 3 in plain PyTorch, the same for every engine on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Dimensions of one size of the model."""

    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    """Heads of keys and values."""
    vocabulary: int
    micro_batch: int
    """Sequences at once."""
    length: int
    checkpoints: bool
    """Whether activation checkpointing is on."""

    def floating_operations(self, model: Llama) -> float:
        """Return the operations of a forward and a backward per token: 6 for each weight of a product, and
        attention without a mask, as others count it. Recomputation is not counted."""
        products = sum(p.numel() for p in model.parameters()) - model.tokens.weight.numel()
        return 6.0 * products + 12.0 * self.layers * self.width * self.length


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 256, 2, 32, False),
    "0.1B": Shape(768, 2048, 12, 12, 4, 32768, 8, 2048, False),
    "1B": Shape(2048, 8192, 16, 32, 8, 128256, 2, 2048, False),
    "3B": Shape(3072, 8192, 28, 24, 8, 128256, 1, 2048, True),
    "8B": Shape(4096, 14336, 32, 32, 8, 128256, 4, 4096, True),
}


class Llama(nn.Module):
    """A decoder that returns the loss of predicting the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        turns = rotations(tokens.shape[1], self.shape.width // self.shape.heads, x)
        for layer in self.layers:
            x = (
                checkpoint(layer, x, turns, use_reentrant=False)
                if self.shape.checkpoints
                else layer(x, turns)
            )
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        narrow = shape.width // shape.heads * shape.groups
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.q, self.o = linear(shape.width, shape.width), linear(shape.width, shape.width)
        self.k, self.v = linear(shape.width, narrow), linear(shape.width, narrow)
        self.gate, self.up = linear(shape.width, shape.inner), linear(shape.width, shape.inner)
        self.down = linear(shape.inner, shape.width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q = turned(self._heads(self.q(normed)), turns)
        k = turned(self._heads(self.k(normed)), turns)
        mixed = F.scaled_dot_product_attention(
            q, k, self._heads(self.v(normed)), is_causal=True, enable_gqa=True
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.shape.width // self.shape.heads)).transpose(1, 2)


def linear(wide: int, out: int) -> nn.Linear:
    return nn.Linear(wide, out, bias=False)


def rotations(length: int, head: int, like: torch.Tensor) -> torch.Tensor:
    """Return cosines and sines. Shape [2, length, head]."""
    steps = torch.arange(0, head, 2, device=like.device) / head
    angles = torch.outer(torch.arange(length, device=like.device), 500_000.0**-steps).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-high, low], -1) * turns[1]
