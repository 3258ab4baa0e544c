"""Evaluate on held-out data and continue prompts, during a run and of one checkpoint alone.

`zerodrift evaluate` gives the number that training wrote at the same checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from zerodrift.engine import item_in
from zerodrift.errors import ConfigError, several
from zerodrift.legible import legible
from zerodrift.train.data.chat_template import prompt_tokens
from zerodrift.train.data.sampling import validation_batches
from zerodrift.train.job import Job
from zerodrift.train.loop.model import positions
from zerodrift.train.loop.resume import checkpoint_to_resume
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.loop.session import Session
from zerodrift.train.loop.step import losses_of
from zerodrift.train.report.display import Display

LONGEST = 64
"""Tokens of a sample."""


def evaluate(session: Session) -> tuple[float, int]:
    """Return the mean loss over the labels of the held-out blocks, and their number. Collective."""
    outline, layout = session.outline, session.feed.layout
    assert outline.prepared.validation is not None
    held = list(validation_batches(outline.prepared.validation, layout, outline.job.run.evaluate_blocks))
    losses = losses_of(session.engine, [batch for batch, _ in held])
    counts = torch.tensor([count for _, count in held], device=losses.device)
    # Every rank sums all micro-batches by their numbers: partial sums would depend on the number of ranks.
    places = losses.new_zeros(len(held), layout.ranks, 2)
    places[:, layout.rank, 0] = torch.where(counts > 0, losses * counts, 0.0)
    places[:, layout.rank, 1] = counts.double()
    every = session.engine.comm.all_reduce_sum(places.view(-1, 2), "data").tolist()
    labels = sum(count for _, count in every)
    return sum(total for total, _ in every) / labels, int(labels)


class BestEvaluation:
    """The lowest validation loss so far, and the number of evaluations after it.

    Both follow from the earlier losses, so a resumed run has the values of an unbroken one.
    """

    def __init__(self, patience: int) -> None:
        """`patience` is the number of evaluations after the best that end the run; 0 never ends it."""
        self._patience = patience
        self._loss, self._since = math.inf, 0

    def add(self, loss: float) -> bool:
        """Return True if a loss is the best so far; NaN never is."""
        is_better = loss < self._loss
        self._loss, self._since = (loss, 0) if is_better else (self._loss, self._since + 1)
        return is_better

    @property
    def reason(self) -> str:
        """Why patience ends the run; empty while it does not."""
        if not 0 < self._patience <= self._since:
            return ""
        times = several(self._since, "evaluation")
        return f"{times} without a better loss than {self._loss:.4f} (`run.patience`)"


def continue_prompt(session: Session, prompt: str) -> str:
    """Continue a prompt greedily for the page of the run, with forwards of the engine. Collective.

    In a job on conversations the prompt is a question in the chat template. The text ends at an end token, at
    the model's last position, or after `LONGEST` tokens: there is no cache of keys and values.
    """
    engine, tokenizer = session.engine, session.outline.tokenizer
    given, ends = prompt_tokens(prompt, tokenizer, session.outline.prepared.is_chat)
    room = positions(engine.module)
    written: list[int] = []
    engine.eval()
    try:
        while len(written) < LONGEST and (room is None or len(given) + len(written) < room):
            ahead = torch.tensor([[*given, *written]], device=engine.mesh.device)
            with torch.no_grad():
                out = engine(input_ids=ahead)
            likeliest = int(item_in(out, "logits")[0, -1].argmax())
            token = engine.comm.broadcast_object(likeliest, 0)
            if token in ends:
                break
            written.append(token)
    finally:
        engine.train()
    return tokenizer.decode(written)


def overrides_to_evaluate(job: Job, overrides: Sequence[str]) -> list[str]:
    """Return overrides that keep an evaluation from writing into the folder of its run."""
    if not job.data.validation:
        must = "must name data to evaluate on: a share of the documents, or files"
        raise ConfigError("data.validation", must, got=job.data.validation)
    folder = RunFolder.of(job)
    start = None if job.run.resume == "never" else checkpoint_to_resume(job.run.resume, folder)
    return [*overrides, *folder.separate_run(job, folder.evaluation, "" if start is None else str(start))]


def evaluate_here(session: Session, show: Display) -> None:
    """Evaluate one checkpoint on this rank, and print the result."""
    job = session.outline.job
    own = None if job.run.resume == "never" else Path(job.run.resume)
    # While a run trains, ranks that look up the newest checkpoint could find different ones.
    path = session.engine.comm.broadcast_object(own, 0)
    if path is None:
        show.say(legible(f"no checkpoint: {job.model.source} before its first step"))
    else:
        resumed, _ = session.load(path)
        show.say(legible(f"after step {resumed.step}, from {path}"))
        for change in resumed.changes:
            matters = change.what.startswith(("data.", "model.", "config.precision"))
            if matters and change.what != "data.cache":
                show.say(legible(f"  {change.what}: was {change.was}, is {change.now}"))
    with show.doing("evaluating"):
        loss, labels = evaluate(session)
    show.say(f"validation loss {loss:.6f}  perplexity {math.exp(min(loss, 700.0)):.4g}  {labels:,} labels")
    for prompt in job.run.samples:
        with show.doing("writing samples"):
            text = continue_prompt(session, prompt)
        is_chat = session.outline.prepared.is_chat
        for line in (f"user: {prompt}", f"assistant: {text}") if is_chat else (f"{prompt}{text}",):
            show.say(legible(line))
