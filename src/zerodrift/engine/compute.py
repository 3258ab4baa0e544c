"""The compute column: what is cast at which module's boundary, and where autocast is on or off.

Floating inputs of the model are cast to the mode's dtype. A module all of whose parameters compute in
another dtype than the mode's (a pinned router, norm or head) gets its floating inputs cast to that dtype,
runs with autocast off, and returns what its rule says: its own dtype (`keep`) or its input's (`input`);
see `_keeps` for what holds without a rule. Nothing else casts.

Invariant: a module's casts depend on the plan alone, and leaving the module restores what was there.

[Note: autocast] In the autocast modes the forward runs under `torch.autocast` with the configured dtype. A
caller's own autocast around the engine is switched to the configured one, with one warning; around an
engine whose precision is not autocast it is refused, because it would change the dtype of every op behind
the plan's back. Autocast inside the model's code is the model's own business: `transformers` turns it off
where it computes rotary tables in fp32.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerodrift.engine.nested import Replacement, tensors_in
from zerodrift.errors import UnsupportedError
from zerodrift.plan.table import Plan, Row


@dataclass(frozen=True, slots=True)
class Boundary:
    """A module that computes in a dtype of its own."""

    path: str
    dtype: torch.dtype
    keep: bool
    """Whether it returns its own dtype, not its input's."""
    without: torch.dtype | None
    """What it returns where its inputs are no floating numbers, as an embedding's; None for its own dtype."""


def boundaries(plan: Plan, model: nn.Module) -> list[Boundary]:
    """The outermost modules whose parameters all compute in one dtype that is not the mode's."""
    usual = plan.policy.mode.dtype.torch
    autocast = plan.policy.mode.autocast
    rows = {name: row for row in plan.rows for name in row.names}
    found: list[Boundary] = []

    def visit(path: str, module: nn.Module) -> None:
        inside = [rows[name] for name in _parameter_names(path, module) if name in rows]
        dtype = _own_dtype(inside, usual, autocast)
        if dtype is not None and path and has_forward(module):
            told = any(row.columns.output == "keep" for row in inside)
            without = None if told or autocast else usual
            found.append(Boundary(path, dtype, _keeps(path, inside), without))
            return
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return found


def has_forward(module: nn.Module) -> bool:
    """Whether it can be called: nobody calls a container such as `ModuleList`, so hooks on it never run."""
    return type(module).forward is not nn.Module.forward


def _parameter_names(path: str, module: nn.Module) -> Iterator[str]:
    for name, _ in module.named_parameters(remove_duplicate=False):
        yield f"{path}.{name}" if path else name


def _own_dtype(rows: list[Row], usual: torch.dtype, autocast: bool) -> torch.dtype | None:
    """The one compute dtype of the rows where it is not what their surroundings compute in."""
    if not rows:
        return None
    if autocast:
        # Under autocast each op decides; only a pin takes a module out of it.
        return rows[0].columns.compute.torch if all(row.columns.pinned for row in rows) else None
    dtypes = {row.columns.compute.torch for row in rows if row.columns.compute.is_floating}
    if len(dtypes) != 1 or usual in dtypes:
        return None
    return dtypes.pop()


PROJECTIONS = re.compile(
    r"(.*_)?(proj|projection|query|key|value|qkv|kv|dense|attn|fc\d*)|w?[qkvo]|w[123]|up|down|out|c_fc|lin\d*"
)
"""Last names of modules whose results meet those of others: of attention and of feed-forward layers."""


def _keeps(path: str, inside: list[Row]) -> bool:
    """Whether a module with these rows returns its own dtype. What a rule says holds. Where none does, it
    is a router or a head if it holds one matrix and has no projection's name, and keeps; a norm holds none
    and a block several, and what comes after those computes in the dtype of what came before."""
    told = [row.columns.output for row in inside if row.columns.output != "auto"]
    if told:
        return "keep" in told
    projects = PROJECTIONS.fullmatch(path.rpartition(".")[2]) is not None
    return not projects and sum(len(row.shape) > 1 for row in inside) == 1


