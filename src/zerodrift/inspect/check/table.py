"""Tables of a run: joined over ranks, grouped for print, saved, and compared; and `RunFinding`.

`check --save` writes a table; `check --expect` and `diff` compare two.

Invariant: a file that is no table is refused by name. Every difference names its parameter and column.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zerodrift.errors import ConfigError, said
from zerodrift.inspect.trace import COLUMNS, VERSION, Column, ModelRecord, ParameterRecord, ProcessRecord
from zerodrift.plan import Plan
from zerodrift.report import rows

FORMAT = "zerodrift check"

SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def completed(processes: Sequence[ProcessRecord]) -> list[ProcessRecord]:
    """Fill empty cells of the first rank from the others, and name the rank that they come from."""
    first, *others = processes
    for model in first.models:
        for other in others:
            same = same_model(other, model, first)
            for parameter in model.parameters:
                theirs = None if same is None else same.parameter(parameter.name)
                if theirs is None:
                    continue
                if theirs.facts.get("optimized"):
                    parameter.facts["optimized"] = True
                for column, sightings in theirs.cells.items():
                    if sightings and not parameter.cells.get(column):
                        named = [seen._replace(by=f"{seen.by}, on rank {other.rank}") for seen in sightings]
                        parameter.cells[column] = named
                        parameter.unseen.pop(column, None)
    return [first, *others]


def same_model(process: ProcessRecord, model: ModelRecord, among: ProcessRecord) -> ModelRecord | None:
    """Find a model of one process in another, by its name and its place among models of that name."""
    place = [id(one) for one in among.models if one.name == model.name].index(id(model))
    named = [one for one in process.models if one.name == model.name]
    return named[place] if place < len(named) else None


ParameterGroup = tuple[tuple[str, ...], list[ParameterRecord]]
"""Texts of the `COLUMNS`, and the parameters that have them."""


def short(dtype: str) -> str:
    """Return a sighting's dtype in a plan's words: `bf16>fp32`."""
    return ">".join(SHORT.get(part, part) for part in dtype.split(">"))


def cell(parameter: ParameterRecord, column: Column) -> str:
    """Return a cell in a plan's words: `bf16`, `bf16 fp32`; `-` for an empty one."""
    return " ".join(map(short, parameter.dtypes(column))) or "-"


def groups(model: ModelRecord) -> list[ParameterGroup]:
    """Group parameters by their cells, the group with the most elements first."""
    alike: dict[tuple[Any, ...], list[ParameterRecord]] = {}
    for parameter in model.parameters:
        cells = tuple(cell(parameter, column) for column in COLUMNS)
        alike.setdefault((*cells, parameter.trained), []).append(parameter)
    made = [(key[:-1], parameters) for key, parameters in alike.items()]
    return sorted(made, key=lambda group: -elements(group[1]))


def elements(parameters: Iterable[ParameterRecord]) -> int:
    return sum(parameter.numel for parameter in parameters)


def folded(names: Iterable[str]) -> tuple[str, ...]:
    """Fold names that differ only in numbers into one pattern, with their count."""
    lines = rows.fold_names([(name, None) for name in names])
    return tuple(pattern if len(held) == 1 else f"{pattern} ({len(held)})" for pattern, held in lines)


def encoded(processes: Sequence[ProcessRecord], findings: Sequence[Any]) -> str:
    ranks = [process.to_json() for process in processes]
    table = {"format": FORMAT, "version": VERSION, "findings": list(map(asdict, findings)), "ranks": ranks}
    return json.dumps(table, indent=1) + "\n"


