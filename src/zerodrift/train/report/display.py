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


class LiveDisplay(Display):
    def __init__(self) -> None:
        super().__init__()
        self._console = Console(highlight=False, markup=False, emoji=False)
        self.color = self._console.color_system is not None and not self._console.no_color
        self._done = 0
        self._last: StepMetrics | None = None
        self._left: float | None = None
        """Seconds to the end."""
        self._validation = self._activity = ""
        self._since = time.monotonic()
        """When the last step ended, or when the activity began."""
        self._micro_batches: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._live: Live | None = None

    @property
    def width(self) -> int:
        return self._console.width

    def start(self, step: int, steps: int, micro_batches: Callable[[], tuple[int, int]]) -> None:
        super().start(step, steps, micro_batches)
        self._done, self._micro_batches = step, micro_batches
        self._show()

    def say(self, text: str) -> None:
        self._console.print(Text.from_ansi(text), soft_wrap=False)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        before, self._activity = self._since, legible(what)
        self._show()
        try:
            yield
        finally:
            self._activity = ""
            self._since = before if self._steps else time.monotonic()

    def step(self, step: StepMetrics) -> None:
        self._done, self._last = step.step, step
        self._left = self.remaining(step, self._steps)
        self._since = time.monotonic()
        if step.skipped:
            self.say(f"step {step.step} skipped, loss scale {step.loss_scale:g}")

    def evaluation(self, step: int, loss: float) -> None:
        self._validation = f"val {loss:.4f}"
        super().evaluation(step, loss)

    def stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.transient = not self._steps
            self._micro_batches = lambda: (0, 0)
            live.stop()

    def _show(self) -> None:
        self._since = time.monotonic()
        if self._live is None:
            self._live = Live(console=self._console, get_renderable=self.line, refresh_per_second=5)
            self._live.start()

    def line(self) -> Text:
        """Return the live line, at most as wide as the terminal."""
        spent, steps, width = time.monotonic() - self._since, self._steps, self.width
        is_long = spent > LONG and self._done < steps and not self._activity
        done, count = self._micro_batches()
        step = figures(self._last) if self._last is not None else {}
        parts = {
            "step": f"step {self._done}/{steps}" if steps else "",
            "doing": self._activity,
            "micro-batch": f"micro-batch {min(done + 1, count)}/{count}" if is_long and count > 1 else "",
            "loss": step.pop("loss", ""),
            "val": self._validation,
            **step,
        }
        end = f"eta {clock(self._left)}" if self._left is not None else ""
        if not end and spent >= 1 and (self._activity or self._last is None):
            end = clock(spent)
        for name in ("", *DROPPED):
            parts.pop(name, None)
            shown = Text("  ".join(filter(None, parts.values())))
            room = width - len("  ".join(filter(None, [shown.plain, end])))
            if room >= 0:
                break
        bar = room - len("  ") - len("100%  ")
        if steps and bar >= BAR:
            share = self._done / steps
            full = round(bar * min(share, 1.0))
            shown.append("  ").append("━" * full, style="green")
            shown.append("━" * (bar - full), style="bright_black").append(f" {share:>4.0%}")
        if end:
            shown.append("  ").append(end, style="dim")
        shown.truncate(width)
        return shown


def display(rank: int, every: int) -> Display:
    if rank:
        return Display()
    return LiveDisplay() if sys.stdout.isatty() else Display(every)
