"""Show the contents of a checkpoint, a folder of checkpoints, or safetensors files, without torch.

Invariant: a load accepts every checkpoint that is called complete, as far as it was verified.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from zerodrift.checkpoint.files import kind_at
from zerodrift.checkpoint.folder import LATEST, CheckpointFolder
from zerodrift.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    SavedParameter,
    all_damage,
    read_entries,
    read_manifest,
)
from zerodrift.dtypes import DType
from zerodrift.errors import CheckpointError, Problem, Problems, nearest_path, several
from zerodrift.model import safetensors
from zerodrift.record import encode
from zerodrift.report import WIDTH, figures, grid, pairs, render, section, title

Row = dict[str, Any]
"""Tensors of one kind and dtype, or parameters whose names differ only in numbers, as a row of the JSON."""


@dataclass(frozen=True, slots=True)
class Inspection:
    path: str
    manifest: Manifest
    problems: tuple[str, ...]
    verified: bool
    """True if checksums were compared, False if only sizes were."""
    holdings: tuple[Row, ...]
    kin: tuple[Row, ...]

    @property
    def complete(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class FolderInspection:
    path: str
    latest: str
    inspections: tuple[Inspection, ...]
    unreadable: tuple[tuple[str, str], ...]
    """(tag, problem) of checkpoints whose manifest cannot be read."""
    unfinished: tuple[str, ...]
    """Saves that are under way or were cut short."""

    @property
    def complete(self) -> bool:
        return not self.unreadable and all(one.complete for one in self.inspections)


@dataclass(frozen=True, slots=True)
class WeightsInspection:
    """Safetensors files, which hold weights alone."""

    path: str
    files: int
    bytes: int
    holdings: tuple[Row, ...]
    kin: tuple[Row, ...]
    quantised: str = ""
    """The formats of tensors that are codes with scales, such as `e4m3 in rows with an fp32 scale`."""
    complete = True


Inspected = Inspection | FolderInspection | WeightsInspection


def inspect(path: str | Path, *, verify: bool = False) -> Inspected:
    """Inspect a checkpoint, a folder of checkpoints, or safetensors files, which have no checksums."""
    place = Path(path)
    if kind_at(place) == "folder" and (place / MANIFEST).is_file():
        return _inspect_one(place, verify)
    if place.suffix == safetensors.SUFFIX or (kind_at(place) == "folder" and safetensors.holds(place)):
        return _inspect_weights(place)
    folder = CheckpointFolder(place)
    inspections: list[Inspection] = []
    unreadable: list[tuple[str, str]] = []
    latest = ""
    try:
        latest = folder.latest()
    except CheckpointError as error:
        unreadable.append((LATEST, str(error)))
    tags, unfinished, halves = folder.tags(), folder.unfinished(), folder.halves()
    if not tags and not unfinished and not halves:
        must = "must be a checkpoint or a folder of checkpoints"
        got = "a folder without any" if place.is_dir() else "no such folder"
        raise CheckpointError(
            place, must, got=got, do=nearest_path(place) or f"A checkpoint holds a `{MANIFEST}`."
        )
    for tag in tags:
        try:
            inspections.append(_inspect_one(place / tag, verify))
        except CheckpointError as error:
            unreadable.append((tag, str(error)))
    must, got = f"must hold a `{MANIFEST}`", "other files of a checkpoint: it was copied in part"
    unreadable += [(tag, str(Problem(str(place / tag), must, got=got))) for tag in halves]
    names = tuple(path.name for path in unfinished)
    return FolderInspection(str(place), latest, tuple(inspections), tuple(unreadable), names)


def _inspect_weights(path: Path) -> WeightsInspection:
    tensors = safetensors.list_tensors(path)
    _, quantised = safetensors.find_quantised(tensors, (), Problems())  # what is refused stays as it is
    formats = "; ".join(dict.fromkeys(tensor.describe() for tensor in quantised.values()))
    table = [SavedParameter((each.name,), each.shape, str(each.dtype), -1, ()) for each in tensors]
    files = [path] if path.is_file() else sorted(path.glob(f"*{safetensors.SUFFIX}"))
    size = sum(file.stat().st_size for file in files)
    held = _holdings(table), _families(table)
    return WeightsInspection(str(path), len(files), size, *held, formats)


def _inspect_one(path: Path, verify: bool) -> Inspection:
    manifest = read_manifest(path)
    problems = [str(problem) for problem in all_damage(path, manifest, content=verify)]
    try:
        table: Sequence[SavedParameter] = read_entries(path)
    except CheckpointError:
        table = ()  # one of the problems, if checksums are compared
        must = "must hold a table of parameters"
        problems = problems or [str(Problem(str(path), must, got="one that cannot be read"))]
    return Inspection(str(path), manifest, tuple(problems), verify, _holdings(table), _families(table))


def _holdings(table: Iterable[SavedParameter]) -> tuple[Row, ...]:
    rows: dict[tuple[str, str], Row] = {}
    for entry in table:
        for kind, dtype in [("weights", DType(entry.dtype)), *((m, DType.FP32) for m in entry.moments)]:
            row: Row = {"kind": kind, "dtype": dtype.value, "tensors": 0, "elements": 0, "bytes": 0}
            row = rows.setdefault((kind, dtype.value), row)
            row["tensors"] += 1
            row["elements"] += math.prod(entry.shape)
            row["bytes"] += dtype.nbytes(math.prod(entry.shape))
    return tuple(rows.values())


def _families(table: Iterable[SavedParameter]) -> tuple[Row, ...]:
    groups: dict[tuple[Any, ...], list[SavedParameter]] = {}
    for entry in table:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.name)
        groups.setdefault((pattern, entry.shape, entry.dtype, entry.moments), []).append(entry)
    families = []
    for (pattern, shape, dtype, moments), entries in groups.items():
        first, count = entries[0], len(entries)
        row = {"pattern": pattern if count > 1 else first.name, "count": count, "shape": shape}
        families.append({**row, "dtype": dtype, "moments": moments, "tied": first.names[1:]})
    return tuple(families)


def inspection_json(inspection: Inspected) -> str:
    document = encode(inspection) | {"complete": inspection.complete}
    return json.dumps(document, indent=1) + "\n"


def inspection_text(inspection: Inspected, color: bool, width: int = WIDTH) -> str:
    if isinstance(inspection, FolderInspection):
        parts = _folder_text(inspection, width)
    elif isinstance(inspection, Inspection):
        parts = _one_text(inspection, width)
    else:
        facts = [
            ("path", inspection.path),
            ("kind", "safetensors: only weights, without a run to resume"),
            ("size", f"{figures.size(inspection.bytes)} in {several(inspection.files, 'file')}"),
            *([("quantised", inspection.quantised)] if inspection.quantised else []),
        ]
        parts = [title("inspect", width=width), pairs(facts, width=width), *_tensors_text(inspection, width)]
    return render(parts, color, width)


def _one_text(inspection: Inspection, width: int) -> list[RenderableType]:
    head = inspection.manifest
    facts = [
        ("path", inspection.path),
        ("step", str(head.step) + (f", {head.skipped} skipped" if head.skipped else "")),
        ("saved", f"{head.saved} by " + ", ".join(f"{name} {version}" for name, version in head.versions)),
        ("model", f"{head.source}, {head.parameters} parameters, {figures.elements(head.elements)} elements"),
        ("plan", f"mode {head.mode}, stage {head.stage}, {head.mesh}" if head.digest else "none: converted"),
        ("optimizer", _optimizer(head)),
        ("run", head.run),
        ("size", f"{figures.size(head.bytes)} in {head.file_count + 1} files"),
        ("complete", _state(inspection)),
    ]
    parts = [title("inspect", head.digest or "-", width), pairs(facts, width=width)]
    if inspection.problems:
        parts.append(grid([("", problem) for problem in inspection.problems], (2,), ("red",), width))
    return [*parts, *_tensors_text(inspection, width, "flat, by name, cut where slices ended")]


def _tensors_text(
    inspection: Inspection | WeightsInspection, width: int, how: str = ""
) -> list[RenderableType]:
    kinds = [("kind", "dtype", "tensors", "elements", "bytes")]
    for row in inspection.holdings:
        sizes = figures.elements(row["elements"]), figures.size(row["bytes"])
        kinds.append((row["kind"], row["dtype"], str(row["tensors"]), *sizes))
    rows = [("name", "", "shape", "dtype", "moments")]
    for row in inspection.kin:
        count = f"x{row['count']}" if row["count"] > 1 else ""
        tied = f"  (tied to {', '.join(row['tied'])})" if row["tied"] else ""
        moments = ", ".join(row["moments"]) + tied
        rows.append((row["pattern"], count, figures.shape(row["shape"]), row["dtype"], moments))
    return [
        section("tensors", how),
        grid(kinds, (24, 10, 9, 10), ("", "", "", ""), width),
        section("parameters"),
        grid(rows, (44, 6, 18, 8), ("", "dim", "", ""), width),
    ]


def _folder_text(folder: FolderInspection, width: int) -> list[RenderableType]:
    rows = [("tag", "step", "saved", "ranks", "size", "complete")]
    for one in folder.inspections:
        head = one.manifest
        mark = f"{head.tag} (latest)" if head.tag == folder.latest else head.tag
        size = figures.size(head.bytes)
        rows.append((mark, str(head.step), head.saved, str(head.mesh.world), size, _state(one)))
    rows += [(tag, "", "", "", "", f"no: {problem}") for tag, problem in folder.unreadable]
    rows += [(name, "", "", "", "", "no: under way, or cut short") for name in folder.unfinished]
    head_line = title("inspect", folder.inspections[-1].manifest.digest if folder.inspections else "-", width)
    table = grid(rows, (34, 8, 25, 5, 9), ("",) * 5, width)
    return [head_line, pairs([("path", folder.path)], width=width), section("checkpoints"), table]


def _optimizer(head: Manifest) -> str:
    if not head.optimizer:
        return "none"
    text = f"{head.optimizer}, lr " + ", ".join(f"{rate:.6g}" for rate in head.lr)
    text += f", schedule {head.schedule}" if head.schedule else ""
    return text + (f", loss scale {head.loss_scale:g}" if head.loss_scale != 1 else "")


def _state(inspection: Inspection) -> str:
    if not inspection.complete:
        return f"no: {len(inspection.problems)} of {inspection.manifest.file_count} files"
    return "yes, every bit" if inspection.verified else "yes, by sizes"
