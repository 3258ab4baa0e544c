"""The loop: data in, steps, evaluations, checkpoints, and when to end.

It decides which step comes next and what is written after it; the engine trains, `feed` has the data,
`trouble` knows what went wrong, `display` shows it. A step is counted when it was tried, skipped ones too,
so the count alone says where in the data a run is, and is all that a checkpoint needs to know of it.

Invariant: with the same job, number of ranks and machine, a run that was stopped or killed and gone on with
leaves the same losses, to the last digit, as one that was not.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from zerodrift.engine.engine import Engine
from zerodrift.engine.progress import StepResult
from zerodrift.errors import NonFiniteError, ZerodriftError, said
from zerodrift.legible import legible
from zerodrift.numerics.during import look, require_lookable
from zerodrift.observer import compare
from zerodrift.observer.observe import observe
from zerodrift.observer.observed import merged
from zerodrift.train.data.batches import Feed, MicroBatch
from zerodrift.train.loop import nonfinite
from zerodrift.train.loop.best import BestEvaluation
from zerodrift.train.loop.digests import DigestsOfStep
from zerodrift.train.loop.evaluation import evaluated
from zerodrift.train.loop.session import Session
from zerodrift.train.loop.signals import END, STEP, Stop, shown
from zerodrift.train.loop.smoothing import require_called
from zerodrift.train.loop.step import take_step
from zerodrift.train.loop.writing import continuation
from zerodrift.train.report.display import Display
from zerodrift.train.report.lines import RunLines, StepMetrics
from zerodrift.train.report.metrics import Metrics, kind_of, memory
from zerodrift.train.tools.flops import TRAINING, ForwardFlops
from zerodrift.train.tools.profiler import StepRecorder


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int
    """Steps tried in all."""
    steps: int
    """Steps that were asked for."""
    loss: float | None
    """Of the last step; None where no step was left to take."""
    stopped: str
    """The signal that ended it, `""` where it came to its end."""


@dataclass
class _Clock:
    """Seconds of training: evaluations, checkpoints and reports are not in it."""

    spent: float
    since: float = field(default_factory=time.perf_counter)

    def pause(self) -> None:
        self.spent += time.perf_counter() - self.since

    def go_on(self) -> None:
        self.since = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.spent + time.perf_counter() - self.since


class Loop:
    """One run over one engine."""

    def __init__(self, session: Session, display: Display, stop: Stop) -> None:
        self._session = session
        self._driver = session.driver
        self._engine: Engine = session.driver.engine
        self._feed: Feed = session.feed
        self._run = session.job.run
        self._display = display
        self._stop = stop
        self._first = True
        """Whether the next step is this process's first: the one that is looked at."""
        self._skips = 0
        """In a row."""
        self._metrics: Metrics | None = None
        self._loss: float | None = None
        self._tokens = 0
        """In all steps so far, with padding."""
        self._asked = ""
        self._best = BestEvaluation(self._run.patience)
        self._done = 0
        """Steps tried."""
        mesh = self._engine.mesh
        traces = session.folder.traces
        self._recorder = StepRecorder(self._run.profile, traces, mesh.rank(), mesh.device.type)

    @property
    def _leads(self) -> bool:
        return self._engine.mesh.rank() == 0

    def run(self) -> Outcome:
        """Train to the end, or until somebody asks to stop."""
        session = self._session
        if session.job.audit.at:
            require_lookable(self._engine.plan)
        with self._display.doing("looking for a checkpoint"):
            resumed = session.resume()
        step = self._done = resumed.step
        if self._leads:
            self._metrics = Metrics(session.folder, self._run, step)
            self._tokens = self._metrics.tokens(step, self._feed.seat.samples * self._feed.blocks.length)
            if self._metrics.lost:
                lost = f"{self._metrics.lost} that cannot be read, which are left out"
                self._display.say(f"{legible(str(session.folder.metrics))}: lines of earlier steps, {lost}")
        self._best = BestEvaluation(self._run.patience, self._evaluated())
        ended = step >= session.steps or self._best.is_out_of_patience
        if self._leads:
            if not ended:
                self._write("start", {"step": step, **session.start_facts(resumed)})
            missed = "" if ended else self._recorder.missed(step)
            for text in (*session.where_it_begins(resumed, self._why_early), *filter(None, [missed])):
                self._display.say(legible(text))
        try:
            self._display.start(step, session.steps, self._micro_batches)
            self._stop.doing = STEP
            step = self._train(step)
            self._stop.doing = END
            self._finish(step, saved=ended and session.is_own(resumed))
        except Exception as error:
            if self._leads:
                with contextlib.suppress(OSError):  # a disk that is full now was so before
                    self._write("end", {"step": self._done, "error": _error_text(error)})
                    session.report(self._lines)
            raise
        finally:
            self._display.stop()
            if self._metrics is not None:
                self._metrics.close()
        return Outcome(step, session.steps, self._loss, self._asked)

    def _train(self, step: int) -> int:
        run, session, began = self._run, self._session, step
        clock = _Clock(self._metrics.seconds if self._metrics is not None else 0.0)
        while step < session.steps and not self._asked and not self._best.is_out_of_patience:
            step = self._done = self._step(step, clock)
            clock.pause()
            if self._recorder.is_due(step):
                self._write_trace()
            last = step == session.steps or bool(self._asked)
            if _is_due(run.evaluate_every, step) and not last:
                self._evaluate(step)
                self._write_samples(step)
            last = last or self._best.is_out_of_patience
            if _is_due(run.export_every, step) and not last:
                self._export(session.folder.export_of(step))
            if _is_due(run.checkpoint_every, step) and not last:
                self._checkpoint(step)
            clock.go_on()
        if self._why_early and not self._asked and began < step < session.steps:
            self._display.say(f"ended after step {step} of {session.steps}: {self._why_early}")
        return step

    @property
    def _why_early(self) -> str:
        return self._best.words if self._best.is_out_of_patience else ""

    def _micro_batches(self) -> tuple[int, int]:
        """Of the step that is under way: done, and all."""
        return self._engine.micro_batches, self._engine.accumulation

    def _finish(self, step: int, saved: bool) -> None:
        """What is done after the last step; `saved` says whether its checkpoint is there already."""
        session = self._session
        self._write_trace()
        if not self._asked and not self._has("evaluation", step):
            self._evaluate(step)
        if not self._asked and not self._has("sample", step):
            self._write_samples(step)
        if not saved:
            with self._display.doing("saving"):
                session.checkpoint(step)
                session.checkpoints.wait()
        if self._asked:
            again = "" if self._run.resume == "auto" else " with `--set run.resume=auto`"
            done = f"{shown(self._asked)}: step {step} is finished and saved"
            self._display.say(f"{done}; start again{again} to go on")
        elif self._run.export:
            self._export(session.folder.export)
        if self._leads:
            early = self._why_early if step < session.steps and not self._asked else ""
            self._write("end", {"step": step, "stopped": self._asked, "early": early})
            session.report(self._lines)

    # --- a step -----------------------------------------------------------------------------------------

    def _step(self, step: int, clock: _Clock) -> int:
        """Step number `step`, counted from 0; returns how many have been tried."""
        before = clock.seconds
        digests = DigestsOfStep(self._engine) if _is_due(self._run.digest_every, step + 1) else None
        first = self._first
        with self._recorder.around(step + 1):
            watched = self._watched(step + 1, digests)
            taken = take_step(self._session, step, watched, lambda: self._stop.asked)
        if first:
            model = type(self._engine.module).__name__
            require_called(self._session.smoothed, self._engine.comm, model)
        if digests is not None:
            self._write("digest", digests.line(step + 1, taken.losses))
        result, loss = taken.result, taken.loss
        if taken.asked:
            self._asked = self._stop.by or "another rank"
        bad = result.skipped and not self._engine.scaler.active
        if bad or not math.isfinite(loss):
            self._trouble(step + 1, taken.batches, taken.own, result)
        else:
            self._skips = 0
        self._loss = loss
        if self._leads:
            self._tell(step + 1, loss, result, clock.seconds, clock.seconds - before)
        if step + 1 in self._session.job.audit.at:
            seen = look(self._engine, [batch.inputs() for batch in taken.batches])
            self._write("audit", {"step": step + 1, **asdict(seen)})
        return step + 1

    @contextlib.contextmanager
    def _watched(self, step: int, digests: DigestsOfStep | None) -> Iterator[None]:
        with self._looking(step), digests or contextlib.nullcontext():
            yield

    def _tell(self, step: int, loss: float, result: StepResult, seconds: float, took: float) -> None:
        feed = self._feed
        tokens = sum(feed.tokens(step - 1))
        self._tokens += tokens
        line = StepMetrics(
            step=step,
            loss=loss,
            grad_norm=math.nan if result.grad_norm is None else result.grad_norm,
            lr=result.lr[0] if result.lr else 0.0,
            loss_scale=result.loss_scale,
            tokens=self._tokens,
            epoch=feed.epoch(step),
            seconds=seconds,
            tokens_per_second=tokens / took,
            memory=memory(feed.seat.device),
            skipped=result.skipped,
        )
        if self._metrics is not None:
            self._metrics.step(line)
        if self._session.lock is not None:
            self._session.lock.touch()
        self._display.step(line)

    # --- the first step ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _looking(self, step: int) -> Iterator[None]:
        """The first step is watched, and must do what the plan says."""
        first, self._first = self._first, False
        if not first or not self._run.check_precision:
            yield
            return
        model, compiled = self._engine.module, self._session.job.model.compile
        flops = ForwardFlops()
        # What is compiled is not seen operation by operation.
        counted = contextlib.nullcontext() if compiled else flops.counting(model)
        with observe(self._engine, operations=not compiled) as mine, counted:
            yield
        seat = self._feed.seat
        if flops.found and self._leads and self._engine.plan.policy.pipeline is None:
            tokens = self._feed.tokens(step - 1)[seat.numbers[0]]
            self._write("flops", {"step": step, "per_token": TRAINING * flops.found / tokens})
        seen = merged(self._engine.comm.all_gather_object(mine))
        plan = self._engine.plan
        self._display.say(compare.line(plan, seen))
        wider = compare.widened(plan, seen)
        for note in wider:
            self._display.say(legible(note))
        if self._leads:
            cells = [
                [c.column, c.declared, c.seen, c.parameters, c.numel, c.verdict]
                for c in compare.table(plan, seen)
            ]
            values = {"step": step, "line": compare.line(plan, seen), "logits": sorted(seen.logits)}
            self._write("precision", {**values, "cells": cells, "notes": wider})
            self._session.folder.save_plan(plan.noted(wider))
        compare.require_declared(plan, seen)

    # --- what is not finite -----------------------------------------------------------------------------

    def _trouble(self, step: int, batches: list[MicroBatch], losses: list[float], result: StepResult) -> None:
        engine, folder = self._engine, self._session.folder
        trouble = nonfinite.examine(self._driver, step, batches, losses, result)
        saved = []
        if not engine.mesh.rank("pipeline"):
            saved = nonfinite.save(folder.bad, trouble, batches, engine.mesh.rank("data"))
        self._skips += 1
        where = f"; the batch is in {folder.bad}" if saved or trouble.places else ""
        self._display.say(legible(f"{trouble}{where}"))
        if self._leads:
            places = "; ".join(f"{p.rank}, {p.micro_batch}, {p.loss:.4g}" for p in trouble.places)
            self._write("skip", {"step": step, "parameters": list(trouble.parameters), "places": places})
        if self._skips > self._run.max_skips:
            raise NonFiniteError(
                "run.max_skips",
                f"at most {self._run.max_skips} steps in a row may be skipped",
                got=f"{self._skips}, the last of them {trouble}",
                do=(
                    f"Look at the batches in {folder.bad}, lower the learning rate, or clip "
                    "(`config.gradient_clipping`)."
                ),
            )

    # --- between steps ----------------------------------------------------------------------------------

    def _has(self, kind: str, step: int) -> bool:
        """Whether a run that had come to its end has a line of its last step; the same on every rank."""
        found = any(kind_of(line, kind) and line["step"] == step for line in self._lines)
        return bool(self._engine.comm.broadcast_object(found, 0))

    def _write_trace(self) -> None:
        """What was recorded, once; every rank writes its own."""
        with self._display.doing("writing a trace"):
            recorded = self._recorder.write()
        if recorded is not None:
            self._display.say(legible(str(recorded)))
            if self._leads:
                steps = {"step": recorded.last, "first": recorded.first}
                self._write("trace", {**steps, "folder": str(recorded.folder)})

    def _write_samples(self, step: int) -> None:
        """What the model goes on with now."""
        for prompt in self._run.samples:
            with self._display.doing("writing samples"):
                text = continuation(self._engine, self._session.tokenizer, prompt)
            if self._leads:
                self._write("sample", {"step": step, "prompt": prompt, "text": text})

    def _evaluate(self, step: int) -> None:
        """The mean loss over the labels of the held-out blocks."""
        if self._session.validation is None:
            return
        with self._display.doing("evaluating"):
            found = evaluated(self._session)
        assert found is not None
        loss = found.loss
        self._display.evaluation(step, loss)
        if self._leads:
            self._write("evaluation", {"step": step, "validation_loss": loss, "labels": found.labels})
        if self._best.take(loss) and self._run.export_best:
            self._export(self._session.folder.best)

    def _evaluated(self) -> list[float | None]:
        """The losses of the evaluations so far; the same on every rank."""
        lines = [line for line in self._lines if kind_of(line, "evaluation")]
        found: list[float | None] = [line["validation_loss"] for line in lines]
        return list(self._engine.comm.broadcast_object(found, 0))

    def _export(self, folder: Path) -> None:
        with self._display.doing("exporting"):
            self._session.export(folder)

    def _checkpoint(self, step: int) -> None:
        started = time.perf_counter()
        with self._display.doing("saving"):
            self._session.checkpoint(step)
        if self._leads:
            took, digest = time.perf_counter() - started, str(self._session.checkpoints.digest)
            self._write("checkpoint", {"step": step, "took": took, "digest": digest})
            self._session.report(self._lines)

    def _write(self, kind: str, values: dict[str, object]) -> None:
        if self._metrics is not None:
            self._metrics.write(kind, values)

    @property
    def _lines(self) -> RunLines:
        return self._metrics.lines if self._metrics is not None else RunLines()


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _error_text(error: BaseException) -> str:
    """In full, for the page; a defect of the program by its class."""
    return str(error)[:_MOST] if isinstance(error, ZerodriftError) else said(error)


_MOST = 4000
"""Letters of an error that are kept."""
