"""Show what a job is trained on: what was read, and the first blocks in the order of training.

Learned text stands between `[[` and `]]`, and is green where there is colour. Long texts are shown by their
ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

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
from zerodrift.train.job import Job
from zerodrift.train.loop import model as models
from zerodrift.train.loop.model_checks import check_model
from zerodrift.train.loop.run_folder import RunFolder

SAMPLES = 3
HEAD, TAIL = 300, 200
"""Characters shown of the start and the end of a long text."""
NARROWEST, WIDEST = 40, 120
_MARKS = "[[learned]] not learned. The order is that of training."


def preview(job: Job, *, color: bool, width: int) -> str:
    """Return the data of a job in words; its blocks are made if they are not in the cache."""
    require_validation(job)
    letters = tokenizer(job.data.tokenizer, job.model.source)
    _check_model(job, letters)
    prepared = prepare(job.data, letters, RunFolder.of(job).cache(job.data.cache))
    width = max(NARROWEST, min(width, WIDEST))
    facts = [*prepared.facts(), ("tokenizer", f"{letters.name}, {letters.vocabulary:,} tokens")]
    parts: list[RenderableType] = [grid(facts, (24,), ("bold",), width)]
    count = len(prepared.train)
    for index in sampler_of(prepared.train, job.data.seed).step(0, min(SAMPLES, count)):
        read = prepared.train.read(np.array([index]))
        learned = f"{int((read.labels[0] != IGNORED).sum()):,} of {len(read.tokens[0]):,} tokens learned"
        parts.append(Text(f"\nblock {index + 1:,} of {count:,}, {learned}", style="bold"))
        parts.append(Padding(_text(read, letters), (0, 0, 0, 2)))
    return printed([*parts, Text(f"\n{_MARKS}", style="dim")], color, width)


def _check_model(job: Job, letters: Tokenizer) -> None:
    """Check the data against the model's config. The model of a function is not built for this."""
    source = models.source_of(job.model)
    if source.config is not None and job.model.lora is None:
        check_model(models.build(job.model, source), job, letters)


def _text(read: BlockValues, letters: Tokenizer) -> Text:
    """Return the text of a block with its learned parts marked."""
    tokens, learned = read.tokens[0], read.labels[0] != IGNORED
    content = np.flatnonzero(learned | (tokens != letters.end))
    used = int(content[-1]) + 1 if len(content) else 0
    text = Text()
    places = None if read.positions is None else read.positions[0]
    for first, end, is_learned in _runs(learned[:used], places):
        if first and places is not None and places[first] == 0:
            text.append("\n--- another document ---\n", style="dim")
        shown = _shortened(legible.lines(letters.shown(tokens[first:end].tolist())))
        text.append(f"[[{shown}]]" if is_learned else shown, style="green" if is_learned else "")
    if used < len(tokens):
        text.append(f"\n(padding: {len(tokens) - used:,})", style="dim")
    return text


def _runs(learned: np.ndarray, places: np.ndarray | None) -> Iterator[tuple[int, int, bool]]:
    """Yield runs of tokens of one document that are all learned, or all not."""
    changes = np.flatnonzero(np.diff(learned.astype(np.int8))) + 1
    starts = np.flatnonzero(places[: len(learned)] == 0) if places is not None else changes
    cuts = sorted({0, *map(int, changes), *map(int, starts), len(learned)})
    for first, end in itertools.pairwise(cuts):
        yield first, end, bool(learned[first])


def _shortened(text: str) -> str:
    if len(text) <= HEAD + TAIL + 40:
        return text
    return f"{text[:HEAD]} [... {len(text) - HEAD - TAIL:,} characters ...] {text[-TAIL:]}"
