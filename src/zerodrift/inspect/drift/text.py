"""A comparison of two sides as text of 80 columns, and as JSON: faults first, then drift and its causes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from zerodrift import report
from zerodrift.errors import several
from zerodrift.inspect.drift.attribution import CLIPPED, ExplainedCell, SideComparison, TokenDrift
from zerodrift.inspect.drift.tensor_status import TensorStatus

WIDTH = 80
_FAULTS = 12
_CELLS = 16
_ROUTERS = 6


def comparison_text(
    found: SideComparison, facts: Sequence[tuple[str, str]], *, color: bool, width: int = WIDTH
) -> str:
    """Render a comparison. `facts` name the two sides."""
    warn = ("bold yellow",)
    parts: list[RenderableType] = [report.title("drift", "", width), report.pairs(facts, width=width), Text()]
    parts.append(report.pairs([("verdict", verdict(found))], bold=True, width=width))
    if found.faults:
        parts.append(report.section("not what was trained", several(len(found.faults), "tensor")))
        for number, status in enumerate(found.faults[:_FAULTS]):
            parts += [*([Text()] if number else []), report.grid(_fault(status, width), (1,), warn, width)]
        if len(found.faults) > _FAULTS:
            parts.append(Text(f"and {len(found.faults) - _FAULTS:,} more", style="dim"))
    parts += [report.section("drift", "log-probabilities, the other side minus the trainer")]
    parts.append(report.pairs(_statistics(found.whole), width=width))
    if found.cells:
        parts.append(report.section("what explains it", "replays of the trainer's model"))
        parts.append(_cells(found.cells, width))
        below = [f"and {len(found.cells) - _CELLS:,} more"] if len(found.cells) > _CELLS else []
        below.append(_LEGEND)
        if found.unexplained:
            below.append(f"{percent(found.unexplained)} of the squared drift is in none of these cells.")
        parts += [Text(line, style="dim") for line in below]
    if found.tried:
        detail = "no dtypes of the other side were given; replays with one at a time"
        guesses = [
            (f"{each.key}: {each.dtype}", f"has {percent(each.explains)} of the squared drift")
            for each in found.tried[:_ROUTERS]
        ]
        parts += [report.section("what it may be", detail), report.grid(guesses, (24,), ("",), width)]
    if found.choices:
        flips = sum(count for _, count in found.router_flips)
        told = f"{flips:,} of {found.choices:,} choices are others"
        if flips:
            told += f"; {percent(found.flipped_share)} of the squared drift is on their tokens"
        parts += [report.section("routers"), Text(told)]
        if routers := [(f"{count:,}", name) for name, count in found.router_flips[:_ROUTERS]]:
            parts.append(report.grid(routers, (8,), ("bold",), width))
    if notes := [("!", note) for note in found.notes]:
        parts += [report.section("notes"), report.grid(notes, (1,), warn, width)]
    return report.render(parts, color, width)


_LEGEND = (
    "alone: share of the squared drift that the trainer's model has with only this cell of the other side. "
    "removes: share that is gone if the other side has the trainer's cell. They need not add up to 100%."
)


def verdict(found: SideComparison) -> str:
    """Return the reason of the exit code in one sentence."""
    words, whole = [], found.whole
    if found.faults:
        words.append(f"{several(len(found.faults), 'tensor')} not what was trained")
    if whole.not_finite:
        tokens = several(whole.tokens, "token")
        words.append(f"{whole.not_finite:,} of {tokens} without a finite log-probability")
    if not math.isnan(whole.mean_abs):
        side = "within" if whole.mean_abs <= found.bar else "above"
        words.append(f"{side} the bar: mean |difference| {whole.mean_abs:.3g}, bar {found.bar:g}")
    return "; ".join(words)


def percent(value: float) -> str:
    if math.isinf(value) or value == 0:
        return f"{abs(value):g}"
    return f"{100 * value:.1f}%" if abs(value) >= 0.0005 else ("<0.1%" if value > 0 else ">-0.1%")


def _statistics(whole: TokenDrift) -> list[tuple[str, str]]:
    finite = whole.tokens - whole.not_finite
    rows = [("tokens", f"{whole.tokens:,}" + (f", {finite:,} of them finite" if whole.not_finite else ""))]
    if finite:
        tails = f"median {whole.median:.3g}, 99% {whole.p99:.3g}, largest {whole.largest:.3g}"
        rows += [
            ("mean |d|", f"{whole.mean_abs:.3g}, mean {whole.mean:.3g}, rms {whole.rms:.3g}"),
            ("k3", f"{whole.k3:.3g}"),
            ("tails", f"{tails}; {percent(whole.clipped)} of ratios beyond 1 +- {CLIPPED}"),
        ]
    return rows


def _fault(status: TensorStatus, width: int) -> list[tuple[str, str]]:
    verdict, name = status.verdict, report.elide(status.name, width - 24)
    digests = "  ".join(f"{place} {hexed[: report.DIGEST_SHOWN]}" for place, hexed in status.digests)
    last = [("", f"{status.dtype}, as {status.step}: {digests}")] if digests else []
    return [("!", f"{name}  {verdict.kind}"), ("", verdict.told), *last]


def _cells(cells: Sequence[ExplainedCell], width: int) -> RenderableType:
    rows = []
    for each in cells[:_CELLS]:
        told = each.cell.told.partition(",")[0] if each.cell.kind == "tensor" else each.cell.told
        figures = ("-", "-", "-")
        if each.alone is not None:
            figures = (percent(each.explains), percent(each.removes), f"{each.flips:,}")
        rows.append((each.cell.key, told, *figures))
    heads = ("", "", "alone", "removes", "flips")
    return report.fitted_table(report.PageTable(heads, rows, figures=heads[2:]), width)


def comparison_json(found: SideComparison) -> str:
    """Return all numbers as JSON. Those that are not finite are null."""

    def fault(status: TensorStatus) -> dict[str, Any]:
        verdict = status.verdict
        values = {"kind": verdict.kind, "told": verdict.told, "elements": verdict.differ}
        place = {"distance": verdict.distance, "step": status.step, "dtype": status.dtype}
        return {"name": status.name, **values, **place, "digests": dict(status.digests)}

    def cell(each: ExplainedCell) -> dict[str, Any]:
        one = each.cell
        words = {"key": one.key, "of": one.kind, "told": one.told, "names": list(one.names)}
        numbers = {"alone": each.explains, "removes": each.removes, "flips": each.flips}
        return {**words, "replayed": each.alone is not None, **numbers}

    tried = ({"key": one.key, "dtype": str(one.dtype), "explains": one.explains} for one in found.tried)
    data = {
        "format": "zerodrift drift",
        "version": 1,
        "within": found.within,
        "verdict": verdict(found),
        "bar": found.bar,
        "drift": asdict(found.whole),
        "tensors": {
            "kinds": dict(found.kinds),
            "not_as_trained": list(map(fault, found.faults)),
            "digests": {each.name: dict(each.digests) for each in (*found.faults, *found.as_trained)},
        },
        "cells": list(map(cell, found.cells)),
        "unexplained": found.unexplained,
        "routers": {
            "flips": dict(found.router_flips),
            "choices": found.choices,
            "share_of_flipped": found.flipped_share,
        },
        "tried": list(tried),
        "notes": list(found.notes),
    }
    return json.dumps(report.as_json.json_value(data, lambda _: None), indent=1) + "\n"
