"""What a job is trained on, for a person to read: what was read, and the first blocks with what is learned.

Learned text stands between `[[` and `]]`, and is coloured where there is colour. Long runs of one kind are
shown by their ends.

Invariant: nothing is trained, and blocks are those that training takes, in its order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from zerodrift import legible
from zerodrift.report.frame import grid, printed
from zerodrift.train.data.blocks import IGNORED, BlockValues
from zerodrift.train.data.prepare import prepare, require_validation
from zerodrift.train.data.sampling import sampler_of
from zerodrift.train.data.tokenizer import Tokenizer, tokenizer
from zerodrift.train.loop import model as models
from zerodrift.train.loop.job import Job
from zerodrift.train.loop.run_folder import RunFolder

SAMPLES = 3
HEAD, TAIL = 300, 200
"""Characters of the start and the end of a run that are shown."""
LEAST, MOST = 40, 120
"""Columns."""


def preview(job: Job, *, color: bool, width: int) -> str:
    """The data of a job in words; made ready for its training, if that has not begun."""
    require_validation(job)
    letters = tokenizer(job.data.tokenizer, job.model.source)
    _check_model(job, letters)
    prepared = prepare(job.data, letters, RunFolder(Path(job.run.folder).expanduser()).cache(job.data.cache))
    width = max(LEAST, min(width, MOST))
    facts = [*prepared.facts(), ("tokenizer", f"{letters.name}, {letters.vocabulary:,} tokens")]
    parts: list[RenderableType] = [grid(facts, (24,), ("bold",), width)]
    indices = sampler_of(prepared.train, job.data.seed).step(0, min(SAMPLES, len(prepared.train)))
    for index in indices:
        read = prepared.train.read(np.array([index]))
        learned = int((read.labels[0] != IGNORED).sum())
        of = f"{learned:,} of {len(read.tokens[0]):,} tokens learned"
        parts.append(Text(f"\nblock {index + 1:,} of {len(prepared.train):,}, {of}", style="bold"))
        parts.append(Padding(_text(read, letters), (0, 0, 0, 2)))
    return printed([*parts, Text(f"\n{_MARKS}", style="dim")], color, width)


_MARKS = "[[learned]] not learned. The order is that of training."


def _check_model(job: Job, letters: Tokenizer) -> None:
    """What a model's config alone tells of its data. A function's model is not made for this."""
    source = models.source_of(job.model)
    if source.config is None or job.model.lora is not None:
        return
    built = models.build(job.model, source)
    models.check_causal(built, job.model.source)
    models.check_vocabulary(built, letters.vocabulary, letters.name)
    models.check_positions(built, job.data.block)


def _text(read: BlockValues, letters: Tokenizer) -> Text:
    """A block with its learned parts marked."""
    tokens, learned = read.tokens[0], read.labels[0] != IGNORED
    used = len(tokens) - _padding(tokens, learned, letters.end)
    text = Text()
    places = None if read.positions is None else read.positions[0]
    for first, end, marked in _runs(learned[:used], places):
        if first and places is not None and places[first] == 0:
            text.append("\n--- another document ---\n", style="dim")
        shown = _shortened(legible.lines(letters.shown(tokens[first:end].tolist())))
        text.append(f"[[{shown}]]" if marked else shown, style="green" if marked else "")
    if used < len(tokens):
        text.append(f"\n(padding: {len(tokens) - used:,})", style="dim")
    return text


def _padding(tokens: np.ndarray, learned: np.ndarray, end: int) -> int:
    """How many tokens at the end only fill up."""
    other = np.flatnonzero(learned | (tokens != end))
    return len(tokens) - (int(other[-1]) + 1 if len(other) else 0)


def _runs(learned: np.ndarray, places: np.ndarray | None) -> Iterator[tuple[int, int, bool]]:
    """Runs of tokens of one document that are all learned, or all not."""
    changes = np.flatnonzero(np.diff(learned.astype(np.int8))) + 1
    starts = np.flatnonzero(places[: len(learned)] == 0) if places is not None else changes
    cuts = sorted({0, *map(int, changes), *map(int, starts), len(learned)})
    for first, end in itertools.pairwise(cuts):
        yield first, end, bool(learned[first])


def _shortened(text: str) -> str:
    if len(text) <= HEAD + TAIL + 40:
        return text
    left = len(text) - HEAD - TAIL
    return f"{text[:HEAD]} [... {left:,} characters ...] {text[-TAIL:]}"
