"""What a person sees while a run goes: one live line on a terminal, plain lines elsewhere.

Only rank 0 shows anything. What is said beside the line (the plan, notes, evaluations) is printed above it.

Invariant: a figure is written alike on the terminal, in a log and in the report.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Protocol

from zerodrift.legible import encodable
from zerodrift.report.figures import elements, significant, size
from zerodrift.train.metrics import StepMetrics


class Display(Protocol):
    """Somebody who is told."""

    color: bool

    def start(self, step: int, steps: int) -> None: ...

    def say(self, text: str) -> None: ...

    def step(self, step: StepMetrics) -> None: ...

    def evaluation(self, step: int, loss: float) -> None: ...

    def stop(self) -> None: ...


def display(rank: int, every: int) -> Display:
    """For this rank and its stdout."""
    if rank:
        return SilentDisplay()
    return LiveDisplay() if sys.stdout.isatty() else LineDisplay(every)


def figures(step: StepMetrics) -> list[str]:
    """A step in words: what a line shows, from left to right."""
    texts = [f"loss {step.loss:.4f}", f"norm {_number(step.grad_norm)}", f"lr {step.lr:.2e}"]
    if step.loss_scale != 1.0:
        texts.append(f"scale {step.loss_scale:g}")
    texts += [f"{elements(round(step.tokens_per_second))} tokens/s", size(step.memory)]
    return [*texts, "skipped"] if step.skipped else texts


def _number(value: float) -> str:
    return significant(value) if math.isfinite(value) else f"{value}"


def clock(seconds: float) -> str:
    """`1:02:03`, `4:05`."""
    total = round(seconds)
    hours, rest = divmod(total, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class Pace:
    """How long the rest takes, by the steps of the last while."""

    def __init__(self) -> None:
        self._recent: list[tuple[int, float]] = []

    def remaining(self, step: StepMetrics, steps: int) -> float | None:
        """Seconds to the end; None before it can be told."""
        self._recent = [*self._recent[-20:], (step.step, step.seconds)]
        (first, since), (last, now) = self._recent[0], self._recent[-1]
        return (now - since) / (last - first) * (steps - step.step) if last > first else None


class SilentDisplay:
    """Every rank but the first."""

    color = False

    def start(self, step: int, steps: int) -> None: ...

    def say(self, text: str) -> None: ...

    def step(self, step: StepMetrics) -> None: ...

    def evaluation(self, step: int, loss: float) -> None: ...

    def stop(self) -> None: ...


class LineDisplay:
    """A file or a pipe: a line per so many steps."""

    color = False

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0
        self._pace = Pace()

    def start(self, step: int, steps: int) -> None:
        self._steps = steps
        if step:
            self.say(f"going on after step {step}")

    def say(self, text: str) -> None:
        print(encodable(text, sys.stdout.encoding), flush=True)

    def step(self, step: StepMetrics) -> None:
        left = self._pace.remaining(step, self._steps)
        if step.step % self._every and step.step != self._steps and not step.skipped:
            return
        eta = [f"eta {clock(left)}"] if left is not None else []
        self.say("  ".join([f"step {step.step}/{self._steps}", *figures(step), *eta]))

    def evaluation(self, step: int, loss: float) -> None:
        self.say(f"step {step}  validation loss {loss:.4f}")

    def stop(self) -> None: ...


class LiveDisplay:
    """A terminal: a bar and the figures of the last step, drawn over and over."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, markup=False, emoji=False)
        self.color = self._console.color_system is not None and not self._console.no_color
        self._bar: Any = None
        self._task: Any = None
        self._steps = 0
        self._pace = Pace()
        self._validation = ""

    def start(self, step: int, steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._steps = steps
        if step:
            self.say(f"going on after step {step}")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[eta]}", style="dim"),
        )
        self._bar = Progress(*columns, console=self._console, expand=True)
        self._task = self._bar.add_task(f"step {step}/{steps}", total=steps, completed=step, eta="")
        self._bar.start()

    def say(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text))

    def step(self, step: StepMetrics) -> None:
        left = self._pace.remaining(step, self._steps)
        words = "  ".join([f"step {step.step}/{self._steps}", *figures(step)])
        if self._validation:
            words += f"  val {self._validation}"
        eta = f"eta {clock(left)}" if left is not None else ""
        self._bar.update(self._task, completed=step.step, description=words, eta=eta)
        if step.skipped:
            self.say(f"step {step.step} skipped, loss scale {step.loss_scale:g}")

    def evaluation(self, step: int, loss: float) -> None:
        self._validation = f"{loss:.4f}"
        self.say(f"step {step}  validation loss {loss:.4f}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
