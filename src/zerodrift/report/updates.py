"""What became of an update, as a table: what `engine.update_statistics()` returns.

Per parameter the share of elements whose update the model does not see, and of those that were lost to
rounding altogether, the size of the update beside the weight, and the share of elements whose gradient left
no trace in the optimizer's last moment.

Invariant: figures of several parameters are figures of their elements together, never means of shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from zerodrift.report import figures
from zerodrift.report.frame import WIDTH, elide, pairs, printed

_NAME = WIDTH - 50

SHOWN = 20
"""Lines of a table, the worst first."""


@dataclass(frozen=True, slots=True)
class UpdateLine:
    """One parameter's update, or that of several together."""

    name: str
    numel: int
    moved: int
    """Elements that the update wanted to change."""
    unseen: int
    """Of those, the ones whose visible weight has the same bits as before."""
    lost: int
    """Of those, the ones that no master remembers either."""
    underflow: int
    """Elements with a gradient whose last moment, as it is stored, is zero."""
    change_norm: float
    """Norm of the wanted change, before rounding."""
    weight_norm: float
    """Norm of the master before the update."""

    @property
    def lost_share(self) -> float:
        """0 to 1, of the elements that were to change; 0 where none was."""
        return self.lost / self.moved if self.moved else 0.0

    @property
    def unseen_share(self) -> float:
        """0 to 1, of the elements that were to change; where a master remembers them, nothing is lost."""
        return self.unseen / self.moved if self.moved else 0.0

    @property
    def underflow_share(self) -> float:
        """0 to 1, of all elements."""
        return self.underflow / self.numel if self.numel else 0.0

    @property
    def ratio(self) -> float:
        """The wanted change over the weight; infinity where the weight is zero and the change is not."""
        if self.weight_norm == 0:
            return math.inf if self.change_norm else 0.0
        return self.change_norm / self.weight_norm


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update of all trained parameters."""

    step: int
    """Which one, from 1."""
    lines: tuple[UpdateLine, ...]
    """In the order of the plan."""

    def line(self, name: str) -> UpdateLine:
        """Of one parameter, by the first of its names."""
        return next(line for line in self.lines if line.name == name)

    @property
    def total(self) -> UpdateLine:
        """Of all parameters together."""
        return combined("all", self.lines)

    def text(self, shown: int = SHOWN, *, color: bool = False) -> str:
        """A table of the parameters that lost most, and of everything."""
        return _text(self, shown, color)

    def to_json(self) -> dict[str, Any]:
        lines = [
            {
                **asdict(line),
                "unseen_share": line.unseen_share,
                "lost_share": line.lost_share,
                "underflow_share": line.underflow_share,
                "ratio": line.ratio,
            }
            for line in self.lines
        ]
        return {"step": self.step, "parameters": lines}

    def __str__(self) -> str:
        return self.text()


def combined(name: str, lines: Sequence[UpdateLine]) -> UpdateLine:
    """The elements of several parameters as one."""
    return UpdateLine(
        name,
        sum(line.numel for line in lines),
        sum(line.moved for line in lines),
        sum(line.unseen for line in lines),
        sum(line.lost for line in lines),
        sum(line.underflow for line in lines),
        math.hypot(*(line.change_norm for line in lines)),
        math.hypot(*(line.weight_norm for line in lines)),
    )


def _text(report: UpdateReport, shown: int, color: bool) -> str:
    worst = sorted(report.lines, key=lambda line: (-line.lost_share, -line.underflow_share, -line.ratio))
    left = len(worst) - shown
    parts: list[RenderableType] = [Text(f"update {report.step}", style="bold"), _table(report, worst[:shown])]
    if left > 0:
        parts.append(Text(f"and {left:,} more, which lost no more than these", style="dim"))
    words = [
        ("unseen", "of the elements that were to change: the weight that the model sees has the same bits"),
        ("lost", "of the same: no master remembers it either; all of the update was rounded away"),
        ("ratio", "norm of the wanted change over norm of the weight"),
        ("underflow", "elements with a gradient whose last moment is stored as zero"),
    ]
    return printed([*parts, Text(), pairs(words)], color)


def _table(report: UpdateReport, lines: Sequence[UpdateLine]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(width=_NAME, no_wrap=True)
    for width in (8, 7, 7, 8, 9):
        table.add_column(width=width, justify="right", no_wrap=True)
    heads = ("parameter", "elements", "unseen", "lost", "ratio", "underflow")
    table.add_row(*(Text(word, style="dim") for word in heads))
    for line in (*lines, report.total):
        table.add_row(
            Text(elide(line.name, _NAME)),
            figures.elements(line.numel),
            figures.percent(line.unseen_share),
            figures.percent(line.lost_share),
            f"{line.ratio:.2e}",
            figures.percent(line.underflow_share),
        )
    return table
