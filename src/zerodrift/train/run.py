"""A run put together: data, model, engine and folder of a job, and what can be done with them between steps.

Everything that is wrong with a job is found here, before the first step; `loop` only trains.

Invariant: every rank does the same in the same order, and only rank 0 writes what there is one of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zerodrift.api import initialize
from zerodrift.comm.mesh import started
from zerodrift.config.schema import Config, Pipeline
from zerodrift.engine.engine import Engine
from zerodrift.errors import CheckpointError, ConfigError, Problems
from zerodrift.io.checkpoint.checkpoints import Checkpoints, Loaded
from zerodrift.io.checkpoint.folder import CheckpointFolder
from zerodrift.pipeline.schedules import timeline
from zerodrift.plan.cost import cost
from zerodrift.policy.nouns import Policy
from zerodrift.policy.pipelining import SPLIT
from zerodrift.policy.resolve import mesh_for, resolve
from zerodrift.report.rows import grouped
from zerodrift.report.terminal import plan_text
from zerodrift.train import model as models
from zerodrift.train.blocks import Blocks
from zerodrift.train.boards import check_boards
from zerodrift.train.display import Display
from zerodrift.train.drivers import Driver
from zerodrift.train.feed import BatchLayout, Feed
from zerodrift.train.folder import RunFolder
from zerodrift.train.job import Job
from zerodrift.train.pack import Prepared, prepare
from zerodrift.train.page import run_page
from zerodrift.train.tokens import Tokenizer, tokenizer

TOTAL = "scheduler.params.total_num_steps"
"""The number that a job knows by itself where the config has "auto"."""


@dataclass(frozen=True)
class Session:
    """A run that is ready to train."""

    job: Job
    folder: RunFolder
    driver: Driver
    tokenizer: Tokenizer
    feed: Feed
    validation: Blocks | None
    steps: int
    """Optimizer steps of the whole run."""
    checkpoints: Checkpoints
    key: str
    """Digest of the blocks."""

    @property
    def engine(self) -> Engine:
        """This rank's own."""
        return self.driver.engine

    @property
    def seat(self) -> BatchLayout:
        return self.feed.seat

    def resume(self) -> int:
        """Go on from the folder's newest checkpoint, or the named one; how many steps were tried."""
        wanted = self.job.run.resume
        if wanted == "never":
            self._require_none()
            return 0
        if wanted == "auto":
            loaded = self.checkpoints.resume()
        else:
            loaded = self._named(wanted)
        if loaded is None:
            return 0
        self.engine.seed = self.job.run.seed  # a job's is written down, and may be changed there
        client = loaded.client if isinstance(loaded.client, dict) else {}
        if client.get("data") != self.place:
            raise CheckpointError(
                "run.resume",
                "must go on with the data and the batch of the checkpoint",
                got=f"another `data` block, other files, or another `train_batch_size` than {loaded.path}",
                do="Use another `run.folder`, or `run.resume: never`.",
            )
        return int(client["step"])

    def _named(self, wanted: str) -> Loaded:
        """A checkpoint of this folder by its tag, or another one by its path."""
        path = Path(wanted).expanduser()
        if path.name == wanted:
            return self.checkpoints.load(wanted)
        there = Checkpoints(self.engine, path.parent, quiet=True)
        loaded = there.load(path.name)
        self.checkpoints.run = there.run
        return loaded

    def _require_none(self) -> None:
        """Before the first step, and not when the first checkpoint is to be saved."""
        there = self.engine.comm.broadcast_object(CheckpointFolder(self.folder.checkpoints).tags(), 0)
        if there:
            raise CheckpointError(
                "run.resume",
                "must be `auto` for a folder with checkpoints",
                got=f"never, and {', '.join(there)} in {self.folder.checkpoints}",
                do="Use another `run.folder`, or remove them.",
            )

    @property
    def place(self) -> list[Any]:
        """What a step's number means in the data depends on these."""
        return [self.key, self.job.data.seed, self.seat.samples]

    def checkpoint(self, step: int) -> None:
        """Save the run as it is after `step` steps."""
        self.checkpoints.save(client={"step": step, "data": self.place})

    def export(self) -> None:
        """Write the trained model."""
        from zerodrift.train.export import export

        export(self.engine, self.folder.export, self.job, self.tokenizer)

    def report(self, lines: list[dict[str, Any]]) -> None:
        """Write the page that a person looks at. On one rank."""
        text = run_page(self.job, self.engine.plan, lines, self.steps)
        beside = self.folder.report.with_suffix(".new")
        beside.write_text(text, encoding="utf-8")
        beside.replace(self.folder.report)


