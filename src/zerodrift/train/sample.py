"""Text from a trained model: to see that it learned.

Reads the exported model of a run, or, where there is none yet, its newest checkpoint, into a model on this
machine's device, and lets it go on from a prompt, token by token. For looking, not for serving.

Invariant: equal seed, prompt and settings give equal text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.errors import ConfigError, NonFiniteError
from zerodrift.train import chat, export
from zerodrift.train import model as models
from zerodrift.train.folder import RunFolder
from zerodrift.train.job import Job
from zerodrift.train.tokens import Tokenizer, tokenizer


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is chosen."""

    tokens: int
    """At most so many."""
    temperature: float
    """0 takes the likeliest."""
    top: int
    """Of so many of the likeliest; 0 is of all."""
    seed: int


class TextGenerator:
    """A trained model and its tokenizer."""

    def __init__(self, run: Path, device: str | None = None) -> None:
        folder = RunFolder(run)
        self._job: Job = folder.load_job()
        source = str(folder.export) if (folder.export / "config.json").is_file() else self._job.model.source
        self._letters: Tokenizer = tokenizer(self._job.data.tokenizer, source)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model = load(folder, self._job).to(self._device).eval()
        self._cached = hasattr(self._model, "generate")

    def continued(self, prompt: str, options: SamplingOptions, as_chat: bool = False) -> Iterator[str]:
        """What comes after the prompt, piece by piece."""
        if as_chat:
            given = chat.prompt([{"role": "user", "content": prompt}], self._letters)
        else:
            given = self._letters.encode(prompt)
        tokens = [int(token) for token in given] or [self._letters.end]
        room = models.positions(self._model)
        if room is not None and len(tokens) >= room:
            must = f"must leave room in the model's {room:,} positions"
            raise ConfigError("--prompt", must, got=f"{len(tokens):,} tokens", do="Shorten it.")
        if room is not None:
            options = replace(options, tokens=min(options.tokens, room - len(tokens)))
        generator = torch.Generator().manual_seed(options.seed)
        said: list[int] = []
        shown = ""
        for token in self._tokens(tokens, options, generator):
            if token == self._letters.end:
                break
            said.append(token)
            text = self._letters.decode(said)
            # The end of a text that is cut inside a character is not to be shown yet.
            complete = text.rstrip("\N{REPLACEMENT CHARACTER}")
            if len(complete) > len(shown):
                yield complete[len(shown) :]
                shown = complete

    @torch.no_grad()
    def _tokens(
        self, given: list[int], options: SamplingOptions, generator: torch.Generator
    ) -> Iterator[int]:
        cache: Any = None
        tokens = torch.tensor([given], device=self._device)
        ahead = tokens
        for _ in range(options.tokens):
            if self._cached:
                out = self._model(input_ids=ahead, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
            else:
                out = self._model(input_ids=tokens)
            logits = getattr(out, "logits", out)
            token = choose(logits[0, -1].float().cpu(), options, generator)
            yield token
            ahead = torch.tensor([[token]], device=self._device)
            tokens = torch.cat([tokens, ahead], dim=1)


def choose(logits: torch.Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    """The next token, of `[vocabulary]`."""
    if not logits.max().isfinite() or logits.isnan().any():
        raise NonFiniteError(
            "logits",
            "must be finite",
            got="NaN or infinity",
            do="The model has diverged: sample an earlier one.",
        )
    if options.temperature <= 0:
        return int(logits.argmax())
    logits = logits / options.temperature
    if options.top:
        least = logits.topk(min(options.top, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def load(folder: RunFolder, job: Job) -> nn.Module:
    """The model of a run as it was exported, or as its newest checkpoint has it."""
    if not folder.export.is_dir() and not folder.checkpoints.is_dir():
        must = "must have an export or a checkpoint to sample from"
        raise ConfigError(str(folder.path), must, got="neither", do="Let it train a little longer.")
    if folder.export.is_dir():
        return export.read(folder.export, job)
    model = models.whole_model(job.model, models.source_of(job.model))
    export.read_checkpoint(model, folder.checkpoints)
    return model
