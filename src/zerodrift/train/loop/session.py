"""Assemble the data, model, engine and folder of a job, and do the work between its steps.

Every mistake in a job is found here, before the first step. Ranks do the same work in the same order. Files
that a run has once are written by rank 0.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import textwrap
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.api import initialize, make_plan
from zerodrift.checkpoint import LATEST, CheckpointFolder, Checkpoints, Lock
from zerodrift.comm import raise_on_all_ranks, started
from zerodrift.config import Config, Pipeline
from zerodrift.engine import Engine, computed_by
from zerodrift.errors import CheckpointError, ConfigError, Problems
from zerodrift.inspect.audit import Batch, Subject
from zerodrift.legible import legible
from zerodrift.model import ModelSpec, describe
from zerodrift.plan import Plan, rank_micro_batches
from zerodrift.policy import SPLIT, AutoValues, Policy, mesh_for, need_of, resolve
from zerodrift.train.data.chat_template import prompt_tokens
from zerodrift.train.data.files import cached_names
from zerodrift.train.data.prepare import PreparedData, packing_of, prepare, require_validation
from zerodrift.train.data.sampling import BatchLayout, Feed
from zerodrift.train.data.tokenizer import Tokenizer, TransformersTokenizer, copy_tokenizer, load_tokenizer
from zerodrift.train.job import Job
from zerodrift.train.job_file import numbers_of, totals
from zerodrift.train.loop import model as models
from zerodrift.train.loop import resume
from zerodrift.train.loop.resume import ResumePoint
from zerodrift.train.loop.run_folder import BASE, JOB, PLACE, STEP, RunFolder, require_writable
from zerodrift.train.report.display import Display
from zerodrift.train.report.metrics import check_boards
from zerodrift.train.report.summary import data_facts, data_text, environment, head_text
from zerodrift.train.tools import adapters
from zerodrift.weights import export

WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
NO_COMPILER = "! no compiled kernels: updates are several times slower; `zerodrift doctor` says why"


@dataclass(frozen=True)
class Outline:
    """A job with its data on some ranks, before an engine is started."""

    job: Job
    folder: RunFolder
    tokenizer: Tokenizer
    prepared: PreparedData
    steps: int
    source: models.ModelSource
    smoothed: models.SmoothedLoss | None


@dataclass(frozen=True)
class Session:
    outline: Outline
    engine: Engine
    feed: Feed
    checkpoints: Checkpoints
    command: str
    base: str
    """Digest of the base of adapters; empty without adapters."""
    lock: Lock | None
    """Lock of the folder, on rank 0."""

    def close(self) -> None:
        self.engine.destroy()
        if self.lock is not None:
            self.lock.release()

    def resume(self) -> ResumePoint:
        """Load the checkpoint that `run.resume` names, if there is one. Collective."""
        wanted, folder, comm = self.outline.job.run.resume, self.outline.folder, self.engine.comm
        if wanted == "never":
            if there := comm.broadcast_object(CheckpointFolder(folder.checkpoints).tags(), 0):
                must = "must be `auto` for a folder with checkpoints"
                got = f"never, and {', '.join(there)} in {folder.checkpoints}"
                todo = "Use another `run.folder`, or remove them."
                raise CheckpointError("run.resume", must, got=got, do=todo)
            return ResumePoint(0, None)
        own: Path | None = None
        with raise_on_all_ranks(comm):
            if comm.mesh.rank() == 0:  # the folder may change before other ranks read it
                own = resume.checkpoint_to_resume(wanted, folder)
        path: Path | None = comm.broadcast_object(own, 0)
        if path is None:
            return ResumePoint(0, None)
        resumed, place = self.load(path)
        if place != self.place:
            must = "must go on with the data and the batch of the checkpoint"
            names = ("data.", "batch", "gradient_accumulation")
            keys = [change for change in resumed.changes if any(name in change.what for name in names)]
            changed = "; ".join(f"`{change.what}` {change.now}, which was {change.was}" for change in keys)
            got = f"{changed or 'other data, or another `train_batch_size`, than'} in {resumed.checkpoint}"
            todo = "Set them as they were, or use another `run.folder`."
            raise CheckpointError("run.resume", must, got=got, do=todo)
        return resumed

    def load(self, path: Path) -> tuple[ResumePoint, Any]:
        """Load a checkpoint, and return the place in the data that its step stands for."""
        is_own = path.parent == self.outline.folder.checkpoints
        there = self.checkpoints if is_own else Checkpoints(self.engine, path.parent, quiet=True)
        loaded, changes = resume.load(there, path, self.outline.job, self.engine)
        self.checkpoints.run, self.checkpoints.digest = there.run, there.digest
        client = loaded.client if isinstance(loaded.client, dict) else {}
        if self.base and client.get(BASE, self.base) != self.base:
            must, got = "must be the base that the adapters were trained on", "one with other values"
            todo = "Set `model.source`, `model.weights` and `model.seed` as they were."
            raise CheckpointError("model.source", must, got=f"{got} than {loaded.path} says", do=todo)
        step = int(client.get(STEP, loaded.step))
        return ResumePoint(step, loaded.path, changes), client.get(PLACE)

    def is_own(self, resumed: ResumePoint) -> bool:
        own = self.outline.folder.checkpoints
        return resumed.checkpoint is not None and resumed.checkpoint.parent == own

    def start_line(self, resumed: ResumePoint) -> dict[str, Any]:
        """Return the metrics line for the start of training, and write the environment."""
        outline, computed = self.outline, computed_by(self.engine.mesh.device)
        here = environment(self.command, computed)
        outline.folder.environment.write_text(json.dumps(here, indent=1) + "\n", encoding="utf-8")
        return {
            "ranks": self.feed.layout.ranks,
            "steps": outline.steps,
            **computed,
            "environment": here,
            "data": data_facts(
                outline.job, outline.prepared, outline.tokenizer, outline.steps, self.engine.plan
            ),
            "from": "" if resumed.checkpoint is None else str(resumed.checkpoint),
            "changed": [astuple(change) for change in resumed.changes],
        }

    def resume_lines(self, resumed: ResumePoint, early: str, width: int) -> list[str]:
        """Return what is printed about a checkpoint; `early` says why the run has ended before its steps."""
        job, steps, step, where = self.outline.job, self.outline.steps, resumed.step, resumed.checkpoint
        if where is None:
            return []
        lines, changes = [f"going on after step {step} of {steps}, from {where}"], resumed.changes
        if step >= steps:
            key = "run.epochs" if job.run.steps is None else "run.steps"
            lines = [
                f"nothing to train: the run has had {step} of {steps} steps ({where}). To train on, raise "
                f"`{key}`; to start over, use another `run.folder`."
            ]
            changes = ()
        elif early:
            lines, changes = [f"nothing to train: {early} after step {step} of {steps} ({where})"], ()
        wanted = job.run.resume
        if wanted not in ("auto", "never", LATEST, where.name) and self.is_own(resumed):
            lines.append(
                f"  and not from {wanted}, where it once began: {self.outline.folder.path} is further"
            )
        if changes:
            lines.append("changed since it was saved:")
        for change in changes:
            lines += textwrap.wrap(f"  {change}", width, subsequent_indent="    ", **WHOLE_WORDS)
        return lines

    @property
    def place(self) -> list[Any]:
        """All that decides which blocks of the data a step has."""
        data = self.outline.job.data
        grouped = ["grouped"] if data.group_by_length else []
        return [self.outline.prepared.key, data.seed, self.feed.layout.samples, *grouped]

    def checkpoint(self, step: int) -> None:
        base = {BASE: self.base} if self.base else {}
        client = {STEP: step, PLACE: self.place, JOB: resume.packed(self.outline.job), **base}
        self.checkpoints.save(client=client)

    def export(self, folder: Path) -> None:
        """Write the model in the dtypes of the `export` column; adapters with the digest of their base.

        Collective.
        """
        engine, model, tokenizer = self.engine, self.outline.job.model, self.outline.tokenizer
        if model.lora is None:
            export(engine, folder, overwrite=True)
        else:
            adapters.write(engine, folder, model.source, self.base)
        if engine.mesh.rank() == 0 and isinstance(tokenizer, TransformersTokenizer):
            copy_tokenizer(Path(tokenizer.name), folder)
        engine.comm.barrier()


def outline(job: Job, config: Config, display: Display, world: int) -> tuple[Outline, nn.Module]:
    """Read the data, build the model, and check both."""
    check_boards(job.run)
    for text in cached_names(job):
        display.say(legible(text))
    folder = RunFolder.of(job)
    cache = folder.cache(job.data.cache)
    if job.run.device == "cuda" and not torch.cuda.is_available():
        must, got = "must be a device that this machine has", "'cuda', where torch finds no GPU"
        raise ConfigError("run.device", must, got=got, do="Set `run.device: cpu`.")
    require_writable("run.folder", folder.path)
    require_writable("data.cache", cache)
    tokenizer = load_tokenizer(job.data.tokenizer, job.model.source)
    require_validation(job)
    if config.pipeline is not None and config.pipeline.stages > 1:
        _require_cuttable(job, config.pipeline)
    source = models.source_of(job.model)
    with display.doing("building the model"):
        model = models.build(source)
    models.check_model(model, job, tokenizer)
    smoothing = job.data.label_smoothing
    smoothed = models.SmoothedLoss(model, smoothing) if smoothing else None
    with display.doing("reading the data"):
        prepared = prepare(job.data, tokenizer, cache)
    policy, steps = _length_of(job, config, prepared, world)
    problems = Problems()
    if policy.optimizer is None:
        problems.add("config.optimizer", "must be given: a block with `type` and `params`", got="none")
    if not policy.batch.micro:
        must = "must be given, or `train_batch_size`: nothing else decides it here"
        problems.add("config.train_micro_batch_size_per_gpu", must, got="neither")
    problems.raise_as(ConfigError)
    _require_within_run(job, model, tokenizer, steps, prepared.is_chat)
    return Outline(job, folder, tokenizer, prepared, steps, source, smoothed), model


def assemble(
    job: Job, config: Config, display: Display, command: str = "", whole_plan: bool = False
) -> Session:
    """Start the engine of a job, and print its plan and its data. Collective."""
    made, model = outline(job, config, display, started()[1])
    folder, prepared, weights = made.folder, made.prepared, made.source.weights
    config = resume.with_order_of_run(config, job.run.resume, folder)
    base = "" if job.model.lora is None else adapters.base_digest(model, weights)
    is_cut = config.pipeline is not None and job.model.lora is None  # `parts` does not name adapters
    with display.doing("placing the model"):
        engine = initialize(
            model,
            None,
            config,
            parts=models.parts(job.model) if is_cut else None,
            weights=weights,
            device=None if job.run.device == "auto" else job.run.device,
            auto=numbers_of(job, config, made.steps),
            quiet=True,
        )
    mesh, plan, lock = engine.mesh, engine.plan, None
    try:
        with raise_on_all_ranks(engine.comm):  # two runs would overwrite each other's files
            lock = Lock.take(folder.path) if mesh.rank() == 0 else None
        models.prepare(engine.module, [unit.name for unit in plan.units], job.model)
        if mesh.rank() == 0:
            display.say(head_text(plan, display, whole_plan))
            display.say(data_text(job, prepared, made.steps, plan, display))
            if mesh.device.type == "cpu" and computed_by(mesh.device)["kernels"] == "plain":
                display.say(NO_COMPILER)
        engine.seed = job.run.seed
        engine.determinism.ask(need_of(False, job.run.digest_every), engine.module)
        numbers, micro = engine.micro_batches_of_this_rank(), plan.policy.batch.micro
        layout = BatchLayout(mesh.rank("data"), mesh.size("data"), micro, numbers, mesh.device)
        feed = Feed(prepared.train, job.data.seed, layout, job.data.group_by_length)
        if prepared.train.separate_documents:
            models.require_document_mask(engine, layout, job.data.block, made.tokenizer.vocabulary)
        is_async = job.run.asynchronous_checkpoints
        checkpoints = Checkpoints(
            engine, folder.checkpoints, keep=job.run.keep, asynchronous=is_async, quiet=True
        )
        return Session(made, engine, feed, checkpoints, command, base, lock)
    except BaseException:
        engine.destroy()
        if lock is not None:
            lock.release()
        raise


def _require_cuttable(job: Job, pipeline: Pipeline) -> None:
    samples = f"{len(job.run.samples)} of them"
    adapters = "must be absent with `config.pipeline`: adapters are not cut"
    prompts = "must be empty with `config.pipeline`, which only forwards the micro-batches of a step"
    lengths = "must be false with `config.pipeline`, whose stages pass on tensors of one shape"
    splits = f"must be false under {pipeline.schedule}, which splits backwards"
    is_split = job.model.compile and pipeline.schedule in SPLIT
    problems = Problems()
    for is_broken, key, must, got, todo in (
        (job.model.lora is not None, "model.lora", adapters, "both", "Use one of the two."),
        (bool(job.run.samples), "run.samples", prompts, samples, "Use `zerodrift sample`."),
        (job.data.group_by_length, "data.group_by_length", lengths, "true", "Use `data.pack: true`."),
        (is_split, "model.compile", splits, "true", "Use gpipe, 1f1b or interleaved."),
    ):
        if is_broken:
            problems.add(key, must, got=got, do=todo)
    problems.raise_as(ConfigError)


def _length_of(job: Job, config: Config, prepared: PreparedData, world: int) -> tuple[Policy, int]:
    mesh = mesh_for(config, world)
    policy = resolve(config, mesh, numbers_of(job, config, job.run.steps))
    if job.run.steps is not None:
        return policy, job.run.steps
    samples = policy.batch.train or policy.batch.accumulation * mesh.data
    steps = math.floor(job.run.epochs * len(prepared.train) / samples)
    if steps < 1:
        must = f"must make at least one step of {samples} blocks"
        got = f"{job.run.epochs:g} of {len(prepared.train)} blocks"
        is_cut = all(packing_of(job.data, each.counts.kind) == "stream" for each in prepared.sets)
        todo = f"Set `run.steps`, {'lower `data.block`, ' if is_cut else ''}or lower the batch size."
        raise ConfigError("run.epochs", must, got=got, do=todo)
    return policy, steps


def _require_within_run(job: Job, model: nn.Module, tokenizer: Tokenizer, steps: int, is_chat: bool) -> None:
    """Refuse audits and profiles beyond the last step, and prompts that fill the model's positions."""
    problems = Problems()
    if late := [step for step in job.audit.at if step > steps]:
        problems.add("audit.at", f"must be steps of the run, which has {steps:,}", got=f"{late[0]:,}")
    wanted = job.run.profile
    if wanted is not None and wanted.last > steps:
        must = f"must lie within the {steps:,} steps of the run"
        got, todo = f"steps {wanted.from_} to {wanted.last}", "Lower `from` or `steps`, or raise `run.steps`."
        problems.add("run.profile", must, got=got, do=todo)
    room = models.positions(model)
    for prompt in job.run.samples:
        count = len(prompt_tokens(prompt, tokenizer, is_chat)[0])
        if room is not None and count >= room:
            must = f"must leave room in the model's {room:,} positions"
            problems.add("run.samples", must, got=f"{count:,} tokens of {prompt[:40]!r}", do="Shorten it.")
    problems.raise_as(ConfigError)


