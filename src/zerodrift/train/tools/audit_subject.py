"""What an audit is given of a job: its plan, its model, and micro-batches of its data.

Invariant: the run's folder is only looked at for packed data; nothing of the run is begun.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch

from zerodrift.api import make_plan
from zerodrift.comm.mesh import started
from zerodrift.config.schema import Config
from zerodrift.numerics.runs import Batch, Subject
from zerodrift.plan.dealing import dealt
from zerodrift.plan.table import Plan
from zerodrift.train.data.batches import BatchLayout, Feed
from zerodrift.train.data.prepare import prepare
from zerodrift.train.data.tokenizer import tokenizer
from zerodrift.train.loop import model as models
from zerodrift.train.loop.job import Job
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.loop.session import length_of, numbers_of


@dataclass(frozen=True, slots=True)
class JobToAudit:
    """Of one rank."""

    plan: Plan
    subject: Subject
    batches: list[Batch]


def job_to_audit(job: Job, config: Config, count: int) -> JobToAudit:
    """The job's first `count` micro-batches on this rank, and what they are run on."""
    rank, world = started()
    letters = tokenizer(job.data.tokenizer, job.model.source)
    prepared = prepare(job.data, letters, RunFolder(Path(job.run.folder).expanduser()).cache(job.data.cache))
    _, steps = length_of(job, config, prepared, world)
    source = models.source_of(job.model)
    make = functools.partial(models.build, job.model, source)
    built = make()
    models.check_vocabulary(built, letters.vocabulary, letters.name)
    models.check_positions(built, job.data.block)
    plan = make_plan(config, built, world, auto=numbers_of(job, config, steps))
    batch, numbers = plan.policy.batch, dealt(plan, rank)
    seat = BatchLayout(rank, plan.mesh.data, max(1, batch.micro), numbers, torch.device("cpu"))
    feed = Feed(prepared.train, job.data.seed, seat, job.data.group_by_length)
    taken = itertools.islice(itertools.chain.from_iterable(map(feed.step, itertools.count())), count)
    subject = Subject(make, models.streamed(job.model, source))
    return JobToAudit(plan, subject, [each.inputs() for each in taken])
