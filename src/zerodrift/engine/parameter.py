"""One parameter of an engine, whole and by name: its value, master, gradient and moments.

For people, tests and tools; no step goes through here. Reading and writing are calls of all ranks, which ask
for the same in the same order and write the same. What is read is a copy.

Invariant: reading changes nothing; what one rank cannot write, no rank writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.progress import TrainingProgress
from zerodrift.errors import ModelError, UnsupportedError, did_you_mean
from zerodrift.plan.table import Plan, Row


class WholeValues(Protocol):
    """Where an executor keeps the values of the plan's rows; whole tensors go in and out."""

    def gathered(
        self, rows: Mapping[str, Row], write: bool
    ) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]:
        """See `Engine.gathered`; by the names that were asked for."""

    def shape(self, row: Row) -> tuple[int, ...]:
        """Of the whole parameter."""

    def value(self, row: Row) -> torch.Tensor:
        """In the compute dtype."""

    def set_value(self, row: Row, value: torch.Tensor) -> None: ...

    def master(self, row: Row) -> torch.Tensor:
        """In fp32."""

    def set_master(self, row: Row, value: torch.Tensor) -> None: ...

    def has_gradient(self, row: Row) -> bool:
        """Whether anything was accumulated in this step; what waits to be reduced is."""

    def gradient(self, row: Row, unscale: float) -> torch.Tensor:
        """The sum, in fp32, times `unscale`. Only where there is one."""

    def set_gradient(self, row: Row, value: torch.Tensor) -> None:
        """`value` is a sum, as accumulated. Only where there is one."""

    def moment_names(self, row: Row) -> tuple[str, ...]:
        """torch's names for what the optimizer keeps; none before the first step."""

    def moments(self, row: Row) -> dict[str, torch.Tensor]:
        """In fp32."""

    def set_moment(self, row: Row, key: str, value: torch.Tensor) -> None: ...


class ParameterHandle:
    """A parameter of an engine. Made by `Engine.parameter`.

    `value`, `master`, `gradient` and the items of `state` are whole on every rank, whatever is sharded, and
    may be assigned. Every rank reads and writes alike.
    """

    def __init__(
        self, name: str, row: Row, values: WholeValues, progress: TrainingProgress, comm: Collectives
    ) -> None:
        self.name = name
        self.row = row
        """Its row of the plan."""
        self._values = values
        self._progress = progress
        self._comm = comm

    def __repr__(self) -> str:
        return f"ParameterHandle({self.name!r}, {list(self.shape)})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self._values.shape(self.row)

    @property
    def value(self) -> torch.Tensor:
        """What the model computes with, in the compute dtype."""
        return self._values.value(self.row)

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        """The master follows; an element that stays the same keeps every bit of its master."""
        with raise_on_all_ranks(self._comm):
            self._check(f"{self.name}.value", value, self.row.columns.compute.torch)
        self._values.set_value(self.row, value)

    @property
    def master(self) -> torch.Tensor:
        """What the optimizer updates, in fp32."""
        return self._values.master(self.row)

    @master.setter
    def master(self, value: torch.Tensor) -> None:
        """What the model computes with follows."""
        with raise_on_all_ranks(self._comm):
            self._check(f"{self.name}.master", value)
        self._values.set_master(self.row, value)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient accumulated so far in this step, averaged and unscaled, in fp32; zero where there is
        none."""
        self._require_trained()
        self._progress.require_whole_sum(self.name)
        if not self._values.has_gradient(self.row):
            return torch.zeros(self.shape, device=self._comm.mesh.device)
        return self._values.gradient(self.row, self._progress.unscale)

    @gradient.setter
    def gradient(self, value: torch.Tensor) -> None:
        self._require_trained()
        self._progress.require_whole_sum(self.name)
        there = self._values.has_gradient(self.row)
        with raise_on_all_ranks(self._comm):
            self._check(f"{self.name}.gradient", value)
            if not there:
                raise UnsupportedError(
                    self.name,
                    "must have a gradient to replace",
                    got="none in this step",
                    do="Assign it after a backward and before `engine.step`.",
                )
        self._values.set_gradient(self.row, value / self._progress.unscale)

    @property
    def state(self) -> Moments:
        """The optimizer's moments in fp32, by torch's names for them; none before the first step. What is
        assigned to one of them becomes the optimizer's."""
        self._require_trained()
        return Moments(self, self._values.moments(self.row))

    def set_moment(self, key: str, value: torch.Tensor) -> None:
        """What `state[key] = value` does, without reading the moments."""
        self._require_trained()
        known = self._values.moment_names(self.row)
        with raise_on_all_ranks(self._comm):
            if key not in known:
                raise ModelError(
                    self.name,
                    f"must have optimizer state {key!r}",
                    got=", ".join(known) or "none yet",
                    do="State is there after the first step.",
                )
            self._check(f"{self.name}.state[{key!r}]", value)
        self._values.set_moment(self.row, key, value)

    def _require_trained(self) -> None:
        if not self.row.trained:
            must = "must be trained to have a gradient or optimizer state"
            raise ModelError(self.name, must, got="a frozen parameter")

    def _check(self, what: str, value: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        """Of what is to be written: a whole tensor, of a dtype that `dtype` holds exactly."""
        if not isinstance(value, torch.Tensor):
            raise ModelError(what, "must be a tensor", got=type(value).__name__)
        if tuple(value.shape) != self.shape:
            must = f"must have the shape of the whole parameter, {list(self.shape)}"
            raise ModelError(what, must, got=list(value.shape))
        if not value.is_floating_point() or torch.promote_types(value.dtype, dtype) is not dtype:
            raise ModelError(
                what,
                f"must be {_word(dtype)} or a floating dtype that it holds exactly",
                got=_word(value.dtype),
                do=f"Write `value.to(torch.{_word(dtype)})`.",
            )


class Moments(Mapping[str, torch.Tensor]):
    """Moments as they were when they were read; what is assigned is the optimizer's at once."""

    def __init__(self, parameter: ParameterHandle, read: dict[str, torch.Tensor]) -> None:
        self._parameter, self._read = parameter, read

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._read[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self._parameter.set_moment(key, value)
        self._read = dict(self._parameter.state)  # as it is kept, which may be rounded

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)

    def __repr__(self) -> str:
        return f"Moments of {self._parameter.name}: {', '.join(self._read) or 'none yet'}"


def row_of(plan: Plan, name: str) -> Row:
    """The row of a parameter, by any of its names."""
    row = plan.row(name)
    if row is None:
        known = [name for row in plan.rows for name in row.names]
        todo = did_you_mean(name, known)
        raise ModelError(name, "must be a parameter of the model", got="no such name", do=todo)
    return row


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
