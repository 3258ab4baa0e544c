"""Example inputs for tracing a model: tokens, an image, a sound, or the result of the user's function.

Values do not matter, and shapes hardly do. A model of `transformers` names its inputs. Any other model gets
`input_ids` if its forward has that argument, and is refused by name otherwise.

Invariant: only argument names of `transformers` are interpreted.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerodrift.errors import ModelError
from zerodrift.model.sources import call

if TYPE_CHECKING:
    from torch import nn

LENGTH = 16
"""Tokens of a text."""
PICTURE = 224
SOUND = 16_000
"""Samples of a sound: one second."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of one forward."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""


def inputs_for(model: nn.Module, given: str | None = None) -> Inputs:
    """Return example inputs; `given` names a function that returns a dict, a tuple or a tensor."""
    import torch

    if given is not None:
        made = call(given, "example inputs")
        if isinstance(made, Mapping):
            return Inputs((), dict(made), f"{given}: {_words(made)}")
        if isinstance(made, torch.Tensor):
            made = (made,)
        if isinstance(made, (tuple, list)):
            return Inputs(tuple(made), {}, f"{given}: {_words(dict(enumerate(made)))}")
        must = "must return a dict of arguments, a tuple of them, or a tensor"
        raise ModelError(given, must, got=type(made).__qualname__)
    base: Any = model
    if hasattr(model, "get_base_model"):  # adapters of peft pass their arguments on
        base = base.get_base_model()
    known = _of_transformers(base) or _of_tokens(base)
    if known is None:
        got = f"`forward({', '.join(map(str, _parameters(base).values()))})`"
        do = (
            "Give `--inputs package.module:function`, a function that returns a dict of its arguments, a "
            "tuple of them, or a tensor."
        )
        must = "must have example inputs to be traced"
        raise ModelError(type(model).__name__, must, got=got, do=do)
    return Inputs((), known, _words(known))


def _words(arguments: Mapping[Any, Any]) -> str:
    words = (
        f"{key} {' x '.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}"
        if hasattr(value, "shape") and hasattr(value, "dtype")
        else str(key)
        for key, value in arguments.items()
    )
    return ", ".join(words) or "nothing"


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return {}


def _of_tokens(model: nn.Module) -> dict[str, Any] | None:
    """Return inputs of a forward that needs nothing but `input_ids` and `labels`; None for any other."""
    wanted = _parameters(model)
    plain = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {
        name for name, p in wanted.items() if p.default is inspect.Parameter.empty and p.kind not in plain
    }
    if not wanted:
        return {}
    if "input_ids" not in wanted or needed - {"input_ids", "labels"}:
        return None
    ids = _tokens(None)
    return {"input_ids": ids, "labels": ids} if "labels" in wanted else {"input_ids": ids}


def _tokens(config: Any) -> Any:
    import torch

    length = LENGTH
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions"):
        limit = getattr(text, name, None)
        length = min(length, limit) if type(limit) is int and limit > 0 else length
    known = getattr(text, "vocab_size", None)
    vocabulary = known if type(known) is int and known > 0 else 1 << 30
    return torch.arange(3, 3 + length).remainder(vocabulary).unsqueeze(0)


def _picture(config: Any) -> Any:
    import torch

    vision = getattr(config, "vision_config", None) or config
    size: Any = getattr(vision, "image_size", None) or PICTURE
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    return torch.zeros(1, getattr(vision, "num_channels", None) or 3, *sides)


def _of_transformers(model: nn.Module) -> dict[str, Any] | None:
    """Return inputs of a class of `transformers`, which names its main input; None for any other model."""
    import torch

    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    if config is None or main is None:
        return None
    value: Any = None
    if main == "input_ids":
        value = _tokens(config)
    elif main == "pixel_values":
        value = _picture(config)
    elif main == "input_features" and hasattr(config, "num_mel_bins"):
        value = torch.zeros(1, config.num_mel_bins, 2 * getattr(config, "max_source_positions", 1500))
    elif main == "input_values":
        value = torch.zeros(1, SOUND)
    if value is None:
        return None
    inputs: dict[str, Any] = {main: value}
    wanted = _parameters(model)
    if "return_loss" in wanted and "pixel_values" in wanted:  # pairs of texts and pictures
        inputs |= {"pixel_values": _picture(config), "return_loss": True}
    labels = _labels(model, inputs[main]) if "labels" in wanted else None
    if labels is not None:
        inputs["labels"] = labels
    elif "decoder_input_ids" in wanted:
        inputs["decoder_input_ids"] = _tokens(config)
    return inputs


def _labels(model: nn.Module, main: Any) -> Any:
    """Return labels for the task that `transformers` lists the model's class under; None for no task."""
    import torch
    from transformers.models.auto import modeling_auto

    def listed(*kinds: str) -> bool:
        name = type(model).__name__
        tables = (getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in kinds)
        return any(
            name in (value if isinstance(value, (tuple, list)) else (value,))
            for table in tables
            for value in table.values()
        )

    if listed("CAUSAL_LM", "MASKED_LM", "TOKEN_CLASSIFICATION"):
        return main.clone() if main.dtype is torch.int64 else None
    if listed("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        return _tokens(model.config)
    if listed("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "MULTIPLE_CHOICE"):
        return torch.zeros(1, dtype=torch.int64)
    return None
