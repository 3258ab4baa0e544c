"""A run put together: data, model, engine and folder of a job, and what can be done with them between steps.

Everything that is wrong with a job is found here, before the first step; `loop` only trains.

Invariant: every rank does the same in the same order, and only rank 0 writes what there is one of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.api import initialize
from zerodrift.comm.mesh import started
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.config.schema import Config, Pipeline
from zerodrift.engine.digest import computed_by
from zerodrift.engine.engine import Engine
from zerodrift.errors import CheckpointError, ConfigError, Problems
from zerodrift.io.atomic import new_file
from zerodrift.io.checkpoint.checkpoints import Checkpoints
from zerodrift.io.checkpoint.folder import LATEST, CheckpointFolder
from zerodrift.io.lock import Lock
from zerodrift.io.paths import full_disk_named
from zerodrift.legible import legible
from zerodrift.policy.nouns import Policy
from zerodrift.policy.pipelining import SPLIT
from zerodrift.policy.resolve import mesh_for, resolve
from zerodrift.train.data.batches import BatchLayout, Feed
from zerodrift.train.data.blocks import Blocks
from zerodrift.train.data.hub import cached_names
from zerodrift.train.data.prepare import Prepared, prepare, require_validation
from zerodrift.train.data.sampling import Mixture
from zerodrift.train.data.tokenizer import Tokenizer, tokenizer
from zerodrift.train.loop import model as models
from zerodrift.train.loop.document_mask import require_apart
from zerodrift.train.loop.drivers import Driver
from zerodrift.train.loop.job import Job
from zerodrift.train.loop.launcher import NOTHING, Asked
from zerodrift.train.loop.resume import BASE, JOB, PLACE, STEP, Change, Resumed, beginning, load, packed
from zerodrift.train.loop.run_folder import RunFolder, require_writable
from zerodrift.train.loop.smoothing import SmoothedLoss, smooth
from zerodrift.train.report.boards import check_boards
from zerodrift.train.report.display import Display
from zerodrift.train.report.lines import RunLines
from zerodrift.train.report.page import run_page
from zerodrift.train.report.provenance import environment
from zerodrift.train.report.summary import data_facts, data_text, head_text
from zerodrift.train.tools.adapters import base_digest
from zerodrift.train.tools.profiler import require_inside

NO_COMPILER = "! no compiled kernels: updates are several times slower; `zerodrift doctor` says why"


TOTALS = ("total_num_steps", "num_training_steps")
"""Arguments of schedules that a job knows by itself where the config has "auto"."""


@dataclass(frozen=True)
class Session:
    """A run that is ready to train."""

    job: Job
    folder: RunFolder
    driver: Driver
    tokenizer: Tokenizer
    feed: Feed
    validation: Blocks | Mixture | None
    steps: int
    """Optimizer steps of the whole run."""
    checkpoints: Checkpoints
    key: str
    """Digest of the blocks."""
    data: tuple[tuple[str, str], ...]
    """What was read, for the page."""
    command: str
    """What a person typed."""
    base: str
    """Digest of what adapters are trained on; empty without adapters."""
    smoothed: SmoothedLoss | None
    """The model's loss where labels are smoothed."""
    lock: Lock | None
    """Of the folder, on the rank that writes there."""

    def close(self) -> None:
        """Leave the other ranks, and the folder to others."""
        self.engine.destroy()
        if self.lock is not None:
            self.lock.release()

    @property
    def engine(self) -> Engine:
        """This rank's own."""
        return self.driver.engine

    @property
    def seat(self) -> BatchLayout:
        return self.feed.seat

    def resume(self) -> Resumed:
        """Go on from the folder's newest checkpoint, or the named one."""
        wanted = self.job.run.resume
        if wanted == "never":
            self._require_none()
            return Resumed(0, None)
        path = self._on_one(lambda: beginning(wanted, self.folder))
        if path is None:
            return Resumed(0, None)
        resumed, place = self.load(path)
        if place != self.place:
            keys = [change for change in resumed.changes if _is_of_data(change.what)]
            got = "; ".join(map(_was_and_is, keys)) or "other data, or another `train_batch_size`"
            raise CheckpointError(
                "run.resume",
                "must go on with the data and the batch of the checkpoint",
                got=f"{got}, than in {resumed.checkpoint}",
                do="Set them as they were, or use another `run.folder`.",
            )
        return resumed

    def load(self, path: Path) -> tuple[Resumed, Any]:
        """The state of a checkpoint, and the place in the data that its step stands for."""
        engine, own = self.engine, path.parent == self.folder.checkpoints
        there = self.checkpoints if own else Checkpoints(engine, path.parent, quiet=True)
        loaded, changes = load(there, path, self.job, engine)
        self.checkpoints.run, self.checkpoints.digest = there.run, there.digest
        client = loaded.client if isinstance(loaded.client, dict) else {}
        if self.base and client.get(BASE, self.base) != self.base:
            must, got = "must be the base that the adapters were trained on", "one with other values"
            todo = "Set `model.source`, `model.weights` and `model.seed` as they were."
            raise CheckpointError("model.source", must, got=f"{got} than {loaded.path} says", do=todo)
        return Resumed(int(client.get(STEP, loaded.step)), loaded.path, changes), client.get(PLACE)

    def is_own(self, resumed: Resumed) -> bool:
        """Whether it goes on from a checkpoint of its own folder."""
        return resumed.checkpoint is not None and resumed.checkpoint.parent == self.folder.checkpoints

    def start_facts(self, resumed: Resumed) -> dict[str, Any]:
        """What is written down where training begins or goes on."""
        computed = computed_by(self.engine.mesh.device)
        here = environment(self.command, computed)
        self.folder.save_environment(here)
        return {
            "ranks": self.seat.ranks,
            "steps": self.steps,
            **computed,
            "environment": here,
            "data": self.data,
            "from": "" if resumed.checkpoint is None else str(resumed.checkpoint),
            "changed": [astuple(change) for change in resumed.changes],
        }

    def where_it_begins(self, resumed: Resumed, ended: str) -> list[str]:
        """What a person is told of a run that was begun before; `ended` is why it is over before its last
        step."""
        if resumed.checkpoint is None:
            return []
        step, steps, where = resumed.step, self.steps, resumed.checkpoint
        key = "run.epochs" if self.job.run.steps is None else "run.steps"
        lines = [f"going on after step {step} of {steps}, from {where}"]
        if step >= steps:
            lines = [
                f"nothing to train: the run has had {step} of {steps} steps ({where}). To train on, raise "
                f"`{key}`; to begin anew, use another `run.folder`."
            ]
        elif ended:
            lines = [f"nothing to train: {ended} after step {step} of {steps} ({where})"]
        wanted = self.job.run.resume
        if wanted not in ("auto", "never", LATEST, where.name) and self.is_own(resumed):
            lines += [f"  and not from {wanted}, where it once began: {self.folder.path} is further"]
        return [*lines, *(["changed since it was saved:"] if resumed.changes else []), *_listed(resumed)]

    def _on_one(self, work: Callable[[], Path | None]) -> Path | None:
        """What rank 0 finds in a folder, or refuses, for all: others may see it a moment later."""
        comm = self.engine.comm
        found: list[Path | None] = []
        with raise_on_all_ranks(comm):
            found = [work() if comm.mesh.rank() == 0 else None]
        path: Path | None = comm.broadcast_object(found[0], 0)
        return path

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
        grouped = ["grouped"] if self.job.data.group_by_length else []
        return [self.key, self.job.data.seed, self.seat.samples, *grouped]

    def checkpoint(self, step: int) -> None:
        """Save the run as it is after `step` steps."""
        base = {BASE: self.base} if self.base else {}
        self.checkpoints.save(client={STEP: step, PLACE: self.place, JOB: packed(self.job), **base})

    def export(self, folder: Path) -> None:
        """Write the model as it is now."""
        from zerodrift.train.tools.export import export

        export(self.engine, folder, self.job, self.tokenizer, self.base)

    def report(self, lines: RunLines) -> None:
        """Write the page that a person looks at. On one rank."""
        text = run_page(self.job, self.engine.plan, lines, self.steps)
        with new_file(self.folder.report) as page:
            page.write_text(text, encoding="utf-8")


