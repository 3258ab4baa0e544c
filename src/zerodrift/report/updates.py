"""Statistics of one optimizer update, returned by `engine.update_statistics()`.

Invariant: shares of several parameters count their elements together. They are never means of shares.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from zerodrift.report import figures
from zerodrift.report.blocks import PageTable
from zerodrift.report.frame import WIDTH, fitted_table, pairs, render

SHOWN = 20  # most lines of a table, the worst first


@dataclass(frozen=True, slots=True)
class UpdateLine:
    """Statistics of the update of one parameter, or of several together."""

    name: str
    numel: int
    moved: int  # elements that the update changes before rounding
    unseen: int  # such elements whose weight in the model kept its bits
    lost: int  # unseen elements whose master kept its bits too, or that have no master
    underflow: int  # elements with a gradient whose last moment is stored as zero
    change_norm: float  # norm of the change before rounding
    weight_norm: float  # norm of the master before the update

    @property
    def lost_share(self) -> float:
        """Share of `lost` in `moved`, 0 to 1."""
        return self.lost / self.moved if self.moved else 0.0

    @property
    def unseen_share(self) -> float:
        """Share of `unseen` in `moved`, 0 to 1."""
        return self.unseen / self.moved if self.moved else 0.0

    @property
    def underflow_share(self) -> float:
        """Share of `underflow` in all elements, 0 to 1."""
        return self.underflow / self.numel if self.numel else 0.0

    @property
    def ratio(self) -> float:
        """Norm of the change over norm of the weight. Infinite if only the weight is zero."""
        if self.weight_norm == 0:
            return math.inf if self.change_norm else 0.0
        return self.change_norm / self.weight_norm


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Update of all trained parameters in one step."""

    step: int  # number of the step, from 1
    lines: tuple[UpdateLine, ...]  # lines in the order of the plan

    def line(self, name: str) -> UpdateLine:
        """Return the line of one parameter by its first name."""
        return next(line for line in self.lines if line.name == name)

    @property
    def total(self) -> UpdateLine:
        """Line of all parameters together."""
        counted = ("numel", "moved", "unseen", "lost", "underflow")
        counts = (sum(getattr(line, key) for line in self.lines) for key in counted)
        lengths = ("change_norm", "weight_norm")
        norms = (math.hypot(*(getattr(line, key) for line in self.lines)) for key in lengths)
        return UpdateLine("all", *counts, *norms)

    def text(self, shown: int = SHOWN, *, color: bool = False) -> str:
        """Render a table of the parameters that lost most, and their total."""
        worst = sorted(self.lines, key=lambda line: (-line.lost_share, -line.underflow_share, -line.ratio))
        heads, rows = ("parameter", "elements", "unseen", "lost", "ratio", "underflow"), []
        for line in (*worst[:shown], self.total):
            unseen, lost = figures.percent(line.unseen_share), figures.percent(line.lost_share)
            underflow, size = figures.percent(line.underflow_share), figures.elements(line.numel)
            rows.append((line.name, size, unseen, lost, f"{line.ratio:.2e}", underflow))
        parts: list[RenderableType] = [Text(f"update {self.step}", style="bold")]
        parts.append(fitted_table(PageTable(heads, rows, figures=heads[1:]), WIDTH))
        if (left := len(worst) - shown) > 0:
            parts.append(Text(f"and {left:,} more, which lost no more than these", style="dim"))
        return render([*parts, Text(), pairs(_WORDS)], color)

    def to_json(self) -> dict[str, Any]:
        computed = ("unseen_share", "lost_share", "underflow_share", "ratio")
        lines = [asdict(line) | {key: getattr(line, key) for key in computed} for line in self.lines]
        return {"step": self.step, "parameters": lines}

    def __str__(self) -> str:
        return self.text()


_WORDS = (
    ("unseen", "share of the elements to change whose weight in the model kept its bits"),
    ("lost", "share of the elements to change whose update was rounded away, in the master too"),
    ("ratio", "norm of the change before rounding over norm of the weight"),
    ("underflow", "elements with a gradient whose last moment is stored as zero"),
)
