"""What one forward and backward would compute, operation by operation, and where that is not what it seems.

`inspect/trace/dry_run.py` runs a model on tensors without values and writes these down;
`inspect/check/hidden.py` reads them, and `report/trace.py` shows them. Views are no operations: they compute
nothing and cast nothing.

Invariant: values only. Two tensors that share memory have one number, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CastBy = Literal["", "the model", "autocast", "a boundary", "a pin", "autograd", "torch"]
"""Who asked for a cast; `torch` inside one of its functions, nobody where it is none."""

HiddenKind = Literal["refused", "pin cast", "promotion", "compute", "unused"]


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor that goes into an operation, or comes out of it."""

    memory: int
    """Which memory it is in: a view has the number of what it is a view of."""
    dtype: str
    """`bf16`."""
    dims: int = 1
    """0 for a number in a tensor, which widens nothing."""
    bytes: int = 0
    """Of its elements."""


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """One operation of torch, below autograd and autocast."""

    module: str
    """Path of the module whose forward it is of, `""` for the model itself."""
    call: int
    """Which call of that module, from 0."""
    name: str
    """torch's own name, `mm`."""
    inputs: tuple[TracedTensor, ...]
    outputs: tuple[TracedTensor, ...]
    line: str
    """Of the model's code, `modeling_llama.py:92`; empty where there is none."""
    backward: bool = False
    cast_by: CastBy = ""
    """Not empty: it casts its one input."""
    flops: int = 0
    """Of its products, by torch's formulas."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An operation that torch refuses, at which the step ends."""

    module: str
    name: str
    inputs: tuple[str, ...]
    """Dtypes of its floating inputs."""
    said: str
    """Why, in torch's words or ours."""
    line: str
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """A step on one device, over the whole model."""

    device: str
    inputs: str
    """What the model was called with, in words."""
    loss: str
    """What the backward began at, in words; empty where there was none."""
    operations: tuple[TracedOperation, ...]
    """In the order in which they run."""
    classes: Mapping[str, str]
    """Path of every module -> the name of its class."""
    parameters: Mapping[int, str]
    """Memory -> the parameter that it is of, by the plan's name."""
    kept: Mapping[int, str]
    """Memory of what a pinned module returned that the plan keeps in the pin's dtype -> the module's path."""
    refused: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Hidden:
    """One thing that a plan alone does not show."""

    kind: HiddenKind
    name: str
    """Path of the module, or the parameter."""
    what: str
    """What happens, as a clause."""
    line: str
    """Where in the model's code; empty where there is none."""
    do: str
    """What it costs, and how to mend it."""