def attach(model: nn.Module, found: list[Boundary]) -> list[Any]:
    """Put the casting hooks on the modules; returns their handles."""
    modules = dict(model.named_modules())
    handles = []
    for boundary in found:
        handles += _hooks(modules[boundary.path], boundary)
    return handles


@dataclass(slots=True)
class _Inside:
    """A forward of a module with a boundary, under way."""

    inputs: Replacement
    versions: list[tuple[torch.Tensor, torch.Tensor, int]]
    """(a tensor of the caller, what stands in for it, the version of that)."""
    dtype: torch.dtype | None
    """Of the first floating input."""
    switch: torch.autocast | None
    """None where autocast is off anyway: entering it then would be one more thing to compile."""

    def leave(self) -> None:
        """Give the caller's containers back, with what the module has changed in place."""
        self.inputs.undo()
        for own, cast, version in self.versions:
            if cast._version != version:
                own.copy_(cast)
        if self.switch is not None:
            self.switch.__exit__(None, None, None)


def _hooks(module: nn.Module, boundary: Boundary) -> list[Any]:
    calls: list[_Inside] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = list(tensors_in((args, kwargs)))
        dtype = next((tensor.dtype for tensor in found if tensor.is_floating_point()), None)
        device = found[0].device.type if found else "cpu"
        switch = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else None
        if switch is not None:
            switch.__enter__()
        inputs = Replacement(lambda tensor: _cast(tensor, boundary.dtype))
        changed = inputs.apply((args, kwargs))
        versions = [(own, cast, cast._version) for own, cast in inputs.pairs]
        calls.append(_Inside(inputs, versions, dtype, switch))
        return changed

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # Called even when the forward raised: autocast must come back on, whatever happened.
        inside = calls.pop()
        inside.leave()
        dtype = inside.dtype
        if dtype is None:
            dtype = boundary.without
        elif boundary.keep:
            dtype = None
        if dtype is None or output is None:
            return None
        return Replacement(lambda tensor: _cast(tensor, dtype)).apply(output)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class Precision:
    """How the engine enters the model's forward."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        mode = plan.policy.mode
        self._mode = mode
        self._dtype = mode.dtype.torch
        self._device = device.type
        self._warned = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A floating input of the model in the mode's dtype; under autocast it stays what it is."""
        return tensor if self._mode.autocast else _cast(tensor, self._dtype)

    @contextlib.contextmanager
    def cast(self, inputs: Any) -> Iterator[Any]:
        """Inside, the inputs with every tensor as `of` gives it. Afterwards the caller's containers are as
        they were, but for what the model wrote there."""
        replacement = Replacement(self.of)
        try:
            yield replacement.apply(inputs)
        finally:
            replacement.undo()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The dtype context of a forward. See [Note: autocast]."""
        around = torch.is_autocast_enabled(self._device)
        if around and not self._mode.autocast:
            raise UnsupportedError(
                f"`torch.autocast`: must not be active around an engine of mode {self._mode}; got autocast "
                f"to {torch.get_autocast_dtype(self._device)}. Leave the context, or set `precision.mode: "
                f"autocast-bf16`."
            )
        if not self._mode.autocast:
            yield
            return
        if around and torch.get_autocast_dtype(self._device) is not self._dtype and not self._warned:
            self._warned = True
            warnings.warn(
                f"torch.autocast around the engine is {torch.get_autocast_dtype(self._device)}; switched to "
                f"{self._dtype}, as the config says. Leave the context out: the engine enters its own.",
                stacklevel=4,
            )
        try:
            with torch.autocast(self._device, self._dtype):
                yield
        finally:
            # By itself torch forgets the weights that were cast only where the outermost context ends, even a
            # disabled one: around a whole loop, a step's weights would be used after the next.
            torch.clear_autocast_cache()

    def backward(self) -> contextlib.AbstractContextManager[Any]:
        """The dtype context of a backward: none, whatever is around, for autograd has its casts already."""
        return torch.autocast(self._device, enabled=False)
