"""Sample text from a trained model.

The exported model of a run, or its newest checkpoint before the export, continues a prompt on this machine's
device. Equal seed, prompt and settings give equal text. It is too slow for serving.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.comm import usable_accelerator
from zerodrift.engine import item_in
from zerodrift.errors import ConfigError, NonFiniteError
from zerodrift.model import CONFIG, importable
from zerodrift.train.data import chat_template
from zerodrift.train.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from zerodrift.train.job import Model
from zerodrift.train.loop import model as models
from zerodrift.train.loop.model import positions
from zerodrift.train.loop.run_folder import TrainedModel, model_at
from zerodrift.train.tools import adapters
from zerodrift.weights import fill_module


class TextGenerator:
    def __init__(self, path: Path) -> None:
        found = model_at(path)
        job, beside = found.job, found.export
        # The tokenizer beside the weights comes first, then the job's, then bytes.
        if beside is not None and has_tokenizer(beside) and (job is None or job.data.tokenizer != "bytes"):
            self._tokenizer: Tokenizer = load_tokenizer("auto", str(beside))
        else:
            written = (job.data.tokenizer, job.model.source) if job else ("bytes", "")
            self._tokenizer = load_tokenizer(*written)
        self._device = torch.device(usable_accelerator() or "cpu")
        with importable(found.started_in):
            self._model = load(found).to(self._device).eval()
        self._cache = cache_name(self._model)

    def continue_prompt(
        self, prompt: str, most: int, choose: Callable[[torch.Tensor], int], as_chat: bool = False
    ) -> Iterator[str]:
        """Continue a prompt piece by piece, by `most` tokens; a wrong prompt is refused at once."""
        given, ends = chat_template.prompt_tokens(prompt, self._tokenizer, as_chat)
        room = positions(self._model)
        if room is not None and len(given) >= room:
            must = f"must leave room in the model's {room:,} positions"
            raise ConfigError("--prompt", must, got=f"{len(given):,} tokens", do="Shorten it.")
        return self._pieces(given, most if room is None else min(most, room - len(given)), choose, ends)

    @torch.no_grad()
    def _pieces(
        self, given: list[int], most: int, choose: Callable[[torch.Tensor], int], ends: Collection[int]
    ) -> Iterator[str]:
        cache: Any = None
        ahead, shown = given, ""
        written: list[int] = []
        for _ in range(most):
            with_cache = {"use_cache": True, self._cache: cache} if self._cache else {}
            out = self._model(input_ids=torch.tensor([ahead], device=self._device), **with_cache)
            cache = getattr(out, self._cache) if self._cache else None
            token = choose(item_in(out, "logits")[0, -1].float().cpu())
            if token in ends:
                break
            written.append(token)
            ahead = [token] if self._cache else [*given, *written]
            # An incomplete character at the end waits for its next token.
            complete = self._tokenizer.decode(written).rstrip("\N{REPLACEMENT CHARACTER}")
            if len(complete) > len(shown):
                yield complete[len(shown) :]
                shown = complete


def cache_name(model: Any) -> str:
    """Return the name of a `transformers` model's argument for its key-value cache; empty if it has none."""
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model  # one with adapters
    taken = inspect.signature(inside.forward).parameters if hasattr(model, "generate") else ()
    return next((name for name in ("cache", "past_key_values") if name in taken), "")


def chooser(temperature: float, top: int, seed: int) -> Callable[[torch.Tensor], int]:
    """Return a function that draws a token from the `top` likeliest; 0 for all. Temperature 0 takes the
    likeliest."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: torch.Tensor) -> int:
        if not logits.max().isfinite() or logits.isnan().any():
            todo = "The model has diverged: sample an earlier one."
            raise NonFiniteError("logits", "must be finite", got="NaN or infinity", do=todo)
        if temperature <= 0:
            return int(logits.argmax())
        logits = logits / temperature
        if top:
            least = logits.topk(min(top, len(logits))).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))

    return choose


def load(found: TrainedModel) -> nn.Module:
    """Return the model of an export or a checkpoint in fp32, which holds every exported dtype."""
    job, place = found.job, found.export or found.checkpoint
    assert place is not None
    if job is not None and job.model.lora is not None:
        return adapters.read(models.whole_model(models.source_of(job.model)), found, torch.float32)
    if found.export is not None and (place / CONFIG).is_file():
        written = Model(source=str(place), weights="load")
        return models.whole_model(models.source_of(written)).float()
    if job is None:
        must = "must hold a `config.json` or its job, or be in the folder of its run"
        raise ConfigError(str(place), must, got="none of these")
    model = models.whole_model(models.source_of(job.model))
    fill_module(model, place)
    return model.float()
