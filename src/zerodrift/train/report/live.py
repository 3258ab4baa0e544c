"""What a terminal shows while a run goes: one line, drawn over and over, with what fits of it.

It is drawn several times a second whatever the run does, so that a step of minutes shows its micro-batches
and a long evaluation its name.

Invariant: the line is never wider than the terminal. Where it would be, figures go in the order of `DROPPED`,
and the step, the loss and the time left stay.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from zerodrift.legible import legible
from zerodrift.report.figures import elements, size
from zerodrift.train.report.display import Display, LineDisplay, Pace, SilentDisplay, clock, number
from zerodrift.train.report.lines import StepMetrics


def display(rank: int, every: int) -> Display:
    """For this rank and its stdout."""
    if rank:
        return SilentDisplay()
    return LiveDisplay() if sys.stdout.isatty() else LineDisplay(every)


DROPPED = ("memory", "norm", "micro-batch", "scale", "lr", "speed", "val", "doing")
"""What goes first where the terminal is narrow."""
BAR = 10
"""Cells that a bar needs to say anything, its percentage apart."""
LONG = 2.0
"""Seconds after which a step shows its micro-batches."""


@dataclass(slots=True)
class Shown:
    """What the line has to say."""

    steps: int = 0
    done: int = 0
    last: StepMetrics | None = None
    validation: str = ""
    left: float | None = None
    """Seconds to the end."""
    doing: str = ""
    micro_batch: str = ""
    """`3/8`, of a step that takes its time."""
    spent: float = 0.0
    """Seconds since the last step ended, or since this began."""


def line(shown: Shown, width: int) -> Text:
    """One line of at most `width` cells."""
    parts = _parts(shown)
    end = _end(shown)
    for name in (None, *DROPPED):
        parts.pop(name or "", None)
        text = "  ".join([*parts.values(), *([end] if end else [])])
        if len(text) <= width:
            break
    left = Text("  ".join(parts.values()))
    room = width - len(text) - len("  ") - len("100%  ")
    if shown.steps and room >= BAR:
        left.append("  ").append_text(_bar(shown.done / shown.steps, room))
        left.append(f" {shown.done / shown.steps:>4.0%}")
    if end:
        left.append("  ").append(end, style="dim")
    left.truncate(width)
    return left


def _parts(shown: Shown) -> dict[str, str]:
    """By name, from left to right."""
    parts = {}
    if shown.steps:
        parts["step"] = f"step {shown.done}/{shown.steps}"
    if shown.doing:
        parts["doing"] = shown.doing
    if shown.micro_batch:
        parts["micro-batch"] = f"micro-batch {shown.micro_batch}"
    step = shown.last
    if step is not None:
        parts["loss"] = f"loss {step.loss:.4f}"
    if shown.validation:
        parts["val"] = f"val {shown.validation}"
    if step is not None:
        parts["norm"] = f"norm {number(step.grad_norm)}"
        parts["lr"] = f"lr {step.lr:.2e}"
        if step.loss_scale != 1.0:
            parts["scale"] = f"scale {step.loss_scale:g}"
        parts["speed"] = f"{elements(round(step.tokens_per_second))} tokens/s"
        parts["memory"] = size(step.memory)
    return parts


def _end(shown: Shown) -> str:
    """The time left; the time taken where that cannot be told yet."""
    if shown.left is not None:
        return f"eta {clock(shown.left)}"
    return clock(shown.spent) if shown.spent >= 1 and (shown.doing or shown.last is None) else ""


def _bar(share: float, width: int) -> Text:
    full = round(width * min(share, 1.0))
    return Text("━" * full, style="green").append("━" * (width - full), style="bright_black")


class LiveDisplay:
    """A terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self.color = self._console.color_system is not None and not self._console.no_color
        self._shown = Shown()
        self._since = time.monotonic()
        self._pace = Pace()
        self._micro_batches: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._live: Any = None

    @property
    def width(self) -> int:
        return self._console.width

    def start(self, step: int, steps: int, micro_batches: Callable[[], tuple[int, int]]) -> None:
        self._shown.steps, self._shown.done = steps, step
        self._micro_batches = micro_batches
        self._begin()

    def say(self, text: str) -> None:
        self._console.print(Text.from_ansi(text), soft_wrap=False)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        before = self._since
        self._shown.doing, self._since = legible(what), time.monotonic()
        self._begin()
        try:
            yield
        finally:
            self._shown.doing = ""
            self._since = before if self._shown.steps else time.monotonic()

    def step(self, step: StepMetrics) -> None:
        shown = self._shown
        shown.done, shown.last = step.step, step
        shown.left = self._pace.remaining(step, shown.steps)
        self._since = time.monotonic()
        if step.skipped:
            self.say(f"step {step.step} skipped, loss scale {step.loss_scale:g}")

    def evaluation(self, step: int, loss: float) -> None:
        self._shown.validation = f"{loss:.4f}"
        self.say(f"step {step}  validation loss {loss:.4f}")

    def stop(self) -> None:
        if self._live is not None:
            self._shown.micro_batch = ""
            if not self._shown.steps:
                self._live.transient = True
            self._live.stop()
            self._live = None

    def _begin(self) -> None:
        self._since = time.monotonic()
        if self._live is None:
            self._live = Live(console=self._console, get_renderable=self._line, refresh_per_second=5)
            self._live.start()

    def _line(self) -> Text:
        shown = self._shown
        shown.spent = time.monotonic() - self._since
        done, of = self._micro_batches()
        long = shown.spent > LONG and shown.done < shown.steps and not shown.doing
        shown.micro_batch = f"{min(done + 1, of)}/{of}" if long and of > 1 else ""
        return line(shown, self._console.width)
