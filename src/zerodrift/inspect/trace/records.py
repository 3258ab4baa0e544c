"""The records of a run: the dtypes that one process saw of every parameter, and the call that showed each.

An empty cell has a reason instead of sightings. Every process of a command writes its record as JSON, and
ranks send an `EngineRecord` to each other.

Invariant: a dtype that was not seen has no sighting. Nothing here is taken from a config or a plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from zerodrift.dtypes import DType

Column = Literal["storage", "gather", "compute", "grad", "accumulate", "reduce", "master", "state", "export"]

COLUMNS: tuple[Column, ...] = get_args(Column)  # the columns in the order of a plan

VERSION = 1  # version of the JSON of a process


@functools.cache
def dtype_name(dtype: Any) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def column_word(dtype: DType) -> str:
    """Return the word of a dtype in a record: `bfloat16`, or a narrow format, of which bytes are seen."""
    return dtype.value if dtype.format is not None else dtype_name(dtype.torch)


class Sighting(NamedTuple):
    """One dtype in one cell, and the first call that showed it."""

    dtype: str
    """torch's name; `wire>sum` for a reduction that sums in another dtype; `same` for a master that is the
    storage itself."""
    by: str  # the operation, the collective, or the tensor
    module: str = ""
    line: str = ""  # `file:line` of the script, or of the code that the script called


class Facts(TypedDict, total=False):
    """Knowledge about a parameter besides its dtypes."""

    changed: bool
    optimized: bool  # whether an optimizer that stepped holds it
    gradients: int
    began: int | None  # digest of its first values, where they identify the tensor
    digest: int | None  # digest of its last values, where this rank holds all of them
    own: list[float]
    """Sampled elements of this rank's gradients, summed in fp64; empty if some gradients were not sampled."""
    lost: float
    """Share of sampled elements, of a tensor of 16 bits, that its optimizer's updates did not change."""
    follows: bool  # whether it has the rounded values of a master that an optimizer updates in its place
    used: list[float | None]  # the same elements of the gradient that the optimizer was given


@dataclass
class ParameterRecord:
    """One parameter of a model."""

    name: str
    shape: tuple[int, ...]
    kind: str  # dotted class of the module that holds it
    trained: bool
    layout: str = ""  # how it is spread over ranks; empty if each rank has all of it
    also: tuple[str, ...] = ()
    cells: dict[Column, list[Sighting]] = field(default_factory=dict)
    unseen: dict[Column, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def dtypes(self, column: Column) -> tuple[str, ...]:
        """The dtypes of a cell, the first seen first."""
        return tuple(sighting.dtype for sighting in self.cells.get(column, ()))

    def has(self, column: Column, dtype: str) -> bool:
        return dtype in self.dtypes(column)

    def add(
        self, column: Column, dtype: str, by: str, module: str = "", line: str | Callable[[], str] = ""
    ) -> None:
        """Add a sighting, unless the cell has this dtype; `line` may be found only then."""
        if not self.has(column, dtype):
            line = line if isinstance(line, str) else line()
            self.cells.setdefault(column, []).append(Sighting(dtype, by, module, line))


@dataclass
class ModelRecord:
    """One model: a module whose forward a script called, without the wrappers around it."""

    name: str
    parameters: list[ParameterRecord]
    buffers: dict[str, str] = field(default_factory=dict)
    trained: bool = True  # whether an optimizer updated any of it
    wrappers: tuple[str, ...] = ()
    ties: bool | None = None  # whether its config ties input and output embeddings; None if no config says

    def parameter(self, name: str) -> ParameterRecord | None:
        """Return the parameter of this name, or of which it is another name."""
        return next((one for one in self.parameters if name == one.name or name in one.also), None)


@dataclass
class ProcessRecord:
    """Everything that one process saw."""

    rank: int
    world: int
    steps: int
    models: list[ModelRecord]
    micro_batches: int = 1  # backward passes of the last step
    libraries: dict[str, str] = field(default_factory=dict)
    trainer: str = ""  # `transformers.trainer` if a script imported it, which builds its own Accelerator
    notes: list[str] = field(default_factory=list)  # sentences on cells that could not be seen, or not surely
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events that make a finding: `{"kind": ..., "line": ...}`."""
    ended: str = "steps"
    """`steps` if all steps were seen, `exit` if the program ended before, `crash` if by an error, `broken` if
    the observer failed."""

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        models = data.pop("models")
        return {"version": VERSION, **data, "models": models}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProcessRecord:
        process = cls(**{name: value for name, value in data.items() if name != "version"})
        process.models = [ModelRecord(**model) for model in data["models"]]
        for model in process.models:
            model.wrappers = tuple(model.wrappers)
            model.parameters = [ParameterRecord(**item) for item in model.parameters]  # type: ignore[arg-type]
            for parameter in model.parameters:
                parameter.shape, parameter.also = tuple(parameter.shape), tuple(parameter.also)
                for column, sightings in parameter.cells.items():
                    parameter.cells[column] = [Sighting(*sighting) for sighting in sightings]
        return process


@dataclass
class EngineRecord:
    """The dtypes of our engine's parameters in a step, seen by one rank or by all of them."""

    cells: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """Parameter -> column -> dtypes; `reduce` is `wire>sum`, or one name if they agree."""
    logits: set[str] = field(default_factory=set)  # dtypes of the model's floating outputs, the loss left out

    def add(self, name: str, column: Column, dtype: str) -> None:
        self.cells.setdefault(name, {}).setdefault(column, set()).add(dtype)

    def seen(self, name: str, column: Column) -> frozenset[str]:
        return frozenset(self.cells.get(name, {}).get(column, ()))


def merged(parts: Iterable[EngineRecord]) -> EngineRecord:
    """The union of several records."""
    total = EngineRecord()
    for part in parts:
        total.logits |= part.logits
        for name, columns in part.cells.items():
            for column, dtypes in columns.items():
                total.cells.setdefault(name, {}).setdefault(column, set()).update(dtypes)
    return total
