"""The records of a run: the dtypes that one process saw of every parameter, and the call that showed each.

An empty cell has a reason instead of sightings. Every process of a command writes its record as JSON, and
ranks send an `EngineRecord` to each other. The quantised weights of bitsandbytes 0.50, torchao 0.18 and
TransformerEngine 2.8 are named by their classes, because their `dtype` is that of a container, such as uint8,
or of the values before quantisation.

Invariant: a dtype that was not seen has no sighting. Nothing here is taken from a config or a plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
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
    """Return the word of a dtype in a record: `bfloat16`, or the name of a narrow format."""
    return dtype.value if dtype.format is not None else dtype_name(dtype.torch)


_HELD = {
    "float8_e4m3fn": (4, -9, 448.0),
    "float8_e5m2": (3, -16, 57344.0),
    "bfloat16": (8, -133, 255 * 2.0**120),
    "float16": (11, -24, 65504.0),
}
"""Narrow dtype -> bits of its significand, exponent of its least number, its greatest number."""


def narrowest(values: Sequence[float], among: Iterable[str] = _HELD) -> str:
    """Return the first of some narrow dtypes that holds all values, or ""."""
    for dtype in among:
        bits, least, greatest = _HELD[dtype]
        units = (2.0 ** max(math.frexp(value)[1] - bits, least) for value in values)
        if all(abs(v) <= greatest and (v / unit).is_integer() for v, unit in zip(values, units, strict=True)):
            return dtype
    return ""


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
    averaged: bool  # whether the script reduces its values, or values computed from them, over ranks
    began: int | None  # digest of its first values, where they identify the tensor
    digest: int | None  # digest of its last values, where this rank holds all of them
    own: list[float]
    """Sampled elements of this rank's gradients, summed in fp64; empty if some gradients were not sampled."""
    lost: float
    """Share of sampled elements of a 16-bit tensor that its optimizer's updates did not change."""
    by_hand: bool  # whether the script updates it without an optimizer of torch's
    drawn: bool  # whether its updates are rounded at random
    follows: bool  # whether it equals the rounded values of its master
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
        """Add a sighting, unless the cell has this dtype; `line` may be a function, called only then."""
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
    """The record of one process."""

    rank: int
    world: int
    steps: int
    models: list[ModelRecord]
    micro_batches: int = 1  # backward passes of the last step
    libraries: dict[str, str] = field(default_factory=dict)
    """Library, or a part that runs a script its own way, such as `transformers.trainer` -> version."""
    notes: list[str] = field(default_factory=list)  # sentences on cells that are unknown or unsure
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
        known = {field.name for field in fields(cls)}
        process = cls(**{name: value for name, value in data.items() if name in known})
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


_ELEMENTS = {"float8_e4m3fn": "fp8", "float8_e5m2": "e5m2", "int8": "int8", "float4_e2m1fn_x2": "fp4"}


def narrow_name(tensor: Any) -> str:
    """Return the format of a library's quantised tensor, such as `nf4-64`; `""` for any other tensor.

    The words are those of zerodrift's formats where blocks and numbers are the same.
    """
    kind = type(tensor)
    library, name = kind.__module__.partition(".")[0], kind.__name__
    if library == "bitsandbytes" and name == "Params4bit":
        return f"{tensor.quant_type}-{tensor.blocksize}" if tensor.bnb_quantized else ""
    if library == "bitsandbytes" and name == "Int8Params":
        return "int8-row" if dtype_name(tensor.dtype) == "int8" else ""
    if library == "torchao":
        return _of_torchao(tensor, name)
    return _of_engine(tensor, name) if library == "transformer_engine" else ""


def _of_torchao(tensor: Any, name: str) -> str:
    if name == "NF4Tensor":
        return f"nf4-{tensor.block_size}"
    if name == "NVFP4Tensor":
        return "nvfp4"
    if name == "MXTensor":
        element = _element(tensor.elem_dtype)
        return f"mx{element}" if tensor.block_size == 32 else f"mx{element}-{tensor.block_size}"
    if name.startswith("Int4"):
        return "int4-" + "x".join(str(size) for size in tensor.block_size if size != 1)
    if name in ("Float8Tensor", "Int8Tensor"):
        element, shape = _element(tensor.qdata.dtype), list(tensor.shape)
        block = list(tensor.block_size or shape)
        if block == shape and len(shape) != 1:
            return f"{element}-tensor"
        if block[-1] == shape[-1] and set(block[:-1]) <= {1}:
            return f"{element}-row"
        return f"{element}-" + "x".join(map(str, block[-2:]))
    return ""


def _element(dtype: Any) -> str:
    return _ELEMENTS.get(dtype_name(dtype), dtype_name(dtype))


def _of_engine(tensor: Any, name: str) -> str:
    """Name TransformerEngine's tensors, whose class names begin with the format."""
    if name.startswith("Float8Blockwise"):
        return "fp8-128x128" if getattr(tensor, "_is_2D_scaled", True) else "fp8-1x128"
    known = {"Float8": "fp8-tensor", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
    return next((word for prefix, word in known.items() if name.startswith(prefix)), "")