def assemble(job: Job, config: Config, display: Display) -> Session:
    """Put a run together, saying what there is."""
    check_boards(job.run)
    folder = RunFolder(Path(job.run.folder).expanduser())
    letters = tokenizer(job.data.tokenizer, job.model.source)
    prepared = prepare(job.data, letters, folder.cache(job.data.cache))
    policy, steps = length_of(job, config, prepared)
    _require_decided(policy)
    source = models.source_of(job.model)
    built = models.build(job.model, source)
    models.check_vocabulary(built, letters.vocabulary, letters.name)
    models.check_positions(built, job.data.block)
    driver = _driver(job, config, built, source, numbers_of(job, config, steps))
    engine = driver.engine
    try:
        models.prepare(engine.module, [unit.name for unit in engine.plan.units], job.model)
        if engine.mesh.rank() == 0:
            _write_head(folder, job, engine)
            display.say(_plan_text(engine, display.color))
            display.say(_data_text(prepared, letters, steps, engine))
        engine.seed = job.run.seed
        feed = Feed(prepared.train, job.data.seed, _seat(engine))
        checkpoints = Checkpoints(engine, folder.checkpoints, keep=job.run.keep, quiet=True)
        return Session(
            job,
            folder,
            driver,
            letters,
            feed,
            prepared.validation,
            steps,
            checkpoints,
            prepared.key,
        )
    except BaseException:
        engine.destroy()
        raise


def _driver(
    job: Job, config: Config, model: nn.Module, source: models.ModelSource, numbers: Mapping[str, Any]
) -> Driver:
    weights = models.streamed(job.model, source)
    device = None if job.run.device == "auto" else job.run.device
    if config.pipeline is not None and config.pipeline.stages > 1:
        _require_cuttable(job, config.pipeline)
    cut = config.pipeline is not None and job.model.lora is None  # adapters are not in what `parts` names
    parts = models.parts(job.model) if cut else None
    return Driver(
        initialize(model, None, config, parts=parts, weights=weights, device=device, auto=numbers, quiet=True)
    )


def _require_cuttable(job: Job, pipeline: Pipeline) -> None:
    problems = Problems()
    if job.model.lora is not None:
        must = "must be absent with `config.pipeline`: adapters are not cut"
        problems.add("model.lora", must, got="both", do="Use one of the two.")
    if job.model.compile and pipeline.schedule in SPLIT:
        must = f"must be false under {pipeline.schedule}, which splits backwards"
        problems.add("model.compile", must, got="true", do="Use gpipe, 1f1b or interleaved.")
    problems.raise_as(ConfigError)


# --- numbers ------------------------------------------------------------------------------------------


def length_of(job: Job, config: Config, prepared: Prepared) -> tuple[Policy, int]:
    """What the config means on these ranks, and how many steps that makes."""
    _, world = started()
    mesh = mesh_for(config, world)
    policy = resolve(config, mesh, numbers_of(job, config, job.run.steps or 1))
    if job.run.steps is not None:
        return policy, job.run.steps
    samples = max(1, policy.batch.micro) * policy.batch.accumulation * mesh.data
    steps = math.floor(job.run.epochs * len(prepared.train) / samples)
    if steps < 1:
        raise ConfigError(
            "run.epochs",
            f"must make at least one step of {samples} blocks",
            got=f"{job.run.epochs:g} of {len(prepared.train)} blocks",
            do="Set `run.steps`, lower the batch size, or lower `data.block`.",
        )
    return policy, steps


def _require_decided(policy: Policy) -> None:
    """Refuse a config that leaves to its caller what nobody decides here."""
    problems = Problems()
    if policy.optimizer is None:
        problems.add("config.optimizer", "must be given: a block with `type` and `params`", got="none")
    if not policy.batch.micro:
        must = "must be given, or `train_batch_size`: nothing else decides it here"
        problems.add("config.train_micro_batch_size_per_gpu", must, got="neither")
    problems.raise_as(ConfigError)


def numbers_of(job: Job, config: Config, steps: int) -> Mapping[str, Any]:
    """What "auto" numbers stand for: the job's, and the number of steps."""
    scheduler = config.scheduler
    asked = scheduler is not None and scheduler.params.get("total_num_steps") == "auto"
    own = {TOTAL: steps} if asked and TOTAL not in job.auto else {}
    return {**job.auto, **own}


def _seat(engine: Engine) -> BatchLayout:
    batch, mesh = engine.plan.policy.batch, engine.mesh
    numbers = engine.micro_batches_of_this_rank()
    return BatchLayout(mesh.rank("data"), mesh.size("data"), batch.micro, numbers, mesh.device)


# --- what is said before the first step -----------------------------------------------------------------


def _write_head(folder: RunFolder, job: Job, engine: Engine) -> None:
    folder.save_job(job)
    folder.save_plan(engine.plan)


def _plan_text(engine: Engine, color: bool) -> str:
    plan = engine.plan
    return plan_text(plan, cost(plan), grouped(plan), timeline(plan), color=color)


def _data_text(prepared: Prepared, letters: Tokenizer, steps: int, engine: Engine) -> str:
    seat = _seat(engine)
    held = f", {len(prepared.validation):,} held out" if prepared.validation is not None else ""
    epochs = steps * seat.samples / len(prepared.train)
    return "\n".join(
        [
            f"data: {len(prepared.train):,} blocks of {prepared.train.length} tokens ({prepared.kind}, "
            f"{letters.name}){held}",
            *(f"data: {note}" for note in prepared.notes),
            f"training: {steps:,} steps of {seat.samples} blocks, {epochs:.2f} epochs",
        ]
    )
