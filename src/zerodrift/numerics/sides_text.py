"""Two sides as text: tensors that are not what was trained, the drift, and what explains it.

Right at 80 columns, whatever the terminal, so that it can be pasted into an issue.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from zerodrift.errors import several
from zerodrift.numerics.apart import CLIPPED, TokensApart
from zerodrift.numerics.fates import TensorFate
from zerodrift.numerics.sides import ExplainedCell, SidesApart
from zerodrift.report.frame import elide, grid, pairs, printed, section, shown, title

WIDTH = 80
_FATES = 12
_CELLS = 16
_ROUTERS = 6
_DIGITS = 12


def sides_text(
    found: SidesApart, facts: Sequence[tuple[str, str]], *, color: bool, width: int = WIDTH
) -> str:
    """`facts` are what was compared with what."""
    parts: list[RenderableType] = [title("drift", "", width), pairs(facts, width=width), Text()]
    parts.append(pairs([("verdict", verdict(found))], bold=True, width=width))
    if found.fates:
        parts.append(section("not what was trained", several(len(found.fates), "tensor")))
        for number, fate in enumerate(found.fates[:_FATES]):
            parts += [*([Text()] if number else []), _fate(fate, width)]
        if len(found.fates) > _FATES:
            parts.append(Text(f"and {len(found.fates) - _FATES:,} more", style="dim"))
    parts += [section("drift", "log-probabilities, the other side minus the trainer")]
    parts.append(pairs(_statistics(found.whole), width=width))
    if found.cells:
        parts += [section("what explains it", "replays of the trainer's model"), _cells(found.cells, width)]
        parts += _legend(found)
    if found.tried:
        detail = "no dtypes of the other side were given; replays with one at a time"
        parts += [section("what it may be", detail), _guesses(found, width)]
    if found.choices:
        parts += _routers(found, width)
    if found.far:
        parts += [section("furthest tokens"), _far(found)]
    if found.notes:
        parts += [
            section("notes"),
            grid([("!", note) for note in found.notes], (1,), ("bold yellow",), width),
        ]
    return printed(parts, color, width)


def verdict(found: SidesApart) -> str:
    """In one sentence, why the exit code is what it is."""
    said = []
    whole = found.whole
    if found.fates:
        said.append(f"{several(len(found.fates), 'tensor')} not what was trained")
    if whole.not_finite:
        said.append(
            f"{whole.not_finite:,} of {several(whole.tokens, 'token')} without a finite log-probability"
        )
    if not math.isnan(whole.mean_abs):
        side = "within" if whole.mean_abs <= found.bar else "above"
        said.append(f"{side} the bar: mean |difference| {figure(whole.mean_abs)}, bar {found.bar:g}")
    return "; ".join(said)


def figure(value: float) -> str:
    """Three digits; 0 is `0`, and nothing else is."""
    return "0" if value == 0 else f"{value:.3g}"


def percent(value: float) -> str:
    if math.isinf(value):
        return "inf"
    if value == 0:
        return "0"
    return f"{100 * value:.1f}%" if abs(value) >= 0.0005 else ("<0.1%" if value > 0 else ">-0.1%")


def _statistics(whole: TokensApart) -> list[tuple[str, str]]:
    finite = whole.tokens - whole.not_finite
    rows = [("tokens", f"{whole.tokens:,}" + (f", {finite:,} of them finite" if whole.not_finite else ""))]
    if finite:
        rows += [
            ("mean |d|", f"{figure(whole.mean_abs)}, mean {figure(whole.mean)}, rms {figure(whole.rms)}"),
            ("k3", figure(whole.k3)),
            (
                "tails",
                f"median {figure(whole.median)}, 99% {figure(whole.p99)}, largest {figure(whole.largest)}; "
                f"{percent(whole.clipped)} of ratios beyond 1 +- {CLIPPED}",
            ),
        ]
    return rows


def _fate(fate: TensorFate, width: int) -> RenderableType:
    digests = "  ".join(f"{place} {hexed[:_DIGITS]}" for place, hexed in fate.digests)
    rows = [("!", f"{elide(fate.name, width - 24)}  {fate.verdict.kind}"), ("", fate.verdict.told)]
    rows += [("", f"{fate.dtype}, as {fate.step}: {digests}")] if digests else []
    return grid(rows, (1,), ("bold yellow",), width)


def _cells(cells: Sequence[ExplainedCell], width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    rows = [_cell(each) for each in cells[:_CELLS]]
    rows.insert(0, ("", "", "alone", "removes", "flips"))
    numbers = [max(len(row[column]) for row in rows) for column in (2, 3, 4)]
    room = width - sum(numbers) - 8
    first = min(room // 2, max(len(row[0]) for row in rows))
    table.add_column(width=first, overflow="fold")
    table.add_column(width=room - first, overflow="fold")
    for taken in numbers:
        table.add_column(width=taken, justify="right")
    for number, row in enumerate(rows):
        style = "dim" if number == 0 else ""
        name = elide(row[0], first)
        table.add_row(
            shown(name, style), shown(row[1], "dim"), *(Text(cell, style=style) for cell in row[2:])
        )
    return table


def _cell(each: ExplainedCell) -> tuple[str, str, str, str, str]:
    cell = each.cell
    told = cell.told.partition(",")[0] if cell.of == "tensor" else cell.told
    if each.alone is None:
        return cell.key, told, "-", "-", "-"
    return cell.key, told, percent(each.explains), percent(each.removes), f"{each.flips:,}"


def _legend(found: SidesApart) -> list[RenderableType]:
    lines = [
        "alone: of the squared drift, what the trainer's model has with this cell of the other side alone. "
        "removes: what is gone when the other side has the trainer's cell here. They need not add up to 100%."
    ]
    if len(found.cells) > _CELLS:
        lines.insert(0, f"and {len(found.cells) - _CELLS:,} more")
    if found.unexplained:
        lines.append(f"{percent(found.unexplained)} of the squared drift is in none of these cells.")
    return [Text(line, style="dim") for line in lines]


def _guesses(found: SidesApart, width: int) -> RenderableType:
    rows = [
        (f"{each.key}: {each.dtype}", f"has {percent(each.explains)} of the squared drift")
        for each in found.tried[:_ROUTERS]
    ]
    return grid(rows, (24,), ("",), width)


def _routers(found: SidesApart, width: int) -> list[RenderableType]:
    flips = sum(count for _, count in found.router_flips)
    told = f"{flips:,} of {found.choices:,} choices are others"
    if flips:
        told += f"; {percent(found.flipped_share)} of the squared drift is on their tokens"
    rows = [(f"{count:,}", name) for name, count in found.router_flips[:_ROUTERS]]
    return [section("routers"), Text(told), *([grid(rows, (8,), ("bold",), width)] if rows else [])]


def _far(found: SidesApart) -> RenderableType:
    rows = [("sequence", "place", "token", "trainer", "other", "difference")]
    for far in found.far:
        gap = far.other - far.trainer
        numbers = (f"{far.trainer:.4f}", f"{far.other:.4f}", f"{gap:+.4f}")
        rows.append((f"{far.sequence:,}", f"{far.place:,}", f"{far.token}", *numbers))
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for column in range(6):
        table.add_column(width=max(len(row[column]) for row in rows), justify="right")
    for number, row in enumerate(rows):
        table.add_row(*(Text(cell, style="dim" if number == 0 else "") for cell in row))
    return table


# --- JSON -----------------------------------------------------------------------------------------------


def sides_json(found: SidesApart) -> str:
    """Everything, with what is no number as null."""
    data = {
        "format": "zerodrift drift",
        "version": 1,
        "within": found.within,
        "verdict": verdict(found),
        "bar": found.bar,
        "drift": asdict(found.whole),
        "tensors": {
            "kinds": dict(found.kinds),
            "not_as_trained": [
                {
                    "name": fate.name,
                    "kind": fate.verdict.kind,
                    "told": fate.verdict.told,
                    "elements": fate.verdict.differ,
                    "distance": fate.verdict.distance,
                    "step": fate.step,
                    "dtype": fate.dtype,
                    "digests": dict(fate.digests),
                }
                for fate in found.fates
            ],
            "digests": {fate.name: dict(fate.digests) for fate in (*found.fates, *found.as_trained)},
        },
        "cells": [
            {
                "key": each.cell.key,
                "of": each.cell.of,
                "told": each.cell.told,
                "names": list(each.cell.names),
                "replayed": each.alone is not None,
                "alone": each.explains,
                "removes": each.removes,
                "flips": each.flips,
            }
            for each in found.cells
        ],
        "unexplained": found.unexplained,
        "routers": {
            "flips": dict(found.router_flips),
            "choices": found.choices,
            "share_of_flipped": found.flipped_share,
        },
        "tried": [
            {"key": each.key, "dtype": str(each.dtype), "explains": each.explains} for each in found.tried
        ],
        "furthest": [asdict(far) for far in found.far],
        "notes": list(found.notes),
    }
    return json.dumps(_finite(data), indent=1) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
