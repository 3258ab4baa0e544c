"""Train: run steps, evaluate, save checkpoints, and end.

The step number counts skipped steps too. It alone gives the place in the data, so a checkpoint needs nothing
else for it. A run that was stopped and resumed has the same losses, bit for bit, as an unbroken run of the
same job on the same number of ranks and machine.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from zerodrift.checkpoint import new_file, writing
from zerodrift.engine import StepResult
from zerodrift.errors import NonFiniteError, ZerodriftError, said
from zerodrift.inspect.audit import probe, require_probe
from zerodrift.inspect.check import compare
from zerodrift.inspect.trace import forward_flops, merged, observe
from zerodrift.legible import legible
from zerodrift.plan import Plan
from zerodrift.train.job import Profile
from zerodrift.train.loop.evaluation import BestEvaluation, continue_prompt, evaluate
from zerodrift.train.loop.launcher import END, STEP, Stop, signal_name
from zerodrift.train.loop.session import Session
from zerodrift.train.loop.step import StepDigests, StepRun, find_nonfinite, run_step, save_batches
from zerodrift.train.report.display import Display
from zerodrift.train.report.metrics import Metrics, RunLines, StepMetrics, memory
from zerodrift.train.report.page import run_page

LONGEST_ERROR = 4000


class StepRecorder:
    """Records the steps of `run.profile` on one rank, as a trace for Perfetto or chrome://tracing."""

    def __init__(self, wanted: Profile | None, folder: Path, rank: int, device: str) -> None:
        self._wanted, self.folder, self._rank, self._device = wanted, folder, rank, device
        self._profiler: Any = None
        self.first = self.last = 0

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record step `step`, counted from 1, if it is wanted."""
        wanted = self._wanted
        if wanted is None or not wanted.from_ <= step <= wanted.last:
            yield
            return
        if self._profiler is None:
            kinds = {torch.profiler.ProfilerActivity.CPU}
            kinds |= set() if self._device == "cpu" else torch.profiler.supported_activities()
            # Backwards run in a thread of their own. The option is private in torch.
            threads = _ExperimentalConfig(profile_all_threads=True)
            self._profiler = torch.profiler.profile(activities=kinds, experimental_config=threads)
            self.first = step
            self._profiler.start()
        self.last = step
        with torch.profiler.record_function(f"step {step}"):
            yield

    def write(self) -> bool:
        """Write the steps recorded since the last call; return False if there are none."""
        if self._profiler is None:
            return False
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        steps = f"steps-{self.first:08}-{self.last:08}"
        path = self.folder / f"{steps}-rank-{self._rank}.json.gz"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        return True


class Loop:
    def __init__(self, session: Session, display: Display, stop: Stop) -> None:
        self._session, self._display, self._stop = session, display, stop
        self._outline, self._engine, self._feed = session.outline, session.engine, session.feed
        self._folder, self._run = session.outline.folder, session.outline.job.run
        self._is_first = True
        """Whether the next step is the first of this process, which is compared with the plan."""
        self._skips = 0
        """Skipped steps in a row."""
        self._metrics: Metrics | None = None
        """None except on rank 0."""
        self._tokens = 0
        """Tokens of all steps so far, with padding."""
        self._seconds = 0.0
        """Seconds of all steps so far, without what comes between them."""
        self._asked = ""
        """The signal that asked the run to stop."""
        self._best = BestEvaluation(self._run.patience)
        self._done = 0
        """Steps tried."""
        mesh, traces = self._engine.mesh, self._folder.traces
        self._recorder = StepRecorder(self._run.profile, traces, mesh.rank(), mesh.device.type)

    def run(self) -> str:
        """Train to the end, or until asked to stop; return the signal that ended the run, or an empty
        text."""
        session, folder, say = self._session, self._folder, self._display.say
        job, steps = self._outline.job, self._outline.steps
        if job.audit.at:
            require_probe(self._engine.plan)
        with self._display.doing("looking for a checkpoint"):
            resumed = session.resume()
        step = self._done = resumed.step
        if self._engine.mesh.rank() == 0:
            self._metrics = Metrics(folder, job, step)
            self._seconds = self._lines.last("seconds") or 0.0
            whole = step * self._feed.layout.samples * self._feed.blocks.length
            self._tokens = round(self._lines.last("tokens") or whole)
            if self._metrics.lost:
                lost = f"{self._metrics.lost} that cannot be read, which are left out"
                say(f"{legible(str(folder.metrics))}: lines of earlier steps, {lost}")
        losses = [line["validation_loss"] for line in self._lines.of_kind("evaluation")]
        for loss in self._engine.comm.broadcast_object(losses, 0):
            self._best.add(math.nan if loss is None else loss)
        has_ended = step >= steps or bool(self._best.reason)
        is_done = has_ended and session.is_own(resumed)
        engine = self._engine
        try:
            if self._metrics is not None:
                if not is_done:
                    folder.save_job(job)
                    folder.save_plan(engine.plan)
                    self._write("start", {"step": step, **session.start_line(resumed)})
                texts = session.resume_lines(resumed, self._best.reason, self._display.width)
                wanted = self._run.profile
                is_over = wanted is not None and wanted.last <= step and not folder.traces.is_dir()
                if wanted is not None and is_over and not has_ended:
                    over = f"steps {wanted.from_} to {wanted.last} are over and are not recorded"
                    texts.append(f"{over} (`run.profile`)")
                for text in texts:
                    say(legible(text))
            self._display.start(step, steps, lambda: (engine.micro_batches, engine.accumulation))
            self._stop.doing = STEP
            step = self._train(step)
            self._stop.doing = END
            self._finish(step, is_done)
        except Exception as error:
            with contextlib.suppress(OSError):  # the error may be that of a full disk
                text = str(error)[:LONGEST_ERROR] if isinstance(error, ZerodriftError) else said(error)
                self._write("end", {"step": self._done, "error": text})
                self._report(engine.plan)
            raise
        finally:
            self._display.stop()
            if self._metrics is not None:
                self._metrics.close()
        return self._asked

    def _train(self, step: int) -> int:
        run, steps, began = self._run, self._outline.steps, step
        while step < steps and not self._asked and not self._best.reason:
            step = self._done = self._step(step)
            if self._run.profile is not None and step == self._run.profile.last:
                self._write_trace()
            is_last = step == steps or bool(self._asked)
            if _is_due(run.evaluate_every, step) and not is_last:
                self._evaluate(step)
                self._write_samples(step)
            is_last = is_last or bool(self._best.reason)
            if _is_due(run.export_every, step) and not is_last:
                self._export(self._folder.export_of(step))
            if _is_due(run.checkpoint_every, step) and not is_last:
                self._checkpoint(step)
        if self._best.reason and not self._asked and began < step < steps:
            self._display.say(f"ended after step {step} of {steps}: {self._best.reason}")
        return step

    def _finish(self, step: int, is_done: bool) -> None:
        """End the run. A run that had already ended keeps its page if the page has every line."""
        session = self._session
        self._write_trace()
        if not self._asked and not self._has_line("evaluation", step):
            self._evaluate(step)
        if not self._asked and not self._has_line("sample", step):
            self._write_samples(step)
        if not is_done:
            self._checkpoint(step)
            with self._display.doing("saving"):
                session.checkpoints.wait()
        if self._asked:
            again = "" if self._run.resume == "auto" else " with `--set run.resume=auto`"
            done = f"{signal_name(self._asked)}: step {step} is finished and saved"
            self._display.say(f"{done}; start again{again} to go on")
        elif self._run.export:
            self._export(self._folder.export)
        early = self._best.reason if step < self._outline.steps and not self._asked else ""
        self._write("end", {"step": step, "stopped": self._asked, "early": early})
        if self._metrics is not None and (self._metrics.has_news or not self._folder.report.is_file()):
            self._report(self._folder.load_plan() if is_done else self._engine.plan)

    # --- a step -----------------------------------------------------------------------------------------

    def _step(self, step: int) -> int:
        began = time.perf_counter()
        engine, job, is_first = self._engine, self._outline.job, self._is_first
        smoothed = self._outline.smoothed
        digests = StepDigests(engine) if _is_due(self._run.digest_every, step + 1) else None
        with self._recorder.around(step + 1):
            watched = self._watched(step + 1)
            tried = run_step(engine, self._feed, job.run.seed, step, watched, lambda: self._stop.asked)
        if is_first and smoothed is not None:
            smoothed.require_called(engine.comm, engine.module)
        if digests is not None:
            self._write("digest", digests.line(step + 1, tried.losses))
        result, loss = tried.result, tried.loss
        if tried.asked:
            self._asked = self._stop.by or "another rank"
        if (result.skipped and not engine.scaler.active) or not math.isfinite(loss):
            self._report_nonfinite(step + 1, tried)
        else:
            self._skips = 0
        if self._metrics is not None:
            self._report_step(step + 1, loss, result, time.perf_counter() - began)
        if step + 1 in job.audit.at:
            seen = probe(engine, [batch.inputs() for batch in tried.batches])
            self._write("audit", {"step": step + 1, **asdict(seen)})
        return step + 1

    def _report_step(self, step: int, loss: float, result: StepResult, took: float) -> None:
        tokens = sum(self._feed.tokens(step - 1))
        self._tokens += tokens
        self._seconds += took
        line = StepMetrics(
            step=step,
            loss=loss,
            grad_norm=math.nan if result.grad_norm is None else result.grad_norm,
            lr=result.lr[0] if result.lr else 0.0,
            loss_scale=result.loss_scale,
            tokens=self._tokens,
            epoch=step * self._feed.layout.samples / len(self._feed.blocks),
            seconds=self._seconds,
            tokens_per_second=tokens / took,
            memory=memory(self._feed.layout.device),
            skipped=result.skipped,
        )
        self._write("step", asdict(line))
        if self._session.lock is not None:
            self._session.lock.touch()
        self._display.step(line)

    @contextlib.contextmanager
    def _watched(self, step: int) -> Iterator[None]:
        """Observe the first step of this process, and require the dtypes that the plan declares."""
        is_first, self._is_first = self._is_first, False
        engine, plan, is_compiled = self._engine, self._engine.plan, self._outline.job.model.compile
        with contextlib.ExitStack() as inside:
            if is_first and self._run.check_precision:
                # Compiled code has no operations to observe.
                mine = inside.enter_context(observe(engine, operations=not is_compiled))
                counted = [] if is_compiled else inside.enter_context(forward_flops(engine.module))
            yield
        if not (is_first and self._run.check_precision):
            return
        if plan.policy.pipeline is None:
            tokens = self._feed.tokens(step - 1)[self._feed.layout.numbers[0]]
            if values := flops_per_token(counted, tokens):
                self._write("flops", {"step": step, **values})
        seen = merged(engine.comm.all_gather_object(mine))
        line, wider = compare.line(plan, seen), compare.widened(plan, seen)
        for text in (line, *map(legible, wider)):
            self._display.say(text)
        if self._metrics is not None:
            cells = [list(cell[:-1]) for cell in compare.table(plan, seen)]
            values = {"step": step, "line": line, "logits": sorted(seen.logits)}
            self._write("precision", {**values, "cells": cells, "notes": wider})
            self._folder.save_plan(plan.noted(wider))
        compare.require_declared(plan, seen)

    def _report_nonfinite(self, step: int, tried: StepRun) -> None:
        mesh, folder = self._engine.mesh, self._folder
        trouble = find_nonfinite(self._engine, step, tried.batches, tried.own, tried.result)
        saved = False
        if not mesh.rank("pipeline"):
            saved = save_batches(folder.bad, trouble, tried.batches, mesh.rank("data"))
        self._skips += 1
        where = f"; the batch is in {folder.bad}" if saved or trouble.places else ""
        self._display.say(legible(f"{trouble}{where}"))
        places = "; ".join(f"{p.rank}, {p.micro_batch}, {p.loss:.4g}" for p in trouble.places)
        self._write("skip", {"step": step, "parameters": list(trouble.parameters), "places": places})
        if self._skips > self._run.max_skips:
            must = f"at most {self._run.max_skips} steps in a row may be skipped"
            look_at = f"Look at the batches in {folder.bad}, lower the learning rate"
            todo = f"{look_at}, or clip (`config.gradient_clipping`)."
            raise NonFiniteError(
                "run.max_skips", must, got=f"{self._skips}, the last of them {trouble}", do=todo
            )

    # --- between steps ----------------------------------------------------------------------------------

    def _has_line(self, kind: str, step: int) -> bool:
        """Return True if an ended run has a line of its last step; the same on every rank."""
        found = any(line["step"] == step for line in self._lines.of_kind(kind))
        return bool(self._engine.comm.broadcast_object(found, 0))

    def _write_trace(self) -> None:
        recorder = self._recorder
        with self._display.doing("writing a trace"):
            if not recorder.write():
                return
        first, last = recorder.first, recorder.last
        steps = f"steps {first} to {last}" if last > first else f"step {first}"
        folder = str(recorder.folder)
        self._display.say(legible(f"trace of {steps}, a file for each rank: {folder}"))
        self._write("trace", {"step": last, "first": first, "folder": folder})

    def _write_samples(self, step: int) -> None:
        for prompt in self._run.samples:
            with self._display.doing("writing samples"):
                text = continue_prompt(self._session, prompt)
            is_chat = self._outline.prepared.is_chat
            self._write("sample", {"step": step, "prompt": prompt, "text": text, "chat": is_chat})

    def _evaluate(self, step: int) -> None:
        if self._outline.prepared.validation is None:
            return
        with self._display.doing("evaluating"):
            loss, labels = evaluate(self._session)
        self._display.evaluation(step, loss)
        self._write("evaluation", {"step": step, "validation_loss": loss, "labels": labels})
        if self._best.add(loss) and self._run.export_best:
            self._export(self._folder.best)

    def _export(self, folder: Path) -> None:
        with self._display.doing("exporting"):
            self._session.export(folder)

    def _checkpoint(self, step: int) -> None:
        started = time.perf_counter()
        with self._display.doing("saving"):
            self._session.checkpoint(step)
        if self._metrics is not None:
            took, digest = time.perf_counter() - started, str(self._session.checkpoints.digest)
            self._write("checkpoint", {"step": step, "took": took, "digest": digest})
            self._report(self._engine.plan)

    def _write(self, kind: str, values: dict[str, object]) -> None:
        if self._metrics is not None:
            self._metrics.write(kind, values)

    def _report(self, plan: Plan) -> None:
        """Write the page of the run. Does nothing except on rank 0."""
        if self._metrics is not None:
            text = run_page(self._outline.job, plan, self._lines, self._outline.steps)
            with new_file(self._folder.report) as page:
                page.write_text(text, encoding="utf-8")

    @property
    def _lines(self) -> RunLines:
        return self._metrics.lines if self._metrics is not None else RunLines()


def flops_per_token(counted: Sequence[tuple[str, int | None]], tokens: int) -> dict[str, Any]:
    """Return the flops of a step for each token, or the operations that could not be counted.

    `counted` are the operations of a forward of `tokens`; without flops there is nothing to return.
    """
    if uncounted := sorted({name for name, flops in counted if flops is None}):
        return {"per_token": None, "uncounted": uncounted}
    # A backward counts as two forwards: recomputed activations are not the model's work.
    flops = 3 * sum(flops or 0 for _, flops in counted)
    return {"per_token": flops / tokens} if flops else {}


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
