"""Show the progress of a run: one live line on a terminal, and plain lines elsewhere.

Other texts (the plan, notes, evaluations) are printed above the live line. The line is redrawn several times
a second, and shows the micro-batches of a long step and the name of an evaluation. It fits the terminal:
figures are dropped in the order of `DROPPED`, but never step, loss and time left.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from zerodrift.legible import encodable, legible
from zerodrift.report import elements, report_width, significant, size
from zerodrift.train.report.metrics import StepMetrics

DROPPED = ("memory", "norm", "micro-batch", "scale", "lr", "speed", "val", "doing")
"""Figures of the live line in the order in which a narrow terminal drops them."""
BAR = 10
"""Narrowest bar, in cells."""
LONG = 2.0
"""Seconds after which a step shows its micro-batches."""


def figures(step: StepMetrics) -> dict[str, str]:
    norm = significant(step.grad_norm) if math.isfinite(step.grad_norm) else f"{step.grad_norm}"
    texts = {"loss": f"loss {step.loss:.4f}", "norm": f"norm {norm}", "lr": f"lr {step.lr:.2e}"}
    if step.loss_scale != 1.0:
        texts["scale"] = f"scale {step.loss_scale:g}"
    texts["speed"] = f"{elements(round(step.tokens_per_second))} tokens/s"
    texts["memory"] = size(step.memory)
    return texts


def clock(seconds: float) -> str:
    """`1:02:03`, `4:05`."""
    minutes, left = divmod(round(seconds), 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours}:{rest:02d}:{left:02d}" if hours else f"{rest}:{left:02d}"


class Display:
    """Prints a line every few steps, into a file or a pipe. Prints nothing except on rank 0."""

    color = False

    def __init__(self, every: int = 0) -> None:
        """`every` is `run.log_every`; 0 prints nothing."""
        self._every, self._steps = every, 0
        self._recent: list[tuple[int, float]] = []
        """Numbers of the last steps, with the seconds of training up to their ends."""

    @property
    def width(self) -> int:
        return report_width()

    def start(self, step: int, steps: int, micro_batches: Callable[[], tuple[int, int]]) -> None:
        """`micro_batches` returns the finished micro-batches of the step, and all of them."""
        self._steps = steps

    def say(self, text: str) -> None:
        if self._every:
            print(encodable(text, sys.stdout.encoding), flush=True)

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Show an activity between steps."""
        return nullcontext()

    def remaining(self, step: StepMetrics, steps: int) -> float | None:
        """Estimate the seconds to the end from the last steps; None before the second step."""
        self._recent = [*self._recent[-20:], (step.step, step.seconds)]
        (first, since), (last, now) = self._recent[0], self._recent[-1]
        return (now - since) / (last - first) * (steps - step.step) if last > first else None

    def step(self, step: StepMetrics) -> None:
        left = self.remaining(step, self._steps)
        is_due = self._every and not step.step % self._every
        if is_due or step.step == self._steps or step.skipped:
            skipped = ["skipped"] if step.skipped else []
            eta = [f"eta {clock(left)}"] if left is not None else []
            self.say("  ".join([f"step {step.step}/{self._steps}", *figures(step).values(), *skipped, *eta]))

    def evaluation(self, step: int, loss: float) -> None:
        self.say(f"step {step}  validation loss {loss:.4f}")

    def stop(self) -> None:
        """Close the display."""


@dataclass(slots=True)
class LineState:
    steps: int = 0
    done: int = 0
    last: StepMetrics | None = None
    validation: str = ""
    left: float | None = None
    """Seconds to the end."""
    doing: str = ""
    micro_batch: str = ""
    """`3/8` in a long step."""
    spent: float = 0.0
    """Seconds since the last step ended, or since the activity began."""


def line(state: LineState, width: int) -> Text:
    """Return one line of at most `width` cells."""
    step = figures(state.last) if state.last is not None else {}
    parts = {
        "step": f"step {state.done}/{state.steps}" if state.steps else "",
        "doing": state.doing,
        "micro-batch": f"micro-batch {state.micro_batch}" if state.micro_batch else "",
        "loss": step.pop("loss", ""),
        "val": f"val {state.validation}" if state.validation else "",
        **step,
    }
    end = f"eta {clock(state.left)}" if state.left is not None else ""
    if not end and state.spent >= 1 and (state.doing or state.last is None):
        end = clock(state.spent)
    for name in ("", *DROPPED):
        parts.pop(name, None)
        figures_shown = "  ".join(filter(None, parts.values()))
        text = "  ".join(filter(None, [*parts.values(), end]))
        if len(text) <= width:
            break
    shown = Text(figures_shown)
    room = width - len(text) - len("  ") - len("100%  ")
    if state.steps and room >= BAR:
        share = state.done / state.steps
        full = round(room * min(share, 1.0))
        shown.append("  ").append("━" * full, style="green").append("━" * (room - full), style="bright_black")
        shown.append(f" {share:>4.0%}")
    if end:
        shown.append("  ").append(end, style="dim")
    shown.truncate(width)
    return shown


class LiveDisplay(Display):
    def __init__(self) -> None:
        super().__init__()
        self._console = Console(highlight=False, markup=False, emoji=False)
        self.color = self._console.color_system is not None and not self._console.no_color
        self._state = LineState()
        self._since = time.monotonic()
        self._micro_batches: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._live: Any = None

    @property
    def width(self) -> int:
        return self._console.width

    def start(self, step: int, steps: int, micro_batches: Callable[[], tuple[int, int]]) -> None:
        self._state.steps, self._state.done = steps, step
        self._micro_batches = micro_batches
        self._show()

    def say(self, text: str) -> None:
        self._console.print(Text.from_ansi(text), soft_wrap=False)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        before = self._since
        self._state.doing = legible(what)
        self._show()
        try:
            yield
        finally:
            self._state.doing = ""
            self._since = before if self._state.steps else time.monotonic()

    def step(self, step: StepMetrics) -> None:
        state = self._state
        state.done, state.last = step.step, step
        state.left = self.remaining(step, state.steps)
        self._since = time.monotonic()
        if step.skipped:
            self.say(f"step {step.step} skipped, loss scale {step.loss_scale:g}")

    def evaluation(self, step: int, loss: float) -> None:
        self._state.validation = f"{loss:.4f}"
        super().evaluation(step, loss)

    def stop(self) -> None:
        if self._live is not None:
            self._state.micro_batch = ""
            if not self._state.steps:
                self._live.transient = True
            self._live.stop()
            self._live = None

    def _show(self) -> None:
        self._since = time.monotonic()
        if self._live is None:
            self._live = Live(console=self._console, get_renderable=self._line, refresh_per_second=5)
            self._live.start()

    def _line(self) -> Text:
        state = self._state
        state.spent = time.monotonic() - self._since
        done, of = self._micro_batches()
        is_long = state.spent > LONG and state.done < state.steps and not state.doing
        state.micro_batch = f"{min(done + 1, of)}/{of}" if is_long and of > 1 else ""
        return line(state, self._console.width)


def display(rank: int, every: int) -> Display:
    if rank:
        return Display()
    return LiveDisplay() if sys.stdout.isatty() else Display(every)
