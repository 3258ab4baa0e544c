"""A job without its training: what it comes to on some ranks, from one process and without a device.

Invariant: no rank is started, no weights are placed, and nothing is written but packed data in its cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from zerodrift.api import make_plan
from zerodrift.config.schema import Config
from zerodrift.legible import legible
from zerodrift.model.sources import describe
from zerodrift.model.spec import ModelSpec
from zerodrift.plan.table import Plan
from zerodrift.policy.numbers import AutoValues
from zerodrift.train.data.prepare import prepare
from zerodrift.train.data.tokenizer import tokenizer
from zerodrift.train.loop import model as models
from zerodrift.train.loop.job import Job
from zerodrift.train.loop.job_file import read_job
from zerodrift.train.loop.resume import beginning
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.loop.session import (
    length_of,
    needs_length,
    numbers_of,
    outline,
)
from zerodrift.train.loop.wording import worded_for_a_job
from zerodrift.train.report.display import Display
from zerodrift.train.report.live import display
from zerodrift.train.report.summary import data_text, head_text


@worded_for_a_job()
def plan_of(job: Job, config: Config, world: int) -> Plan:
    """The plan of a job. Its data is only read where a number of steps follows from it."""
    model, auto = planned_from(job, config, world)
    return make_plan(config, model, world, auto=auto)


def planned_from(job: Job, config: Config, world: int) -> tuple[ModelSpec, AutoValues]:
    """What a job's plan is made from beside its config: the model, and the numbers that it leaves open."""
    steps = job.run.steps or 1
    if needs_length(job, config):
        letters = tokenizer(job.data.tokenizer, job.model.source)
        cache = RunFolder(Path(job.run.folder).expanduser()).cache(job.data.cache)
        _, steps = length_of(job, config, prepare(job.data, letters, cache), world)
    built = models.build(job.model, models.source_of(job.model))
    return describe(built), numbers_of(job, config, steps)


def dry_run(source: str, overrides: Sequence[str], ranks: int, whole_plan: bool) -> None:
    """Say what `train` would, up to its first step."""
    job, config = read_job(source, overrides)
    show = display(0, job.run.log_every)
    try:
        _said(job, config, ranks, whole_plan, show)
    finally:
        show.stop()


def _said(job: Job, config: Config, ranks: int, whole_plan: bool, show: Display) -> None:
    folder = Path(job.run.folder).expanduser()
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        made = outline(job, config, show, ranks)
    finally:
        for place in new:  # made to see that it can be
            with contextlib.suppress(OSError):
                place.rmdir()
    plan = make_plan(config, made.model, ranks, auto=numbers_of(job, config, made.steps))
    show.say(head_text(plan, show, whole_plan))
    show.say(data_text(job, made.prepared, made.steps, plan, show))
    there = None if job.run.resume == "never" else beginning(job.run.resume, made.folder)
    begins = "would begin anew" if there is None else f"would go on from {there}"
    show.say(legible(f"dry run: {begins}, in {made.folder.path}; nothing was started"))
