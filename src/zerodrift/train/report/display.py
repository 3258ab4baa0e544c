"""What a person sees while a run goes: one live line on a terminal (`live`), plain lines elsewhere.

Only rank 0 shows anything. What is said beside the line (the plan, notes, evaluations) is printed above it.

Invariant: a figure is written alike on the terminal, in a log and in the report.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from zerodrift.legible import encodable
from zerodrift.report.figures import elements, significant, size
from zerodrift.report.frame import WIDTH
from zerodrift.train.report.lines import StepMetrics


class Display(Protocol):
    """Somebody who is told."""

    color: bool

    @property
    def width(self) -> int:
        """Cells of a line."""

    def start(self, step: int, steps: int, micro_batches: Callable[[], tuple[int, int]]) -> None:
        """`micro_batches` tells how many of a step are done, and of how many."""

    def say(self, text: str) -> None: ...

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Something that takes its time and is no step."""

    def step(self, step: StepMetrics) -> None: ...

    def evaluation(self, step: int, loss: float) -> None: ...

    def stop(self) -> None: ...


def figures(step: StepMetrics) -> list[str]:
    """A step in words: what a line shows, from left to right."""
    texts = [f"loss {step.loss:.4f}", f"norm {number(step.grad_norm)}", f"lr {step.lr:.2e}"]
    if step.loss_scale != 1.0:
        texts.append(f"scale {step.loss_scale:g}")
    texts += [f"{elements(round(step.tokens_per_second))} tokens/s", size(step.memory)]
    return [*texts, "skipped"] if step.skipped else texts


def number(value: float) -> str:
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
    width = WIDTH

    def start(self, step: int, steps: int, micro_batches: Callable[[], tuple[int, int]]) -> None: ...

    def say(self, text: str) -> None: ...

    def doing(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, step: StepMetrics) -> None: ...

    def evaluation(self, step: int, loss: float) -> None: ...

    def stop(self) -> None: ...


class LineDisplay:
    """A file or a pipe: a line per so many steps."""

    color = False
    width = WIDTH

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0
        self._pace = Pace()

    def start(self, step: int, steps: int, micro_batches: Callable[[], tuple[int, int]]) -> None:
        self._steps = steps

    def doing(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

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
