"""The trace of one forward and backward, operation by operation, and its findings.

`inspect/trace/dry_run.py` runs a model on tensors without values and writes a trace,
`inspect/check/compare.py` finds hidden casts and sums that differ each time in it, and
`report/trace.py` prints it. Views are no operations: they neither compute nor cast.

Invariant: values only. Tensors have the same memory number exactly if they share memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CastBy = Literal["", "the model", "autocast", "a boundary", "a pin", "autograd", "torch"]
"""The origin of a cast: `torch` is a cast inside one of torch's functions, `""` is no cast."""

HiddenKind = Literal["refused", "not deterministic", "pin cast", "promotion", "compute", "unused"]


@dataclass(frozen=True, slots=True)
class TracedTensor:
    memory: int
    """Number of the tensor's memory; a view has the number of its base."""
    dtype: str
    dims: int = 1
    """Number of dimensions; a tensor without dimensions widens nothing."""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """One operation of torch, below autograd and autocast."""

    module: str
    """Path of the module whose forward runs the operation, `""` for the model itself."""
    call: int
    name: str
    inputs: tuple[TracedTensor, ...]
    outputs: tuple[TracedTensor, ...]
    line: str
    """Line of the model's code, such as `modeling_llama.py:92`; empty if unknown."""
    backward: bool = False
    cast_by: CastBy = ""
    flops: int = 0
    """Floating-point operations of products, by torch's formulas."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An operation that torch refuses; the step ends there."""

    module: str
    name: str
    inputs: tuple[str, ...]
    said: str
    """The reason, in torch's words or ours."""
    line: str
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced step of the whole model on one device."""

    device: str
    inputs: str
    """The model's inputs in words."""
    loss: str
    """The start of the backward in words; empty without a backward."""
    operations: tuple[TracedOperation, ...]
    classes: Mapping[str, str]
    parameters: Mapping[int, str]
    """Memory -> name of the parameter in the plan."""
    kept: Mapping[int, str]
    """Memory -> path of the pinned module whose output the plan keeps in the pin's dtype."""
    refused: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Hidden:
    """A finding that the plan alone does not show."""

    kind: HiddenKind
    name: str
    what: str
    """The effect, as a clause."""
    line: str
    do: str
    """The cost and the remedy."""
