"""Resolve a job without training it: its plan, a dry run, and the model and batches of an audit.

No rank is started, no weights are placed, and nothing is written but blocks of data in the cache.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence

import torch

from zerodrift.api import make_plan
from zerodrift.comm import started
from zerodrift.config import Config
from zerodrift.inspect.audit import Batch, Subject
from zerodrift.legible import legible
from zerodrift.model import ModelSpec, describe
from zerodrift.plan import Plan, rank_micro_batches
from zerodrift.policy import AutoValues
from zerodrift.train.data.prepare import prepare
from zerodrift.train.data.sampling import BatchLayout, Feed
from zerodrift.train.data.tokenizer import tokenizer
from zerodrift.train.job import Job
from zerodrift.train.job_file import read_job, worded_for_a_job
from zerodrift.train.loop import model as models
from zerodrift.train.loop.launcher import join, joined_ranks
from zerodrift.train.loop.resume import checkpoint_to_resume
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.loop.session import length_of, needs_length, numbers_of, outline
from zerodrift.train.loop.start import processes, refused_files
from zerodrift.train.report.display import display
from zerodrift.train.report.summary import data_text, head_text


@worded_for_a_job()
def planned_from(job: Job, config: Config, world: int) -> tuple[ModelSpec, AutoValues]:
    steps = job.run.steps or 1
    if needs_length(job, config):
        letters = tokenizer(job.data.tokenizer, job.model.source)
        cache = RunFolder.of(job).cache(job.data.cache)
        _, steps = length_of(job, config, prepare(job.data, letters, cache), world)
    model = models.build(job.model, models.source_of(job.model))
    return describe(model), numbers_of(job, config, steps)


def dry_run(source: str, overrides: Sequence[str], nproc: int | None, whole_plan: bool) -> None:
    """Print what `train` would print before its first step."""
    job, config = read_job(source, overrides)
    ranks = joined_ranks() if join() else processes(job, nproc)
    show = display(0, job.run.log_every)
    folder = RunFolder.of(job).path
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with refused_files(), worded_for_a_job():
            made = outline(job, config, show, ranks)
            plan = make_plan(config, made.model, ranks, auto=numbers_of(job, config, made.steps))
            show.say(head_text(plan, show, whole_plan))
            show.say(data_text(job, made.prepared, made.steps, plan, show))
            start = None if job.run.resume == "never" else checkpoint_to_resume(job.run.resume, made.folder)
            begins = "would begin anew" if start is None else f"would go on from {start}"
            show.say(legible(f"dry run: {begins}, in {made.folder.path}; nothing was started"))
    finally:
        show.stop()
        for place in new:  # made to check that it can be
            with contextlib.suppress(OSError):
                place.rmdir()


def job_to_audit(job: Job, config: Config, count: int) -> tuple[Plan, Subject, list[Batch]]:
    """Return a job's plan and model, and its first `count` micro-batches on this rank."""
    rank, world = started()
    letters = tokenizer(job.data.tokenizer, job.model.source)
    prepared = prepare(job.data, letters, RunFolder.of(job).cache(job.data.cache))
    _, steps = length_of(job, config, prepared, world)
    source = models.source_of(job.model)
    make = functools.partial(models.build, job.model, source)
    model = make()
    models.check_vocabulary(model, letters.vocabulary, letters.name)
    models.check_positions(model, job.data.block)
    plan = make_plan(config, model, world, auto=numbers_of(job, config, steps))
    micro = max(1, plan.policy.batch.micro)
    seat = BatchLayout(rank, plan.mesh.data, micro, rank_micro_batches(plan, rank), torch.device("cpu"))
    feed = Feed(prepared.train, job.data.seed, seat, job.data.group_by_length)
    batches = itertools.islice(itertools.chain.from_iterable(map(feed.step, itertools.count())), count)
    subject = Subject(make, source.weights)
    return plan, subject, [batch.inputs() for batch in batches]
