"""The loss on what is held out: while a run goes, and of one of its checkpoints by itself.

Invariant: `zerodrift evaluate` comes to the number that training wrote down at the same checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zerodrift.errors import ConfigError
from zerodrift.legible import legible
from zerodrift.train.data.batches import validation_batches
from zerodrift.train.loop.job import Job
from zerodrift.train.loop.resume import beginning
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.loop.session import Session
from zerodrift.train.loop.writing import continuation
from zerodrift.train.report.display import Display


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of the held-out blocks."""

    loss: float
    """Mean over their labels."""
    labels: int


def evaluated(session: Session) -> Evaluation | None:
    """Every rank calls it; None where nothing is held out."""
    if session.validation is None:
        return None
    seat, most = session.seat, session.job.run.evaluate_blocks
    held = list(validation_batches(session.validation, seat, most))
    losses = session.driver.losses([batch.batch for batch in held])
    counts = torch.tensor([batch.labels for batch in held], device=losses.device)
    # By the numbers of micro-batches over all ranks: a sum of ranks' sums would depend on their number.
    places = losses.new_zeros(len(held), seat.ranks, 2)
    places[:, seat.rank, 0] = torch.where(counts > 0, losses * counts, 0.0)
    places[:, seat.rank, 1] = counts.double()
    every = session.engine.comm.all_reduce_sum(places.view(-1, 2), "data").tolist()
    labels = sum(count for _, count in every)
    return Evaluation(sum(total for total, _ in every) / labels, int(labels))


# --- by itself --------------------------------------------------------------------------------------------


def apart(job: Job, overrides: Sequence[str]) -> list[str]:
    """Overrides by which a job is evaluated, and its run's folder left as it is."""
    if not job.data.validation:
        must = "must say what to evaluate on: a share of the documents, or files"
        raise ConfigError("data.validation", must, got=job.data.validation)
    folder = RunFolder(Path(job.run.folder).expanduser())
    start = None if job.run.resume == "never" else beginning(job.run.resume, folder)
    values = {
        "run.folder": str(folder.evaluation),
        "run.resume": "never" if start is None else str(start),
        "run.tensorboard": False,
        "run.wandb": "",
        "data.cache": str(folder.cache(job.data.cache)),
    }
    return [*overrides, *(f"{key}={json.dumps(value)}" for key, value in values.items())]


def evaluate_here(job: Job, session: Session, show: Display) -> None:
    """One rank of an evaluation, which says what it found."""
    own = None if job.run.resume == "never" else Path(job.run.resume)
    # A run that is under way may have saved another between two ranks' looks.
    path = session.engine.comm.broadcast_object(own, 0)
    if path is None:
        show.say(legible(f"no checkpoint: {job.model.source} as it is before its first step"))
    else:
        resumed, _ = session.load(path)
        show.say(legible(f"after step {resumed.step}, from {path}"))
        for change in resumed.changes:
            if change.what.startswith(_TOLD) and change.what != "data.cache":
                show.say(legible(f"  {change.what}: was {change.was}, is {change.now}"))
    with show.doing("evaluating"):
        found = evaluated(session)
    assert found is not None
    perplexity = math.exp(min(found.loss, 700.0))
    show.say(f"validation loss {found.loss:.6f}  perplexity {perplexity:.4g}  {found.labels:,} labels")
    for prompt in job.run.samples:
        with show.doing("writing samples"):
            text = continuation(session.engine, session.tokenizer, prompt)
        show.say(legible(f"{prompt}{text}"))


_TOLD = ("data.", "model.", "config.precision")
"""Keys that an evaluation depends on."""
