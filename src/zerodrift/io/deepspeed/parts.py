"""What all readers of DeepSpeed's files make: parameters by name, as runs of elements in mapped files.

Invariant: every element of a parameter is in exactly one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerodrift.errors import CheckpointError
from zerodrift.io.deepspeed.files import DeepSpeedFiles

Run = tuple[int, torch.Tensor]
"""(first element in the row-major flattening, values)."""


@dataclass(frozen=True, slots=True)
class DeepSpeedParameter:
    """One parameter of the checkpoint."""

    name: str
    aliases: tuple[str, ...]
    """Other names that it has, where it is tied."""
    shape: tuple[int, ...]
    trained: bool
    group: int
    """The optimizer's parameter group; -1 for none."""
    weight: tuple[Run, ...]
    """fp32 masters; what the model held, where there are none."""
    moments: Mapping[str, tuple[Run, ...]]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight[0][1].dtype if self.weight else torch.float32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StageContents:
    """What the reader of a stage found."""

    parameters: list[DeepSpeedParameter]
    groups: Sequence[Mapping[str, Any]]
    updates: int
    scaler: Any
    notes: tuple[str, ...] = ()


def aliases_of(model: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    aliases: dict[str, tuple[str, ...]] = {}
    for alias, name in (model.get("shared_params") or {}).items():
        aliases[name] = (*aliases.get(name, ()), alias)
    return aliases


def frozen_one(name: str, value: torch.Tensor, aliases: Mapping[str, tuple[str, ...]]) -> DeepSpeedParameter:
    runs = ((0, value.detach().reshape(-1)),) if value.numel() else ()
    return DeepSpeedParameter(name, aliases.get(name, ()), tuple(value.shape), False, -1, runs, {})


def updates_of(bases: Iterable[Mapping[int, Mapping[str, Any]]], groups: Sequence[Mapping[str, Any]]) -> int:
    """Steps that the optimizer has counted, in its state or in its groups."""
    steps = [state["step"] for base in bases for state in base.values() if "step" in state]
    steps += [group["step"] for group in groups if "step" in group]
    return max((int(step) for step in steps), default=0)


def does_not_fit(files: DeepSpeedFiles, what: str, wanted: int, have: int) -> CheckpointError:
    return CheckpointError(
        files.folder,
        f"must hold {wanted:,} elements for {what}, as its shapes say",
        got=f"{have:,}",
        do="The files are of different saves, or of a DeepSpeed that lays them out in another way.",
    )