def _listed(resumed: Resumed) -> list[str]:
    return [f"  {change}" for change in resumed.changes]


def _is_of_data(key: str) -> bool:
    return key.startswith("data.") or "batch" in key or "gradient_accumulation" in key


def _was_and_is(change: Change) -> str:
    return f"`{change.what}` {change.now}, which was {change.was}"


@dataclass(frozen=True)
class Outline:
    """What a job comes to on some ranks, before anything is started."""

    folder: RunFolder
    tokenizer: Tokenizer
    prepared: Prepared
    steps: int
    source: models.ModelSource
    model: nn.Module
    smoothed: SmoothedLoss | None


def outline(job: Job, config: Config, display: Display, world: int) -> Outline:
    """Read the data and build the model; everything that is wrong with either is found here."""
    check_boards(job.run)
    for text in cached_names(job):
        display.say(legible(text))
    folder = RunFolder(Path(job.run.folder).expanduser())
    cache = folder.cache(job.data.cache)
    if job.run.device == "cuda" and not torch.cuda.is_available():
        must, got = "must be a device that this machine has", "'cuda', where torch finds no GPU"
        raise ConfigError("run.device", must, got=got, do="Set `run.device: cpu`.")
    require_writable("run.folder", folder.path)
    require_writable("data.cache", cache)
    letters = tokenizer(job.data.tokenizer, job.model.source)
    require_validation(job)
    source = models.source_of(job.model)
    with display.doing("building the model"):
        built = models.build(job.model, source)
    models.check_causal(built, job.model.source)
    models.check_vocabulary(built, letters.vocabulary, letters.name)
    models.check_positions(built, job.data.block)
    smoothed = smooth(built, job.data.label_smoothing)
    with display.doing("reading the data"), full_disk_named(cache):
        prepared = prepare(job.data, letters, cache)
    policy, steps = length_of(job, config, prepared, world)
    _require_decided(policy)
    _require_of_the_run(job, built, letters, steps)
    require_inside(job.run.profile, steps)
    return Outline(folder, letters, prepared, steps, source, built, smoothed)


