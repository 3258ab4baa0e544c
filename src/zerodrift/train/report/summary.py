"""Summarize a job in words: its plan, its data with a preview, the length of the run, and the environment."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from zerodrift import legible
from zerodrift.pipeline import timeline
from zerodrift.plan import Plan, cost
from zerodrift.report import brief_text, grid, group_rows, plan_text, render
from zerodrift.train.data.blocks import IGNORED, BlockValues
from zerodrift.train.data.prepare import PreparedData, prepare, require_validation
from zerodrift.train.data.sampling import WINDOW, GroupedSampler, lengths_of, padding_shares, sampler_of
from zerodrift.train.data.tokenizer import Tokenizer, load_tokenizer
from zerodrift.train.job import Job, Run
from zerodrift.train.loop import model as models
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.report.display import Display
from zerodrift.versions import TESTED, __version__

SAMPLES = 3
HEAD, TAIL = 300, 200
"""Characters shown of the start and the end of a long text."""
_MARKS = "[[learned]] not learned. The order is that of training."


def head_text(plan: Plan, display: Display, whole_plan: bool) -> str:
    """Return the plan in a few lines, or in full."""
    look: Any = {"color": display.color, "width": display.width}
    if whole_plan:
        return plan_text(plan, cost(plan), group_rows(plan), timeline(plan), **look)
    return brief_text(plan, cost(plan), group_rows(plan), **look).rstrip("\n")


def data_facts(
    job: Job, prepared: PreparedData, tokenizer: Tokenizer, steps: int, plan: Plan
) -> tuple[tuple[str, str], ...]:
    train, blocks = prepared.train, steps * plan.policy.batch.train
    whole = " in whole blocks" if job.data.group_by_length else ""
    run = f"{blocks * train.length:,} tokens{whole}, {blocks / len(train):.2f} epochs"
    padding = _padding(job, prepared, steps, plan)
    return (*prepared.facts(), ("tokenizer", tokenizer.name), *padding, ("this run", run))


def data_text(job: Job, prepared: PreparedData, steps: int, plan: Plan, display: Display) -> str:
    """Return the data and the length of the run in a few lines."""
    samples = plan.policy.batch.train
    training = f"{steps:,} steps of {samples} blocks, {steps * samples / len(prepared.train):.2f} epochs"
    source = models.source_of(job.model)
    if source.config is not None and source.weights is None:
        training += ", begun with random weights"
    if job.run.steps is not None and job.run.epochs != Run().epochs:
        training += f"; `run.epochs` {job.run.epochs:g} is not used, as `run.steps` is given"
    facts = [*prepared.lines(), ("training", training), *_padding(job, prepared, steps, plan)]
    lines = [(label.ljust(len("optimizer")), text) for label, text in facts]  # as wide as the plan's lines
    return render([grid(lines, (10,), ("bold",), display.width)], display.color, display.width).rstrip("\n")


def _padding(job: Job, prepared: PreparedData, steps: int, plan: Plan) -> list[tuple[str, str]]:
    """Return the share of padding with `data.group_by_length`; without it the data's facts have the share."""
    train = prepared.train
    if not job.data.group_by_length:
        return []
    some = min(steps, 2 * WINDOW)
    sampler = GroupedSampler(sampler_of(train, job.data.seed), lengths_of(train), job.data.seed)
    batch = plan.policy.batch
    with_groups, without = padding_shares(sampler, some, batch.train, batch.micro, train.length)
    what = "of what is computed" if some == steps else f"of the first {some} steps"
    return [("padding", f"{with_groups:.1%} {what}; {without:.1%} without `data.group_by_length`")]


# --- a preview of the data --------------------------------------------------------------------------------


def preview(job: Job, *, color: bool, width: int) -> str:
    """Return what was read, and the first blocks in the order of training.

    Learned text stands between `[[` and `]]`, and is green where there is colour. Blocks are made if they are
    not in the cache.
    """
    require_validation(job)
    tokenizer, source = load_tokenizer(job.data.tokenizer, job.model.source), models.source_of(job.model)
    if source.config is not None and job.model.lora is None:  # others would be built in memory for this
        models.check_model(models.build(source), job, tokenizer)
    prepared = prepare(job.data, tokenizer, RunFolder.of(job).cache(job.data.cache))
    facts = [*prepared.facts(), ("tokenizer", f"{tokenizer.name}, {tokenizer.vocabulary:,} tokens")]
    parts: list[RenderableType] = [grid(facts, (24,), ("bold",), width)]
    count = len(prepared.train)
    for index in sampler_of(prepared.train, job.data.seed).step(0, min(SAMPLES, count)):
        read = prepared.train.read(np.array([index]))
        learned = f"{int((read.labels[0] != IGNORED).sum()):,} of {len(read.tokens[0]):,} tokens learned"
        parts.append(Text(f"\nblock {index + 1:,} of {count:,}, {learned}", style="bold"))
        parts.append(Padding(_text(read, tokenizer), (0, 0, 0, 2)))
    return render([*parts, Text(f"\n{_MARKS}", style="dim")], color, width)


def _text(read: BlockValues, tokenizer: Tokenizer) -> Text:
    tokens, learned = read.tokens[0], read.labels[0] != IGNORED
    content = np.flatnonzero(learned | (tokens != tokenizer.end))
    used = int(content[-1]) + 1 if len(content) else 0
    text = Text()
    places = None if read.positions is None else read.positions[0]
    # Runs of tokens of one document that are all learned, or all not.
    changes = np.flatnonzero(np.diff(learned[:used].astype(np.int8))) + 1
    starts = np.flatnonzero(places[:used] == 0) if places is not None else changes
    for first, end in itertools.pairwise(sorted({0, *map(int, changes), *map(int, starts), used})):
        is_learned = bool(learned[first])
        if first and places is not None and places[first] == 0:
            text.append("\n--- another document ---\n", style="dim")
        shown = _shortened(legible.lines(tokenizer.shown(tokens[first:end].tolist())))
        text.append(f"[[{shown}]]" if is_learned else shown, style="green" if is_learned else "")
    if used < len(tokens):
        text.append(f"\n(padding: {len(tokens) - used:,})", style="dim")
    return text


def _shortened(text: str) -> str:
    if len(text) <= HEAD + TAIL + 40:
        return text
    return f"{text[:HEAD]} [... {len(text) - HEAD - TAIL:,} characters ...] {text[-TAIL:]}"


def environment(command: str, computed: Mapping[str, object]) -> dict[str, str]:
    """Return the command, machine and versions of a run. `computed` are the facts that its bits depend on.

    Versions are those of imported packages. Relative paths of a job start in `folder`, the working folder.
    """
    # The commit of the working folder, `-dirty` with changed files; empty outside of a repository.
    command_of_git = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command_of_git, capture_output=True, text=True, timeout=5, check=True)
        commit = done.stdout.strip()
    packages = [name for name in (*TESTED, "peft", "triton") if name != "python"]
    found = {
        "command": command,
        "folder": os.getcwd(),
        "commit": commit,
        "host": socket.gethostname(),
        "system": platform.platform(terse=True),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "zerodrift": __version__,
        "python": platform.python_version(),
        **{name: str(getattr(sys.modules.get(name), "__version__", "")) for name in packages},
        **{key: str(value) for key, value in computed.items() if key != "torch"},
    }
    return {key: value for key, value in found.items() if value}
