"""Networks in plain torch for planted faults: every operation that a fault may round is a module."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LENGTH = 61, 32, 4, 32


class Shares(nn.Module):
    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.softmax(-1)


class Rotations(nn.Module):
    """Rotates pairs of channels by the position, with a table that is made at every call."""

    frequencies: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        frequencies = 1 / 10_000 ** (torch.arange(0, channels, 2) / channels)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(x.shape[-2]).float(), self.frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, other = x.chunk(2, -1)
        return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.rotations = Rotations(WIDTH // HEADS)
        self.shares = Shares()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mixed(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = self.rotations(query) @ self.rotations(key).transpose(-1, -2) / math.sqrt(query.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        shares = self.shares(scores.masked_fill(future, float("-inf")))
        return self.out((shares @ value).transpose(1, 2).flatten(-2))


class Stream(nn.Module):
    """A residual connection: the sum of a stream and the output of a block's part."""

    def forward(self, stream: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return stream + more


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.between = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.stream = Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stream(x, self.attention(self.before(x)))
        return self.stream(x, self.down(functional.gelu(self.up(self.between(x)))))


class Judge(nn.Module):
    """Cross entropy with the next token, as a module."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class Decoder(nn.Module):
    """A small language model with learned positions in a table, and rotations too."""

    table: torch.Tensor

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("table", _waves())
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.judge = Judge()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        words = self.words(input_ids)
        x = words + self.table[: input_ids.shape[1]].to(words.dtype)
        for block in self.blocks:
            x = block(x)
        return self.judge(self.head(self.norm(x)), labels)


def _waves() -> torch.Tensor:
    angles = torch.outer(torch.arange(LENGTH).float(), 1 / 10_000 ** (torch.arange(0, WIDTH, 2) / WIDTH))
    return torch.cat([angles.sin(), angles.cos()], -1)


class Pictures(nn.Module):
    """A small convolutional network that tells classes of images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 16, 3, stride=2)
        self.last = nn.GroupNorm(2, 16)
        self.classes = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first((images - images.mean()).to(self.first.weight.dtype))
        x = functional.relu(self.norm(x))
        x = functional.relu(self.last(self.second(x)))
        return functional.cross_entropy(self.classes(x.mean((-1, -2))).float(), labels)
