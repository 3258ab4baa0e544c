"""Sample text from a trained model, to see that it learned.

The exported model of a run, or its newest checkpoint before there is one, continues a prompt on this
machine's device. It is for looking, not for serving. Equal seed, prompt and settings give equal text.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.checkpoint import SHARED
from zerodrift.checkpoint import state as states
from zerodrift.comm import usable_accelerator
from zerodrift.errors import ConfigError, NonFiniteError
from zerodrift.model import CONFIG, attempt, importable, make
from zerodrift.train.data import chat_template
from zerodrift.train.data.tokenizer import Tokenizer, has_tokenizer, tokenizer
from zerodrift.train.job import Job
from zerodrift.train.loop import model as models
from zerodrift.train.loop.model import positions
from zerodrift.train.loop.run_folder import TrainedModel, model_at
from zerodrift.train.tools import adapters


class TextGenerator:
    """A trained model and its tokenizer."""

    def __init__(self, path: Path) -> None:
        found = model_at(path)
        job, beside = found.job, found.export
        # The tokenizer beside the weights comes first, then the job's, then bytes.
        if beside is not None and has_tokenizer(beside) and (job is None or job.data.tokenizer != "bytes"):
            self._letters: Tokenizer = tokenizer("auto", str(beside))
        else:
            self._letters = tokenizer(*(job.data.tokenizer, job.model.source) if job else ("bytes", ""))
        self._device = torch.device(usable_accelerator() or "cpu")
        with importable(found.started_in):
            self._model = load(found).to(self._device).eval()
        self._cache = cache_name(self._model)

    def continue_prompt(
        self, prompt: str, most: int, choose: Callable[[torch.Tensor], int], as_chat: bool = False
    ) -> Iterator[str]:
        """Continue a prompt piece by piece, by `most` tokens; a wrong prompt is refused at once."""
        given, ends = chat_template.prompt_tokens(prompt, self._letters, as_chat)
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
            token = choose(getattr(out, "logits", out)[0, -1].float().cpu())
            if token in ends:
                break
            written.append(token)
            ahead = [token] if self._cache else [*given, *written]
            # A character that is cut at the end of the text is not shown yet.
            complete = self._letters.decode(written).rstrip("\N{REPLACEMENT CHARACTER}")
            if len(complete) > len(shown):
                yield complete[len(shown) :]
                shown = complete


def cache_name(model: Any) -> str:
    """Return what a model of `transformers` calls its cache of keys and values; nothing if it takes none."""
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
    job, checkpoint = found.job, found.checkpoint
    if job is not None and job.model.lora is not None:
        return adapters.read(models.whole_model(job.model), found, torch.float32)
    if found.export is not None:
        return _of_export(found.export, job)
    if job is None or checkpoint is None:
        must = "must carry the job that it was trained by, or lie in its run"
        raise ConfigError(str(checkpoint), must, got="none", do="Convert it: `zerodrift convert`.")
    model = models.whole_model(job.model)
    missing = adapters.copy_weights(checkpoint, dict(model.named_parameters()))
    models.require_whole(checkpoint, missing, ())
    with torch.no_grad():
        states.put_buffers(model, states.read_state(checkpoint, SHARED)["buffers"])
    return model


def _of_export(folder: Path, job: Job | None) -> nn.Module:
    if (folder / CONFIG).is_file():
        return models.load_pretrained(folder, torch.float32)
    if job is None:
        must = "must hold a `config.json`, or lie in its run, beside the `job.json`"
        raise ConfigError(str(folder), must, got="neither")
    from safetensors.torch import load_file

    model, tensors = make(job.model.source), dict[str, torch.Tensor]()
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= attempt(functools.partial(load_file, str(file)), str(file), "must be readable")
    load = functools.partial(model.load_state_dict, tensors, strict=False)
    keys = attempt(load, str(folder), "must hold the tensors of the model of this run")
    here = model.state_dict(keep_vars=True)
    filled = {id(here[name]) for name in tensors if name in here}
    missing = [name for name in keys.missing_keys if id(here[name]) not in filled]
    models.require_whole(folder, missing, keys.unexpected_keys)
    return model
