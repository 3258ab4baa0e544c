"""What the model goes on with after a prompt, while it is trained: for the page of the run.

The engine's own forward is called, on all ranks and token by token, so a model that fits no single rank
writes too. Without a cache, so it is for a few dozen tokens. `sample` is for a person, and for a model that
was saved.

Invariant: every rank calls it and is given the same text; nothing of the training changes by it.
"""

from __future__ import annotations

import torch

from zerodrift.engine.engine import Engine
from zerodrift.train.data.tokenizer import Tokenizer
from zerodrift.train.loop.model import positions

MOST = 64
"""Tokens."""


def continuation(engine: Engine, letters: Tokenizer, prompt: str) -> str:
    """The likeliest token again and again, to the end of the text, of the model's positions, or to `MOST`."""
    given = [*letters.start, *map(int, letters.encode(prompt))] or [letters.end]
    room = positions(engine.module)
    written: list[int] = []
    engine.eval()
    try:
        while len(written) < MOST and (room is None or len(given) + len(written) < room):
            token = engine.comm.broadcast_object(_next(engine, [*given, *written]), 0)
            if token == letters.end:
                break
            written.append(token)
    finally:
        engine.train()
    return letters.decode(written)


@torch.no_grad()
def _next(engine: Engine, tokens: list[int]) -> int:
    out = engine(input_ids=torch.tensor([tokens], device=engine.mesh.device))
    return int(getattr(out, "logits", out)[0, -1].argmax())