def assemble(job: Job, config: Config, display: Display, asked: Asked = NOTHING) -> Session:
    """Put a run together, saying what there is."""
    made = outline(job, config, display, started()[1])
    folder, letters, prepared, steps = made.folder, made.tokenizer, made.prepared, made.steps
    base = "" if job.model.lora is None else base_digest(made.model)
    with display.doing("placing the model"):
        driver = _driver(job, config, made.model, made.source, numbers_of(job, config, steps))
    engine = driver.engine
    lock = None
    try:
        lock = _locked(folder, engine)
        models.prepare(engine.module, [unit.name for unit in engine.plan.units], job.model)
        if engine.mesh.rank() == 0:
            _write_head(folder, job, engine)
            display.say(head_text(engine.plan, display, asked.whole_plan))
            display.say(data_text(job, prepared, steps, engine.plan, display))
            if engine.mesh.device.type == "cpu" and computed_by(engine.mesh.device)["kernels"] == "plain":
                display.say(NO_COMPILER)
        engine.seed = job.run.seed
        feed = Feed(prepared.train, job.data.seed, _seat(engine), job.data.group_by_length)
        if prepared.train.separate_documents:
            require_apart(driver, feed.seat, job.data.block, letters.vocabulary)
        checkpoints = Checkpoints(
            engine,
            folder.checkpoints,
            keep=job.run.keep,
            asynchronous=job.run.asynchronous_checkpoints,
            quiet=True,
        )
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
            data_facts(job, prepared, letters, steps, engine.plan),
            asked.command,
            base,
            made.smoothed,
            lock,
        )
    except BaseException:
        engine.destroy()
        if lock is not None:
            lock.release()
        raise


def _locked(folder: RunFolder, engine: Engine) -> Lock | None:
    """The folder for this run alone: two that write metrics and checkpoints there would lose each other's."""
    with raise_on_all_ranks(engine.comm):
        if engine.mesh.rank() != 0:
            return None
        try:
            return Lock.take(folder.path)
        except CheckpointError as error:
            must, todo = "must have one run at a time", "Wait for it, or use another `run.folder`."
            got = f"{folder.path} with {error.got}"
            raise CheckpointError("run.folder", must, got=got, do=todo) from error


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
    if job.run.samples:
        must = "must be empty with `config.pipeline`, which forwards micro-batches of a step alone"
        problems.add("run.samples", must, got=f"{len(job.run.samples)} of them", do="Use `zerodrift sample`.")
    if job.data.group_by_length:
        must = "must be false with `config.pipeline`, whose stages pass on one shape"
        problems.add("data.group_by_length", must, got="true", do="Use `data.pack: true`.")
    if job.model.compile and pipeline.schedule in SPLIT:
        must = f"must be false under {pipeline.schedule}, which splits backwards"
        problems.add("model.compile", must, got="true", do="Use gpipe, 1f1b or interleaved.")
    problems.raise_as(ConfigError)


# --- numbers ------------------------------------------------------------------------------------------


def length_of(job: Job, config: Config, prepared: Prepared, world: int) -> tuple[Policy, int]:
    """What the config means on these ranks, and how many steps that makes."""
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


def _require_of_the_run(job: Job, model: nn.Module, letters: Tokenizer, steps: int) -> None:
    """That what is asked for on the way can be done on it."""
    problems = Problems()
    if late := [step for step in job.audit.at if step > steps]:
        problems.add("audit.at", f"must be steps of the run, which has {steps:,}", got=f"{late[0]:,}")
    room = models.positions(model)
    for prompt in job.run.samples:
        count = len(letters.start) + len(letters.encode(prompt))
        if room is not None and count >= room:
            must = f"must leave room in the model's {room:,} positions"
            problems.add("run.samples", must, got=f"{count:,} tokens of {prompt[:40]!r}", do="Shorten it.")
    problems.raise_as(ConfigError)


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
    return {**job.auto, **{key: steps for key in _totals(config) if key not in job.auto}}


def _totals(config: Config) -> list[str]:
    """Keys of the config that ask for the number of steps."""
    params = {} if config.scheduler is None else config.scheduler.params
    return [f"scheduler.params.{name}" for name in TOTALS if params.get(name) == "auto"]


def needs_length(job: Job, config: Config) -> bool:
    """Whether the config asks for a number of steps that only the data can tell."""
    return job.run.steps is None and any(key not in job.auto for key in _totals(config))


def _seat(engine: Engine) -> BatchLayout:
    batch, mesh = engine.plan.policy.batch, engine.mesh
    numbers = engine.micro_batches_of_this_rank()
    return BatchLayout(mesh.rank("data"), mesh.size("data"), batch.micro, numbers, mesh.device)


# --- what is said before the first step -----------------------------------------------------------------


def _write_head(folder: RunFolder, job: Job, engine: Engine) -> None:
    folder.save_job(job)
    folder.save_plan(engine.plan)
