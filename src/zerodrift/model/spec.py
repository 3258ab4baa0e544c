"""The description of a model: parameters and buffers, without torch and without a tensor.

`model/sources.py` makes a `ModelSpec` from a module, an HF config or safetensors files; `policy` and
`plan` read it. Parameters have the order of `named_parameters`.

Invariant: a tied parameter is one `ParameterSpec` with all its names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerodrift.dtypes import DType


@dataclass(frozen=True, slots=True)
class OwningModule:
    path: str
    """Path in the model, `""` for the root."""
    klass: str
    """Dotted class name, `torch.nn.modules.linear.Linear`; `""` if the source has no classes."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter, once, with every name it has."""

    names: tuple[str, ...]
    """Full names in the order of the model; more than one for tied parameters."""
    shape: tuple[int, ...]
    dtype: DType
    owners: tuple[OwningModule, ...]
    trained: bool = True
    used: tuple[int, int] = (1, 1)
    """(experts that a token uses, all experts) of an expert parameter, for the cost of a forward."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BufferSpec:
    name: str
    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as a plan sees it: names, shapes, dtypes and module classes, and no tensor."""

    source: str
    """Name of the source, for titles and messages."""
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...] = ()
    checkpoint: tuple[tuple[str, DType], ...] = ()
    """(name, dtype) of the tensors in a checkpoint, if the weights come from one; the default of `export`."""
    formats: tuple[tuple[str, str], ...] = ()
    """(name, format in words) of the tensors that the checkpoint holds as codes with scales."""
    containers: frozenset[str] = frozenset()
    """Paths of modules without a forward (`ModuleList`, `ModuleDict`), which are never called. Empty if the
    source has no modules."""
    shared: tuple[tuple[str, str], ...] = ()
    """(path, first path) of modules with several paths. Empty if the source has no modules."""

    @property
    def has_classes(self) -> bool:
        """True if the source has modules, and not only names of tensors."""
        return any(owner.klass for parameter in self.parameters for owner in parameter.owners)

    @property
    def numel(self) -> int:
        """Number of elements; a tied parameter counts once."""
        return sum(parameter.numel for parameter in self.parameters)
