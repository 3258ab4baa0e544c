"""Elementwise optimizers on whole pieces: master, moments, storage and gradient in one pass.

Answers for the config's `optimizer` block and for a caller's `torch.optim` object of one of these classes,
whose parameter groups stay what schedules and users read and write: every step takes learning rates,
betas and weight decay from them. Which group an element belongs to is a table of one number per block of
256 elements, so groups cost no launch of their own.

Invariant: a piece's master is what the named optimizer makes of it in a plain fp32 loop, bit for bit (see
[Note: roots] in `updates.py`), whatever the master scheme.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from zerodrift.dtypes import BLOCK
from zerodrift.errors import ConfigError, Problems, UnsupportedError
from zerodrift.optim import schemes
from zerodrift.optim.fused import UpdateFunction, update
from zerodrift.optim.reference import UpdateStep
from zerodrift.optim.rounding import block_keys, parameter_key
from zerodrift.optim.schemes import Scheme
from zerodrift.optim.statistics import Statistics
from zerodrift.optim.updater import Counters, Owned, Written, empty_statistics, no_callback, scheme_of
from zerodrift.optim.updates import Hyper, Root
from zerodrift.optimizers import ADAM, ADAMW, ELEMENTWISE, SGD, Algorithm, meant
from zerodrift.plan.table import Plan
from zerodrift.policy.arguments import ANY, checked
from zerodrift.policy.nouns import ComponentSpec
from zerodrift.policy.support import state_verdict

HELD_STILL = Hyper(lr=0.0)
"""The group of trained parameters that the optimizer was not given: their update is exactly zero."""


class Groups(torch.optim.Optimizer):
    """Parameter groups for a config's optimizer. It takes no step itself: the engine does."""

    # Without torch's wrapper, whose first call imports the compiler: seconds, on every rank.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    def __init__(
        self, parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]], defaults: dict[str, Any]
    ) -> None:
        super().__init__(parameters, defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Replaced on every object by `_refuse_step`."""


class FlatUpdater:
    """An `Updater` on whole pieces."""

    def __init__(
        self,
        plan: Plan,
        owned: Sequence[Owned],
        algorithm: Algorithm,
        root: Root,
        groups: torch.optim.Optimizer,
        group_of: Mapping[str, int],
        update_slice: UpdateFunction = update,
    ) -> None:
        self.groups = groups
        self._update_slice = update_slice
        # A step of the optimizer's own would find no gradient and do nothing, without a word.
        groups.step = types.MethodType(_refuse_step, groups)  # type: ignore[method-assign]
        # So a `GradScaler` comes to that, too, and not to an assertion of its own about gradients.
        groups._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self.group_of = group_of
        self._algorithm = algorithm
        self._root = root
        self._steps = 0
        still = len(groups.param_groups)
        self._schemes = {piece.number: scheme_of(piece) for piece in owned}
        _require_states_that_move(self._schemes.values(), algorithm, groups)
        self._statistics = empty_statistics(plan, owned)
        self._owned = {piece.number: piece.without_values() for piece in owned}
        self._left_alone: frozenset[str] = frozenset()
        self._behind: dict[str, int] = {}
        """Rows that some updates left as they were: how many."""
        count = self._moments = len(algorithm.kept(groups.param_groups))
        self._slices = {
            piece.number: schemes.allocate(
                self._schemes[piece.number],
                piece.storage,
                count,
                initial=piece.initial,
                groups=_group_table(piece, group_of, still),
                keys=keys_of(piece) if self._schemes[piece.number].state.drawn else None,
            )
            for piece in owned
        }

    def _hypers(self) -> tuple[Hyper, ...]:
        """By group, as the tables number them: those of torch, what is held still, and behind these those of
        rows that have taken fewer steps."""
        groups = self.groups.param_groups
        late = (_hyper(groups[group], self._steps + 1 - behind) for group, behind in self._late())
        return (*(_hyper(group, self._steps + 1) for group in groups), HELD_STILL, *late)

    def _late(self) -> list[tuple[int, int]]:
        """(Group, steps behind) of the rows that are, each once."""
        return sorted({(self.group_of[name], behind) for name, behind in self._behind.items()})

    def leave_alone(self, names: Collection[str]) -> None:
        self._left_alone = frozenset(names).intersection(self.group_of)

    def _regroup(self) -> None:
        """The tables of groups, after some rows have fallen behind."""
        first = len(self.groups.param_groups) + 1
        late = {pair: first + place for place, pair in enumerate(self._late())}
        of = {name: late[self.group_of[name], behind] for name, behind in self._behind.items()}
        for number, piece in self._owned.items():
            table = _group_table(piece, {**self.group_of, **of}, first - 1)
            self._slices[number] = replace(self._slices[number], groups=table)

    @property
    def statistics(self) -> Mapping[int, Statistics]:
        return self._statistics

    def learning_rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self.groups.param_groups)

    @torch.no_grad()
    def update(
        self, gradients: Mapping[int, torch.Tensor], multiplier: float, written: Written = no_callback
    ) -> None:
        if len(self._algorithm.kept(self.groups.param_groups)) > self._moments:
            raise UnsupportedError(
                self._algorithm.moments_with,
                f"must be above 0 when the engine is made, where it is set later in {self._algorithm.name}",
                got="0 then",
                do="Make the optimizer with it, or the schedule without (`cycle_momentum=False`).",
            )
        step = UpdateStep(self._algorithm, self._hypers(), self._steps + 1, multiplier, self._root)
        for number, gradient in gradients.items():
            kept = self._kept(number)
            self._update_slice(
                self._schemes[number], self._slices[number], gradient, step, self._statistics.get(number)
            )
            for tensor, span, values in kept:
                tensor[span] = values
            written(number)
        self._steps += 1
        if self._left_alone:
            for name in self._left_alone:
                self._behind[name] = self._behind.get(name, 0) + 1
            self._regroup()
        # What torch's schedulers look at to warn of a schedule that runs ahead (torch 2.13 to 2.15).
        self.groups._opt_called = True  # type: ignore[attr-defined]

    def _kept(self, number: int) -> list[tuple[torch.Tensor, slice, torch.Tensor]]:
        """Of a piece, what is put back after the update: (a tensor of it, where, the values there)."""
        if not self._left_alone:
            return []
        piece, of = self._owned[number], self._slices[number]
        spans = [piece.span(row) for row in piece.rows if row.name in self._left_alone]
        flats = [tensor for tensor in (of.storage, of.master, *of.moments) if tensor is not None]
        kept = [(flat, span, flat[span].clone()) for flat in flats for span in spans]
        for scale in of.scales:
            blocks = [slice(span.start // BLOCK, -(-span.stop // BLOCK)) for span in spans]
            kept += [(scale, block, scale[block].clone()) for block in blocks]
        return kept

    def master(self, number: int) -> torch.Tensor:
        return schemes.read(self._schemes[number], self._slices[number])

    @torch.no_grad()
    def set_master(self, number: int, values: torch.Tensor) -> None:
        schemes.write(self._schemes[number], self._slices[number], values)

    def states(self, number: int) -> dict[str, torch.Tensor]:
        if self._steps == 0:
            return {}
        scheme, of = self._schemes[number], self._slices[number]
        named = enumerate(self._algorithm.moments[: len(of.moments)])
        return {name: schemes.read_moment(scheme, of, place) for place, name in named}

    @torch.no_grad()
    def set_state(self, number: int, key: str, values: torch.Tensor) -> None:
        place = self._algorithm.moments.index(key)
        schemes.write_moment(self._schemes[number], self._slices[number], place, values)

    def resting(self, number: int) -> tuple[torch.dtype | None, tuple[torch.dtype, ...]]:
        held = self._slices[number]
        return None if held.master is None else held.master.dtype, tuple(m.dtype for m in held.moments)

    @property
    def kind(self) -> str:
        return self._algorithm.kind

    def counters(self) -> Counters:
        behind: Counters = {name: {"behind": count} for name, count in self._behind.items()}
        return {"": {"steps": self._steps}, **behind}

    def set_counters(self, counters: Counters) -> None:
        self._steps = int(counters[""]["steps"])
        counts = {name: mine.get("behind", 0) for name, mine in counters.items() if name in self.group_of}
        self._behind = {name: int(behind) for name, behind in counts.items() if behind}
        self._regroup()
        for number, of in self._slices.items():
            for name in self._algorithm.moments[: len(of.moments)]:
                self.set_state(number, name, torch.zeros_like(of.storage, dtype=torch.float32))

    def moment_names(self, name: str, counters: Counters) -> tuple[str, ...]:
        if name not in self.group_of or not counters[""]["steps"]:
            return ()
        return self._algorithm.kept(self.groups.param_groups)


def _require_states_that_move(
    held: Iterable[Scheme], algorithm: Algorithm, groups: torch.optim.Optimizer
) -> None:
    """What the plan asks of a config's beta2, of those that a caller's optimizer brings."""
    if not algorithm.beta2:
        return
    for state in {scheme.state for scheme in held}:
        for number, group in enumerate(groups.param_groups):
            if "betas" not in group:
                continue  # Muon's, which moves none of these pieces
            verdict = state_verdict(state, "native", group["betas"][1])
            if verdict.status == "no":
                raise UnsupportedError(
                    f"optimizer.param_groups[{number}]",
                    f"must have a beta2 that `state: {state}` can follow",
                    got=f"{group['betas'][1]}, and {verdict.reason}",
                    do="Lower the beta2 of the group, or use `state: fp32`.",
                )


def _refuse_step(optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
    must = "must not be called: `engine.step()` updates this rank's pieces"
    raise UnsupportedError(f"{type(optimizer).__name__}.step", must, got="a call", do="Call `engine.step()`.")


# A scheduler that was made before the engine looks for its own mark on the method (torch 2.13 to 2.15).
_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _group_table(piece: Owned, group_of: Mapping[str, int], still: int) -> torch.Tensor | None:
    """The group of every block; None where all are in group 0."""
    table = torch.zeros(-(-piece.storage.numel() // BLOCK), dtype=torch.int32)
    for row in piece.rows:
        span = piece.span(row)
        first, last = span.start // BLOCK, -(-span.stop // BLOCK)
        table[first:last] = group_of.get(row.name, still)
    return table.to(piece.storage.device) if table.any() else None


def keys_of(piece: Owned) -> torch.Tensor:
    """The key of every block, from the parameter's name and the block's place in it."""
    keys = torch.zeros(-(-piece.storage.numel() // BLOCK), dtype=torch.int64)
    for row in piece.rows:
        span = piece.span(row)
        if span.stop > span.start:
            first, last = span.start // BLOCK, -(-span.stop // BLOCK)
            inside = (piece.start + span.start - row.offset) // BLOCK
            if row.parts > 1:
                inside += piece.part * -(-row.numel // BLOCK)
            keys[first:last] = block_keys(parameter_key(row.name), inside, last - first)
    return keys.to(piece.storage.device)


def _hyper(group: Mapping[str, Any], step: int) -> Hyper:
    known = {field.name for field in fields(Hyper)}
    given = {key: value for key, value in group.items() if key in known and value is not None}
    beta1, beta2 = given.get("betas", (0.9, 0.999))
    return Hyper(
        lr=float(given["lr"]),
        step=step,
        betas=(float(beta1), float(beta2)),
        eps=float(given.get("eps", 1e-8)),
        weight_decay=float(given.get("weight_decay", 0.0)),
        momentum=float(given.get("momentum", 0.0)),
        dampening=float(given.get("dampening", 0.0)),
        nesterov=bool(given.get("nesterov", False)),
        maximize=bool(given.get("maximize", False)),
    )


# --- from a config ------------------------------------------------------------------------------------

TORCH_DECAY = 0.01
"""What `torch.optim.AdamW` decays by, which is what DeepSpeed makes where the block says `torch_adam`."""


def from_recipe(
    plan: Plan, owned: Sequence[Owned], recipe: ComponentSpec, update_slice: UpdateFunction = update
) -> FlatUpdater:
    """The optimizer that a config's `optimizer` block means."""
    algorithm, defaults = arguments(recipe)
    # One stand-in parameter: groups exist for their numbers, the values are in the pieces.
    groups = Groups([nn.Parameter(torch.zeros(0))], defaults)
    everything = {row.name: 0 for piece in owned for row in piece.rows}
    return FlatUpdater(plan, owned, algorithm, Root.EXACT, groups, everything, update_slice)


def arguments(recipe: ComponentSpec) -> tuple[Algorithm, dict[str, Any]]:
    """What an `optimizer` block means: the update, and torch's arguments for it."""
    params = require(recipe)
    algorithm = meant(recipe.type, params)
    defaults = dict(algorithm.defaults)
    if algorithm is ADAMW and params.get("torch_adam"):
        defaults["weight_decay"] = TORCH_DECAY
    return algorithm, defaults | {key: params[key] for key in params if key not in ANY}


def require(recipe: ComponentSpec) -> dict[str, Any]:
    """The arguments of a recipe; one that came from a config has been checked where it was resolved."""
    problems = Problems()
    values = checked("optimizer.params", recipe.type, json.loads(recipe.params), problems)
    problems.raise_as(ConfigError)
    return values


# --- from a torch optimizer ---------------------------------------------------------------------------


def algorithm_of(optimizer: torch.optim.Optimizer) -> tuple[Algorithm, Root] | None:
    """Which of our updates a torch optimizer is, exactly; None for any other class or variant."""
    kinds = {getattr(torch.optim, known.torch): known for known in ELEMENTWISE if known.torch}
    algorithm = kinds.get(type(optimizer))
    if algorithm is None:
        return None
    plain = ("amsgrad", "capturable", "differentiable")
    if any(group.get(key) for group in optimizer.param_groups for key in plain):
        return None
    if any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups):
        return None
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if algorithm is ADAM and decoupled == {True}:
        algorithm = ADAMW
    elif algorithm is not SGD and len(decoupled) > 1:
        return None
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return algorithm, Root.EXACT if fused else Root.TORCH
