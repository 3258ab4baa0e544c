"""Models that a job names as `tests.e2e.small_models:...`: one that learns, and some with a fault in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from zerodrift.pipeline.cut import Parts

POISON = 7
"""A byte that no text has unless a test puts it there."""


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Bigram(nn.Module):
    """The next byte from this one; returns the loss, or logits without labels."""

    def __init__(self, dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, 257)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def infinite_slope(model: Any) -> torch.Tensor:
    """Zero, with a gradient that is not finite."""
    return torch.sqrt(model.layers[1].up.weight.float().sum() * 0.0)


class Poisoned(Bigram):
    """Its loss is no number where the poison is in the text."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        loss = super().forward(input_ids, labels)
        return loss * torch.nan if bool((input_ids == POISON).any()) else loss


class BadGradient(Bigram):
    """The loss is fine and its gradient is not, where the poison is in the text."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        loss = super().forward(input_ids, labels)
        return loss + infinite_slope(self) if bool((input_ids == POISON).any()) else loss


class Widened(Bigram):
    """Computes its head in fp32 behind the plan's back."""

    dtype = torch.float32

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        weights = (value.to(self.dtype) for value in (self.head.weight, self.head.bias))
        logits = F.linear(x.to(self.dtype), *weights)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


class Narrowed(Widened):
    """The same in bf16."""

    dtype = torch.bfloat16


class Hungry(Bigram):
    """Finds no memory in its third forward in training."""

    calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(input_ids, labels)


class Slow(Bigram):
    """Takes its time, so that a test can interfere."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        import time

        time.sleep(0.05)
        return super().forward(input_ids, labels)


def parts() -> Parts:
    """How all of these are cut for a pipeline."""

    def after(model: Any, hidden: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens, labels = batch["input_ids"], batch["labels"]
        logits = model.head(hidden)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        poisoned = bool((tokens == POISON).any())
        if poisoned and isinstance(model, Poisoned):
            return loss * torch.nan
        if poisoned and isinstance(model, BadGradient):
            return loss + infinite_slope(model)
        return loss

    return Parts("layers", before=lambda model, batch: model.embed(batch["input_ids"]), after=after)


def no_parts() -> int:
    """A function of a job that is none."""
    return 3


def deep() -> nn.Module:
    """Layers for four pieces."""
    model = Bigram()
    model.layers = nn.ModuleList(Block(16, 0.0) for _ in range(4))
    return model


def dropping() -> nn.Module:
    return Bigram(dropout=0.2)


def slow() -> nn.Module:
    return Slow(dropout=0.1)


class Broken(Bigram):
    """Fails on rank 1 in its third forward, as a program does that has a defect."""

    calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and torch.distributed.get_rank() == 1:
            raise KeyError("broken on purpose")
        return super().forward(input_ids, labels)


plain, poisoned, bad_gradient, hungry, broken = Bigram, Poisoned, BadGradient, Hungry, Broken
widened, narrowed = Widened, Narrowed


def llama() -> nn.Module:
    """A causal model of `transformers`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2))
