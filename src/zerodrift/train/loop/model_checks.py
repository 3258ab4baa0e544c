"""Refuse a model that does not fit its data: its vocabulary, its positions, and what its tokens see."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from zerodrift.engine.engine import Engine
from zerodrift.errors import ConfigError, ModelError
from zerodrift.train.data.batches import BatchLayout, MicroBatch
from zerodrift.train.data.blocks import IGNORED
from zerodrift.train.data.tokenizer import Tokenizer
from zerodrift.train.job import Job
from zerodrift.train.loop.step import losses_of

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "block_size")
"""Names of the longest text in configs."""
LEAK = 0.02
"""Largest effect of another document on a loss, relative to the effect of its own: rounding."""


def check_model(model: nn.Module, job: Job, letters: Tokenizer) -> None:
    """Refuse a model that does not fit the job's tokenizer and blocks, or is no causal language model."""
    check_causal(model, job.model.source)
    check_vocabulary(model, letters.vocabulary, letters.name)
    check_positions(model, job.data.block)


def check_vocabulary(model: nn.Module, tokens: int, name: str) -> None:
    """Refuse tokens that the model has no embedding for."""
    embeddings = getattr(model, "get_input_embeddings", None)
    try:
        embedding = embeddings() if embeddings is not None else None
    except (NotImplementedError, AttributeError):
        embedding = None
    if isinstance(embedding, nn.Embedding) and embedding.num_embeddings < tokens:
        must = f"must make tokens that the model knows, below {embedding.num_embeddings}"
        todo = "Use the model's own tokenizer, or a config with a larger `vocab_size`."
        raise ModelError("data.tokenizer", must, got=f"{name} with {tokens}", do=todo)


def positions(model: nn.Module) -> int | None:
    """Return the longest text that the model was made for; None if its config does not say."""
    return _named_positions(model)[1]


def _named_positions(model: nn.Module) -> tuple[str, int | None]:
    text = _text_config(model)
    values = text if isinstance(text, Mapping) else {name: getattr(text, name, None) for name in _POSITIONS}
    known = ((name, values.get(name)) for name in _POSITIONS)
    return next(((name, value) for name, value in known if type(value) is int and value > 0), ("", None))


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "get_text_config", lambda: config)()


def check_positions(model: nn.Module, block: int) -> None:
    """Refuse blocks longer than the model's positions: models look them up, or were not trained beyond
    them."""
    name, known = _named_positions(model)
    if known is not None and known < block:
        key = getattr(model.config, "attribute_map", {}).get(name, name)
        must = f"must be at most the {known:,} positions of the model's config (`{key}`)"
        todo = "Lower it, or raise that where the model can."
        raise ModelError("data.block", must, got=f"{block:,}", do=todo)


def check_causal(model: nn.Module, source: str) -> None:
    """Refuse an encoder: its tokens see those that follow, which are what they are to predict."""
    text = _text_config(model)
    if text is None:
        return
    kind = getattr(text, "model_type", "")
    sees = getattr(text, "is_causal", None) is False or getattr(text, "causal", None) is False
    sees |= getattr(text, "use_bidirectional_attention", None) in (True, "all")
    if getattr(text, "is_decoder", None) is False and kind:
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

        sees |= kind in ENCODERS
    if sees or kind in ("xlnet",):
        must = "must be a causal language model, whose tokens see only what is before them"
        todo = "Use a decoder, or set `is_decoder: true` in its config where it has that."
        raise ModelError("model.source", must, got=f"{source!r}, an encoder ({kind})", do=todo)


def require_document_mask(engine: Engine, seat: BatchLayout, length: int, vocabulary: int) -> None:
    """Refuse `data.attend: document` for a model that lets documents of a block see each other. Collective.

    The model gets positions that start again with each document, from which those of `transformers` make a
    mask. Some have no mask, and carry a state from one document into the next. Nothing of the run changes.
    """
    where, todo, name = "data.attend", "Use `data.attend: block`.", type(engine.module).__name__
    if engine.plan.policy.pipeline is not None:
        raise ConfigError(where, "must be `block` with `config.pipeline`", got="'document'", do=todo)
    must = "must be `block` for this model"
    arguments = inspect.signature(engine.module.forward).parameters.values()
    if not any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in arguments):
        raise ConfigError(where, must, got=f"{name}, whose `forward` takes no `position_ids`", do=todo)
    # Blocks of two documents: plain, with another first one, and with another start of the second.
    half, rest = length // 2, length - length // 2
    learned = half + max(1, rest // 2)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (seat.micro, length))
    labels, places = tokens.copy(), np.broadcast_to(np.r_[np.arange(half), np.arange(rest)], tokens.shape)
    labels[:, :learned] = IGNORED

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(seat.device)

    batches = [MicroBatch(on_device(tokens), on_device(labels), 1.0, np.arange(0), on_device(places))]
    for start, end in ((0, half), (half, learned)):
        changed = tokens.copy()
        changed[:, start:end] = (changed[:, start:end] + 1) % vocabulary
        batches.append(replace(batches[0], tokens=on_device(changed)))
    first, other, own = losses_of(engine, batches).tolist()
    if abs(other - first) > LEAK * abs(own - first):
        raise ConfigError(where, must, got=f"{name}, in which a document sees the one before it", do=todo)