# --- jobs without a run: no rank is started, no weights are placed ---------------------------------------


def prepared_data(job: Job) -> tuple[Tokenizer, PreparedData]:
    """Return the tokenizer and the blocks of a job, which are made if they are not in the cache."""
    tokenizer = load_tokenizer(job.data.tokenizer, job.model.source)
    return tokenizer, prepare(job.data, tokenizer, RunFolder.of(job).cache(job.data.cache))


def planned_from(job: Job, config: Config, world: int) -> tuple[ModelSpec, AutoValues]:
    """Return a job's model and the values of its "auto" keys on so many ranks."""
    steps = job.run.steps
    if job.run.steps is None and any(key not in job.auto for key in totals(config)):
        _, steps = _length_of(job, config, prepared_data(job)[1], world)
    return describe(models.build(models.source_of(job.model))), numbers_of(job, config, steps)


def job_to_audit(job: Job, config: Config, count: int) -> tuple[Plan, Subject, list[Batch]]:
    """Return a job's plan and model, and its first `count` micro-batches on this rank."""
    rank, world = started()
    tokenizer, prepared = prepared_data(job)
    _, steps = _length_of(job, config, prepared, world)
    source = models.source_of(job.model)
    make = functools.partial(models.build, source)
    model = make()
    models.check_model(model, job, tokenizer)
    plan = make_plan(config, model, world, auto=numbers_of(job, config, steps))
    micro = max(1, plan.policy.batch.micro)
    layout = BatchLayout(rank, plan.mesh.data, micro, rank_micro_batches(plan, rank), torch.device("cpu"))
    feed = Feed(prepared.train, job.data.seed, layout, job.data.group_by_length)
    batches = itertools.islice(itertools.chain.from_iterable(map(feed.step, itertools.count())), count)
    return plan, Subject(make, source.weights), [batch.inputs() for batch in batches]
