"""Micro-batches of token ids: of a file, or drawn where there is none.

Invariant: every rank takes others, and as many.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.errors import ModelError
from zerodrift.model.inputs import inputs_for
from zerodrift.numerics.runs import Batch
from zerodrift.numerics.token_files import Ids, read_ids

LENGTH = 64
"""Tokens of a sequence that is drawn."""

SEQUENCES = 2
"""Of a micro-batch that is drawn."""


def read(path: Path, count: int, rank: int, ranks: int) -> list[Batch]:
    """The sequences of a file, in `count` micro-batches of this rank; those of a micro-batch are as long as
    its shortest."""
    sequences = read_ids(path)
    if len(sequences) < count * ranks:
        must = f"must have a sequence for each of {count * ranks} micro-batches"
        raise ModelError(
            str(path), must, got=len(sequences), do=f"Give `--batches {len(sequences) // ranks}`."
        )
    mine = sequences[rank::ranks]
    each = len(mine) // count
    return [_batch(mine[number * each : (number + 1) * each]) for number in range(count)]


def _batch(sequences: Ids) -> Batch:
    length = min(map(len, sequences))
    tokens = torch.tensor([sequence[:length] for sequence in sequences])
    return {"input_ids": tokens, "labels": tokens}


def drawn(model: nn.Module, count: int, rank: int) -> list[Batch]:
    """Tokens at random, for a model that takes them; what others take as example inputs."""
    example = inputs_for(model)
    tokens = example.kwargs.get("input_ids")
    if tokens is None or example.args:
        return [dict(example.kwargs) for _ in range(count)]
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = int(getattr(text, "vocab_size", 0) or int(tokens.max()) + 1)
    longest = int(getattr(text, "max_position_embeddings", LENGTH) or LENGTH)
    made: list[Batch] = []
    for number in range(count):
        generator = torch.Generator().manual_seed(1_000 * rank + number)
        ids = torch.randint(0, most, (SEQUENCES, min(LENGTH, longest)), generator=generator)
        made.append(
            {**example.kwargs, "input_ids": ids, **({"labels": ids} if "labels" in example.kwargs else {})}
        )
    return made
