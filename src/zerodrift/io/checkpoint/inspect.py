"""What is in a checkpoint, without loading it: for a person who wonders which one to keep.

Reads the manifest and the table of parameters, looks at the size of every file, and, when asked, at every
bit of it. Neither torch nor a process group is needed.

Invariant: a checkpoint that is called complete is one that a load would accept, as far as was looked.
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

from zerodrift.dtypes import DType
from zerodrift.errors import CheckpointError, Problem, several
from zerodrift.io.checkpoint.descriptions import all_damage
from zerodrift.io.checkpoint.folder import LATEST, CheckpointFolder
from zerodrift.io.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    SavedParameter,
    read_entries,
    read_manifest,
)
from zerodrift.io.paths import kind_at
from zerodrift.model import safetensors
from zerodrift.record import encode
from zerodrift.report import figures
from zerodrift.report.frame import WIDTH, grid, pairs, printed, section, title

MOMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Holding:
    """The tensors of one kind and dtype."""

    kind: str
    """`weights`, or the name of a moment."""
    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class AlikeParameters:
    """Parameters whose names differ in numbers alone."""

    pattern: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    moments: tuple[str, ...]
    tied: tuple[str, ...]
    """The other names of the first of them."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """One checkpoint, as it lies there."""

    path: str
    manifest: Manifest
    problems: tuple[str, ...]
    """What is missing or damaged; empty where it is complete."""
    verified: bool
    """Whether checksums were compared, or sizes only."""
    holdings: tuple[Holding, ...]
    kin: tuple[AlikeParameters, ...]

    @property
    def complete(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class FolderInspection:
    """A folder of checkpoints."""

    path: str
    latest: str
    inspections: tuple[Inspection, ...]
    unreadable: tuple[tuple[str, str], ...]
    """(tag, what is wrong) of those whose manifest cannot be read."""
    unfinished: tuple[str, ...]
    """Saves that are under way or were cut short."""

    @property
    def complete(self) -> bool:
        """Whether everything that was saved to its end is as it was; what is unfinished does not count."""
        return not self.unreadable and all(one.complete for one in self.inspections)


@dataclass(frozen=True, slots=True)
class WeightsInspection:
    """Safetensors files, as an export leaves them: weights, and nothing of a run."""

    path: str
    files: int
    bytes: int
    holdings: tuple[Holding, ...]
    kin: tuple[AlikeParameters, ...]

    @property
    def complete(self) -> bool:
        """Their headers were read, and every tensor of an index is there."""
        return True


Inspected = Inspection | FolderInspection | WeightsInspection


def inspect(path: str | Path, *, verify: bool = False) -> Inspected:
    """A checkpoint, a folder of them, or safetensors files. Of these, no checksum says what they were."""
    place = Path(path)
    if kind_at(place) == "folder" and (place / MANIFEST).is_file():
        return _inspect_one(place, verify)
    if place.suffix == safetensors.SUFFIX or (kind_at(place) == "folder" and safetensors.holds(place)):
        return _inspect_weights(place)
    folder = CheckpointFolder(place)
    try:
        latest, odd = folder.latest(), ""
    except CheckpointError as error:
        latest, odd = "", str(error)
    tags, unfinished, halves = folder.tags(), folder.unfinished(), folder.halves()
    if not tags and not unfinished and not halves:
        raise CheckpointError(
            place,
            "must be a checkpoint or a folder of checkpoints",
            got="a folder without any" if place.is_dir() else "no such folder",
            do=f"A checkpoint holds a `{MANIFEST}`.",
        )
    inspections, unreadable = [], [(LATEST, odd)] if odd else []
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
    tensors = safetensors.stored(path)
    table = [SavedParameter((each.name,), each.shape, str(each.dtype), -1, ()) for each in tensors]
    files = [path] if path.is_file() else sorted(path.glob(f"*{safetensors.SUFFIX}"))
    size = sum(file.stat().st_size for file in files)
    return WeightsInspection(str(path), len(files), size, _holdings(table), _similar(table))


def _inspect_one(path: Path, verify: bool) -> Inspection:
    manifest = read_manifest(path)
    problems = [str(problem) for problem in all_damage(path, manifest, content=verify)]
    try:
        table: Sequence[SavedParameter] = read_entries(path)
    except CheckpointError:
        table = ()  # which is among the problems, or will be when checksums are compared
        must = "must hold a table of parameters"
        problems = problems or [str(Problem(str(path), must, got="one that cannot be read"))]
    return Inspection(str(path), manifest, tuple(problems), verify, _holdings(table), _similar(table))


def _holdings(table: Iterable[SavedParameter]) -> tuple[Holding, ...]:
    counts: dict[tuple[str, str, int], list[int]] = {}
    for entry in table:
        kinds = [("weights", entry.dtype, DType(entry.dtype).size)]
        kinds += [(moment, DType.FP32.value, MOMENT_BYTES) for moment in entry.moments]
        for kind in kinds:
            count = counts.setdefault(kind, [0, 0])
            count[0] += 1
            count[1] += math.prod(entry.shape)
    return tuple(
        Holding(kind, dtype, tensors, elements, elements * width)
        for (kind, dtype, width), (tensors, elements) in counts.items()
    )


def _similar(table: Iterable[SavedParameter]) -> tuple[AlikeParameters, ...]:
    groups: dict[tuple[Any, ...], list[SavedParameter]] = {}
    for entry in table:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.name)
        groups.setdefault((pattern, entry.shape, entry.dtype, entry.moments), []).append(entry)
    return tuple(
        AlikeParameters(
            pattern if len(of) > 1 else of[0].name, len(of), shape, dtype, moments, of[0].names[1:]
        )
        for (pattern, shape, dtype, moments), of in groups.items()
    )


# --- shown ------------------------------------------------------------------------------------------------


def inspection_json(inspection: Inspected) -> str:
    """The same for machines."""
    document = encode(inspection) | {"complete": inspection.complete}
    return json.dumps(document, indent=1) + "\n"


def inspection_text(inspection: Inspected, color: bool, width: int = WIDTH) -> str:
    """As a page of text."""
    if isinstance(inspection, FolderInspection):
        return printed(_folder_text(inspection, width), color, width)
    if isinstance(inspection, Inspection):
        return printed(_one_text(inspection, width), color, width)
    facts = [
        ("path", inspection.path),
        ("kind", "safetensors: weights alone, without a run to go on with"),
        ("size", f"{figures.size(inspection.bytes)} in {several(inspection.files, 'file')}"),
    ]
    tensors = _tensors(inspection.holdings, inspection.kin, width)
    return printed([title("inspect", width=width), pairs(facts, width=width), *tensors], color, width)


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
    parts: list[RenderableType] = [
        title("inspect", head.digest or "-", width),
        pairs(facts, width=width),
    ]
    parts += (
        [grid([("", problem) for problem in inspection.problems], (2,), ("red",), width)]
        if inspection.problems
        else []
    )
    how = "flat, by name, cut where slices ended"
    return [*parts, *_tensors(inspection.holdings, inspection.kin, width, how)]


def _tensors(
    holdings: Iterable[Holding], kin: Iterable[AlikeParameters], width: int, how: str = ""
) -> list[RenderableType]:
    parts: list[RenderableType] = [section("tensors", how)]
    rows = [("kind", "dtype", "tensors", "elements", "bytes")]
    rows += [
        (h.kind, h.dtype, str(h.tensors), figures.elements(h.elements), figures.size(h.bytes))
        for h in holdings
    ]
    parts.append(grid(rows, (24, 10, 9, 10), ("", "", "", ""), width))
    parts.append(section("parameters"))
    rows = [("name", "", "shape", "dtype", "moments")]
    rows += [
        (
            alike.pattern,
            f"x{alike.count}" if alike.count > 1 else "",
            figures.shape(alike.shape),
            alike.dtype,
            ", ".join(alike.moments) + (f"  (tied to {', '.join(alike.tied)})" if alike.tied else ""),
        )
        for alike in kin
    ]
    parts.append(grid(rows, (44, 6, 18, 8), ("", "dim", "", ""), width))
    return parts


def _folder_text(folder: FolderInspection, width: int) -> list[RenderableType]:
    rows = [("tag", "step", "saved", "ranks", "size", "complete")]
    for one in folder.inspections:
        head = one.manifest
        mark = f"{head.tag} (latest)" if head.tag == folder.latest else head.tag
        ranks = str(head.mesh.world)
        rows.append((mark, str(head.step), head.saved, ranks, figures.size(head.bytes), _state(one)))
    for tag, problem in folder.unreadable:
        rows.append((tag, "", "", "", "", f"no: {problem}"))
    for name in folder.unfinished:
        rows.append((name, "", "", "", "", "no: under way, or cut short"))
    head_line = title("inspect", folder.inspections[-1].manifest.digest if folder.inspections else "-", width)
    table = grid(rows, (34, 8, 25, 5, 9), ("",) * 5, width)
    return [head_line, pairs([("path", folder.path)], width=width), section("checkpoints"), table]


def _optimizer(head: Manifest) -> str:
    if not head.optimizer:
        return "none"
    rates = ", ".join(f"{rate:.6g}" for rate in head.lr)
    text = f"{head.optimizer}, lr {rates}"
    text += f", schedule {head.schedule}" if head.schedule else ""
    return text + (f", loss scale {head.loss_scale:g}" if head.loss_scale != 1 else "")


def _state(inspection: Inspection) -> str:
    if not inspection.complete:
        return f"no: {len(inspection.problems)} of {inspection.manifest.file_count} files"
    return "yes, every bit" if inspection.verified else "yes, by sizes"
