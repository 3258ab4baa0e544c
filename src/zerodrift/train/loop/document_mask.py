"""Whether the documents of a block see each other in a model: asked of itself, before it is trained.

With `data.attend: document` a model is given positions that start again with each document, from which those
of `transformers` make a mask. Some have no mask to make, and carry a state from one document into the next.

Invariant: nothing of the run changes; where this returns, a document's loss does not depend on the tokens of
another.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import torch

from zerodrift.errors import ConfigError
from zerodrift.train.data.batches import BatchLayout, MicroBatch
from zerodrift.train.data.blocks import IGNORED
from zerodrift.train.loop.drivers import Driver

LEAK = 0.02
"""Of what a change in a document does to its loss, how much a change in another may do: rounding."""


def require_apart(driver: Driver, seat: BatchLayout, length: int, vocabulary: int) -> None:
    """That the model keeps documents apart. Every rank calls it."""
    engine = driver.engine
    where, todo = "data.attend", "Use `data.attend: block`."
    if engine.plan.policy.pipeline is not None:
        raise ConfigError(where, "must be `block` with `config.pipeline`", got="'document'", do=todo)
    taken = inspect.signature(engine.module.forward).parameters.values()
    if not any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in taken):
        got = f"{type(engine.module).__name__}, whose `forward` takes no `position_ids`"
        raise ConfigError(where, "must be `block` for this model", got=got, do=todo)
    first, other, own = driver.losses(_batches(seat, length, vocabulary)).tolist()
    if abs(other - first) > LEAK * abs(own - first):
        got = f"{type(engine.module).__name__}, in which a document sees the one before it"
        raise ConfigError(where, "must be `block` for this model", got=got, do=todo)


def _batches(seat: BatchLayout, length: int, vocabulary: int) -> list[MicroBatch]:
    """Blocks of two documents: as they are, with another first one, and with another start of the second."""
    draw = np.random.default_rng(0)
    half, rest = length // 2, length - length // 2
    tokens = draw.integers(0, vocabulary, (seat.micro, length))
    labels = tokens.copy()
    labels[:, : half + max(1, rest // 2)] = IGNORED
    places = np.broadcast_to(np.r_[np.arange(half), np.arange(rest)], tokens.shape)

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(seat.device)

    batch = MicroBatch(on_device(tokens), on_device(labels), 1.0, np.arange(0), on_device(places))
    changed = []
    for start, end in ((0, half), (half, half + max(1, rest // 2))):
        other = tokens.copy()
        other[:, start:end] = (other[:, start:end] + 1) % vocabulary
        changed.append(replace(batch, tokens=on_device(other)))
    return [batch, *changed]
