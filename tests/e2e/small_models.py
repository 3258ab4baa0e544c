"""Models for jobs, as `tests.e2e.small_models:...`: one that learns, and some with a fault."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from zerodrift.pipeline.cut import Parts

POISON = 7
"""A byte that no text has by itself."""

Fault = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from the model, its tokens and its loss to the loss with a fault."""


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Bigram(nn.Module):
    """A model of the next byte; returns the loss, or a dict of logits without labels."""

    calls = 0

    def __init__(self, dropout: float = 0.0, layers: int = 2, fault: Fault | None = None) -> None:
        super().__init__()
        width = 16
        self.embed = nn.Embedding(257, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 257)
        self.fault = fault

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": None, "logits": self.logits(x)} if labels is None else self.loss(x, input_ids, labels)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def loss(self, x: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.logits(x)[:, :-1].float().flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten())
        self.calls += 1
        return loss if self.fault is None else self.fault(self, input_ids, loss)


class Widened(Bigram):
    """A model that computes its head in fp32, against the plan."""

    dtype = torch.float32

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (value.to(self.dtype) for value in (self.head.weight, self.head.bias))
        return F.linear(x.to(self.dtype), weight, bias)


class Narrowed(Widened):
    """A model that computes its head in bf16, against the plan."""

    dtype = torch.bfloat16


def is_poisoned(tokens: torch.Tensor) -> bool:
    return bool((tokens == POISON).any())


def plant_a_gradient(model: Any, tokens: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Change the gradient of one matrix alone, in the forward that `PLANT` names as RANK:NUMBER."""
    if os.environ.get("PLANT") != f"{os.environ.get('RANK', 0)}:{model.calls}":
        return loss
    more = model.layers[1].up.weight.sum() * 1e-3
    return loss + (more - more.detach())


def break_on_rank_1(model: Any, tokens: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Fail in the third forward, after a step, as a defective program does."""
    if model.calls == 3 and torch.distributed.get_rank() == 1:
        raise KeyError("broken on purpose")
    return loss


def ask_to_stop(model: Any, tokens: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Send this rank alone the signal of a scheduler, after a step."""
    if model.calls == 6:
        os.kill(os.getpid(), signal.SIGTERM)
    return loss


def wait(model: Any, tokens: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Sleep, so that a test can interfere."""
    time.sleep(0.05)
    return loss


def not_a_number(model: Any, tokens: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    return loss * torch.nan if is_poisoned(tokens) else loss


def infinite_slope(model: Any, tokens: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Make the gradient of a text with the poison infinite; its loss stays finite."""
    return loss + torch.sqrt(model.layers[1].up.weight.float().sum() * 0.0) if is_poisoned(tokens) else loss


plain, widened, narrowed = Bigram, Widened, Narrowed
poisoned = functools.partial(Bigram, fault=not_a_number)
bad_gradient = functools.partial(Bigram, fault=infinite_slope)
planted = functools.partial(Bigram, dropout=0.1, layers=3, fault=plant_a_gradient)
broken = functools.partial(Bigram, fault=break_on_rank_1)
stopped = functools.partial(Bigram, fault=ask_to_stop)
slow = functools.partial(Bigram, dropout=0.1, fault=wait)
not_slow = functools.partial(Bigram, dropout=0.1)
"""The same as `slow` without its waits."""
dropping = functools.partial(Bigram, dropout=0.2)
deep = functools.partial(Bigram, layers=4)
"""Deep enough for four pipeline stages."""


def parts() -> Parts:
    """Return the parts of these models for a pipeline."""
    return Parts(
        "layers",
        before=lambda model, batch: model.embed(batch["input_ids"]),
        after=lambda model, hidden, batch: model.loss(hidden, batch["input_ids"], batch["labels"]),
    )


def llama(**rest: Any) -> Any:
    """Make a causal model of `transformers`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, **rest))
