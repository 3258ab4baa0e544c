"""Small models for the gallery's scripts, with a parameter of each kind, and data that differs by rank."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

VOCABULARY, WIDTH = 64, 16


class Expert(nn.Linear):
    """A class of its own, as a wrap policy asks for."""


class Tiny(nn.Module):
    """Embedding, norm, a router over two linear experts, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList(Expert(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        h = self.norm(x)
        gates = self.route(h).to(h.dtype)
        return self.head(x + sum(gates[..., i : i + 1] * e(h) for i, e in enumerate(self.experts)))

    def route(self, h: torch.Tensor) -> torch.Tensor:
        return self.router(h).softmax(-1)


class Dense(nn.Module):
    """A `Tiny` without a router."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def batch(rank: int, step: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and the tokens that follow them."""
    tokens = torch.randint(VOCABULARY, (size, 9), generator=torch.Generator().manual_seed(1000 * rank + step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def llama_config(**rest: Any) -> Any:
    import transformers

    sizes: dict[str, Any] = dict(hidden_size=WIDTH, intermediate_size=32, num_attention_heads=2)
    return transformers.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes, **rest)


def train_by_transformers(model: nn.Module, **rest: Any) -> None:
    import transformers

    examples = [{"input_ids": tokens, "labels": tokens} for tokens in batch(0, 0, size=64)[0]]
    quiet: dict[str, Any] = dict(save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=4, **quiet, **rest
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=examples).train()


def start() -> None:
    """Seed torch, and join the ranks of a launcher if there is one."""
    torch.manual_seed(0)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        atexit.register(dist.destroy_process_group)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batches: int = 1,
    autocast: bool = False,
    unsynchronized: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[int], Any] = lambda step: None,
) -> nn.Module:
    """Train for four steps, by AdamW at 1e-3 unless given; call `before` and `after` around each update.
    Every micro-batch but the last of a step is within `unsynchronized`."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        for micro in range(micro_batches):
            tokens, targets = batch(rank(), 10 * step + micro)
            with unsynchronized() if micro < micro_batches - 1 else nullcontext():
                with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                    logits = model(tokens)
                (loss_of(logits, targets) / micro_batches).backward()
        before()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return model
