"""Describes a model by its parameters and buffers, without torch and without a tensor.

`model/sources.py` makes a `ModelSpec` from a module, an HF config or safetensors files; `policy` and
`plan` read it. Order is the model's own: parameters appear as `named_parameters` gives them.

Invariant: a parameter that several names share is one `ParameterSpec` with all its names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerodrift.dtypes import DType


@dataclass(frozen=True, slots=True)
class OwningModule:
    """A module that holds the parameter directly."""

    path: str
    """Module path, `""` for the root."""
    klass: str
    """Dotted class name, `torch.nn.modules.linear.Linear`; `""` where the source does not know it."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter, once, with every name it has."""

    names: tuple[str, ...]
    """Full names, the first met first; more than one for tied parameters."""
    shape: tuple[int, ...]
    dtype: DType
    """As the source holds it."""
    owners: tuple[OwningModule, ...]
    """One per name, in the same order."""
    trained: bool = True
    """`requires_grad`."""
    used: tuple[int, int] = (1, 1)
    """Of how many experts a token uses how many, where it is of experts: (chosen, all). Prices a forward."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    persistent: bool = True
    """Whether it is in the state dict."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as a plan sees it: names, shapes, dtypes and module classes, and no tensor."""

    source: str
    """Where it came from, for titles and messages."""
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...] = ()
    checkpoint: tuple[tuple[str, DType], ...] = ()
    """Tensor dtypes of the checkpoint that the weights come from, where there is one: decides `export`."""
    containers: frozenset[str] = frozenset()
    """Paths of modules without a forward of their own (`ModuleList`, `ModuleDict`): what calls their parts
    never calls them. Empty where the source does not know."""

    shared: tuple[tuple[str, str], ...] = ()
    """(path, the path that it is first met by) of modules that are in several places. Empty where the source
    does not know."""

    @property
    def has_classes(self) -> bool:
        """Whether the source knows its modules, or only the names of tensors."""
        return any(owner.klass for parameter in self.parameters for owner in parameter.owners)

    @property
    def numel(self) -> int:
        """Elements, tied parameters once."""
        return sum(parameter.numel for parameter in self.parameters)