def read_declaration(path: Path) -> list[ProcessRecord] | Plan | None:
    """Read a saved table or a plan; None for any other file, which may be a config."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(data, dict) and data.get("format") == FORMAT:
        return _table(path, data)
    if not isinstance(data, dict) or not {"rows", "segments", "digest"} <= data.keys():
        return None
    try:
        return Plan.from_json(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(path.name, "must be a plan that `plan --json` wrote", got=said(error)) from None


_MUST = "must be a table that `check --save` wrote"


def read(path: Path) -> list[ProcessRecord]:
    found = read_declaration(path)
    if not isinstance(found, list):
        raise ConfigError(path.name, _MUST, got="a file of something else")
    return found


def _table(path: Path, data: dict[str, Any]) -> list[ProcessRecord]:
    version = data.get("version")
    if version != VERSION:
        raise ConfigError(path.name, f"must be of version {VERSION}", got=repr(version), do="Save it again.")
    try:
        processes = [ProcessRecord.from_json(rank) for rank in data["ranks"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(path.name, _MUST, got=repr(error)) from None
    if not processes:
        raise ConfigError(path.name, "must have a rank", got="none")
    return processes


@dataclass(frozen=True, slots=True)
class CellDifference:
    """One column of some parameters that differs between two tables."""

    column: Any  # A column, or `model`, `parameter` or `training`
    a: str
    b: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(folded(self.names))}: {self.column} was {self.a}, is {self.b}"


def differences(a: Sequence[ProcessRecord], b: Sequence[ProcessRecord]) -> list[CellDifference]:
    """Compare the first ranks of two tables: `a` as it was, `b` as it is."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, column, was, now in _unlike(a[0], b[0]):
        alike.setdefault((column, was, now), []).append(name)
    return [CellDifference(*key, tuple(names)) for key, names in alike.items()]


def _unlike(a: ProcessRecord, b: ProcessRecord) -> Iterator[tuple[str, str, str, str]]:
    """Pair models by name; a single model may have another name."""
    models = {model.name: model for model in b.models}
    names = [model.name for model in a.models]
    others = [model for model in b.models if model.name not in names]
    is_renamed = len(a.models) == len(b.models) and len(others) == 1
    for model in a.models:
        other = models.get(model.name, others[0] if is_renamed else None)
        if other is None:
            yield model.name, "model", "seen", "not seen"
        else:
            yield from _unlike_cells(model, other)
    for model in others if len(a.models) != len(b.models) else ():
        yield model.name, "model", "not seen", "seen"


def _unlike_cells(a: ModelRecord, b: ModelRecord) -> Iterator[tuple[str, str, str, str]]:
    for parameter in a.parameters:
        other = b.parameter(parameter.name)
        if other is None:
            yield parameter.name, "parameter", "there", "missing"
            continue
        for column in COLUMNS:
            was, now = (" ".join(sorted(cell(one, column).split(" "))) for one in (parameter, other))
            if was != now:
                yield parameter.name, column, was, now
        if parameter.trained != other.trained:
            was, now = ("trained" if one.trained else "frozen" for one in (parameter, other))
            yield parameter.name, "training", was, now
    for parameter in b.parameters:
        if a.parameter(parameter.name) is None:
            yield parameter.name, "parameter", "missing", "there"


Kind = Literal[
    "no-master", "norm-in-16-bits", "upcast-without-effect", "state-too-narrow",
    "rounded-before-accumulation", "router-in-16-bits", "buffer-rounded", "never-updated", "not-averaged",
    "not-accumulated", "norm-of-scaled-gradients", "untied", "ranks-differ", "narrow-export",
    "loss-in-16-bits", "logits-rounded", "average-in-16-bits", "states-rounded", "weights-rounded",
    "gradients-rounded", "wire-in-16-bits", "wire-compressed", "key-without-effect", "not-as-expected",
    "loss-not-scaled", "whole-numbers-rounded", "statistic-in-16-bits",
]  # fmt: skip

BITS = {"bfloat16": 8, "float16": 11}  # dtypes of 16 bits, and the bits of their significand


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One fault, of every parameter that has it."""

    kind: Kind
    column: Column | None
    names: tuple[str, ...]  # names of parameters, or of buffers; empty for a fault of the whole run
    what: str  # the fault and its cost, in a sentence
    do: str  # how to fix it with the library that runs
    line: str = ""
    cost: float = 1.0
    """Share of an update or of a value that is lost, measured on a sample or estimated."""


def library(model: ModelRecord) -> str:
    if "DeepSpeedEngine" in model.wrappers:
        return "deepspeed"
    if any(parameter.layout.startswith("sharded") for parameter in model.parameters):
        return "fully_shard"
    return "fsdp" if "FullyShardedDataParallel" in model.wrappers else ""


def advice(texts: dict[str, str], model: ModelRecord) -> str:
    return texts.get(library(model), texts[""])


def finding(
    kind: Kind, column: Column | None, names: Iterable[str], what: str, do: str, cost: float = 1.0
) -> list[RunFinding]:
    """Return a finding, unless no parameter has the fault."""
    names = tuple(names)
    return [RunFinding(kind, column, names, what, do, cost=cost)] if names else []
