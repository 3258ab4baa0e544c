"""The optimizers of a config's `optimizer` block, and torch's objects of the same classes, on flat shards.

An elementwise optimizer updates a whole shard in one pass over master, moments, storage and gradient. Every
step reads its numbers from the parameter groups, which schedules and users write. A table holds the group of
every block of 256 elements, so groups need no launches of their own. Muon updates the rows that the plan
assigns to it, each a whole matrix on one rank, with parameter group 0; AdamW updates all others with group 1.

Invariant: a shard's master has the bits of the same optimizer in a plain fp32 loop (see [Note: roots] in
`updates.py`), in every master scheme.
"""

from __future__ import annotations

import inspect
import itertools
import json
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from zerodrift.dtypes import BLOCK
from zerodrift.errors import ConfigError, Problems, UnsupportedError
from zerodrift.kernels import block_keys, parameter_key
from zerodrift.optim import muon, schemes
from zerodrift.optim.fused import UpdateFunction, update
from zerodrift.optim.muon import MuonHyper
from zerodrift.optim.updater import Counters, Owned, Written, empty_statistics, no_callback, refuse_calls
from zerodrift.optim.updates import Hyper, Root, UpdateStep
from zerodrift.optimizers import ADAM, ADAMW, ELEMENTWISE, MUON, SGD, Algorithm, algorithm_for
from zerodrift.plan import Plan, Row
from zerodrift.policy import ANY, ComponentSpec, check_arguments, why_not_state

NO_UPDATE = Hyper(lr=0.0)
"""Numbers for trained parameters outside the optimizer's groups: their update is exactly zero."""

TORCH_DECAY = 0.01
"""Weight decay of `torch.optim.AdamW`, which DeepSpeed uses with `torch_adam`."""


class Groups(torch.optim.Optimizer):
    """Parameter groups for a config's optimizer. Only the engine steps."""

    # Skip torch's wrapper, whose first call spends seconds on importing the compiler.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class FlatUpdater:
    """An `Updater` on flat shards."""

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
        self.group_of = group_of
        self.kind = algorithm.kind
        self._update_slice = update_slice
        # The optimizer's own step would find no gradients and silently do nothing.
        groups.step = types.MethodType(_refuse_step, groups)  # type: ignore[method-assign]
        # With this mark a `GradScaler` calls `step`, and does not fail before over missing gradients.
        groups._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        hooks, must = ("register_step_pre_hook", "register_step_post_hook"), f"{_STEPS}, and calls no hooks"
        refuse_calls(groups, hooks, must, "Do the hook's work before or after `engine.step()`.")
        self._algorithm = algorithm.rest or algorithm
        self._root = root
        self._steps = 0
        self.statistics: Mapping[int, torch.Tensor] = empty_statistics(plan, owned)
        self._owned = {piece.number: piece.without_values() for piece in owned}
        self._matrices = {piece.number for piece in owned if piece.update.optimizer == MUON.name}
        self._matrix_rows = {row.name for number in self._matrices for row in self._owned[number].rows}
        self._require_states_that_move()
        self._skipped: frozenset[str] = frozenset()
        self._steps_missed: dict[str, int] = {}
        """Row -> how many updates have skipped it; rows of elementwise updates only."""
        count = self._moments = len(self._algorithm.kept(groups.param_groups))
        self._slices = {
            piece.number: schemes.allocate(
                piece.scheme,
                piece.storage,
                1 if piece.number in self._matrices else count,
                initial=piece.initial,
                groups=self._group_table(piece, group_of),
                keys=_keys(piece) if piece.update.state.drawn else None,
            )
            for piece in owned
        }

    def _require_states_that_move(self) -> None:
        """Refuse a caller's beta2 for which a moment could not shrink, as the plan refuses a config's."""
        states = {piece.update.state for piece in self._owned.values() if piece.number not in self._matrices}
        groups = self.groups.param_groups if self._algorithm.beta2 else []
        for (number, group), state in itertools.product(enumerate(groups), states):
            # Muon's group has no betas.
            reason = why_not_state(state, "native", group["betas"][1]) if "betas" in group else ""
            if reason:
                must = f"must have a beta2 with which a moment in `state: {state}` can shrink"
                got = f"{group['betas'][1]}, and {reason}"
                do = "Lower the beta2 of the group, or use `state: fp32`."
                raise UnsupportedError(f"optimizer.param_groups[{number}]", must, got=got, do=do)

    # --- groups -----------------------------------------------------------------------------------------

    def leave_alone(self, names: Collection[str]) -> None:
        self._skipped = frozenset(names).intersection(self.group_of)

    def _late_groups(self) -> list[tuple[int, int]]:
        """Return each (group, missed steps) of the rows that have missed steps, once."""
        return sorted({(self.group_of[name], missed) for name, missed in self._steps_missed.items()})

    def _group_table(self, piece: Owned, group_of: Mapping[str, int]) -> torch.Tensor | None:
        """Return the group of every block; None if all are in group 0."""
        if piece.number in self._matrices:
            return None
        table = torch.zeros(-(-piece.storage.numel() // BLOCK), dtype=torch.int32)
        for row in piece.rows:
            span = piece.span(row)
            first, last = span.start // BLOCK, -(-span.stop // BLOCK)
            table[first:last] = group_of.get(row.name, len(self.groups.param_groups))
        return table.to(piece.storage.device) if table.any() else None

    def _refresh_tables(self) -> None:
        first = len(self.groups.param_groups) + 1
        late = {pair: first + place for place, pair in enumerate(self._late_groups())}
        of_late = {name: late[self.group_of[name], missed] for name, missed in self._steps_missed.items()}
        for number, piece in self._owned.items():
            table = self._group_table(piece, {**self.group_of, **of_late})
            self._slices[number] = replace(self._slices[number], groups=table)

    # --- the update -------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self, gradients: Mapping[int, torch.Tensor], multiplier: float, written: Written = no_callback
    ) -> None:
        if len(self._algorithm.kept(self.groups.param_groups)) > self._moments:
            name = self._algorithm.name
            must = f"must be above 0 when the engine is made, because it is set later in {name}"
            do = "Make the optimizer with a momentum, or the schedule with `cycle_momentum=False`."
            raise UnsupportedError(self._algorithm.moments_with, must, got="0 then", do=do)
        groups, count = self.groups.param_groups, self._steps + 1
        late_hypers = (_hyper(groups[group], count - missed) for group, missed in self._late_groups())
        # In the order of the tables: torch's groups, `NO_UPDATE`, then `_late_groups`.
        hypers = (*(_hyper(group, count) for group in groups), NO_UPDATE, *late_hypers)
        step = UpdateStep(self._algorithm, hypers, count, multiplier, self._root)
        for number in sorted(gradients, key=self._matrices.__contains__):
            if number in self._matrices:
                self._update_matrices(number, gradients[number], step)
            else:
                before, room = self._values_to_keep(number), self.statistics.get(number)
                self._update_slice(self._slices[number], gradients[number], step, room)
                for tensor, span, values in before:
                    tensor[span] = values
            written(number)
        self._steps += 1
        late = self._skipped - self._matrix_rows
        if late:
            self._steps_missed |= {name: self._steps_missed.get(name, 0) + 1 for name in late}
            self._refresh_tables()
        # torch's schedulers read it, to warn of a schedule that runs ahead (torch 2.13 to 2.15).
        self.groups._opt_called = True  # type: ignore[attr-defined]

    def _update_matrices(self, number: int, gradient: torch.Tensor, step: UpdateStep) -> None:
        group = self.groups.param_groups[0]
        numbers = MuonHyper(**{field.name: group[field.name] for field in fields(MuonHyper)})
        piece, of, room = self._owned[number], self._slices[number], self.statistics.get(number)
        for row in piece.rows:
            if row.name not in self._skipped:
                span = piece.span(row)
                muon.update_matrices(of, span, row.shape, gradient, numbers, step, room)

    def _values_to_keep(self, number: int) -> list[tuple[torch.Tensor, slice, torch.Tensor]]:
        """Return the values to put back after an update, for skipped rows: (tensor, place, values)."""
        if not self._skipped:
            return []
        piece, of = self._owned[number], self._slices[number]
        spans = [piece.span(row) for row in piece.rows if row.name in self._skipped]
        flats = [tensor for tensor in (of.storage, of.master, *of.moments) if tensor is not None]
        kept = [(flat, span, flat[span].clone()) for flat in flats for span in spans]
        for scale in of.scales:
            blocks = [slice(span.start // BLOCK, -(-span.stop // BLOCK)) for span in spans]
            kept += [(scale, block, scale[block].clone()) for block in blocks]
        return kept

    # --- values in and out ------------------------------------------------------------------------------

    def master(self, number: int) -> torch.Tensor:
        return schemes.read(self._slices[number])

    @torch.no_grad()
    def set_master(self, number: int, values: torch.Tensor) -> None:
        schemes.write(self._slices[number], values)

    def _names(self, number: int) -> tuple[str, ...]:
        algorithm = MUON if number in self._matrices else self._algorithm
        return algorithm.moments[: len(self._slices[number].moments)]

    def states(self, number: int) -> dict[str, torch.Tensor]:
        if self._steps == 0:
            return {}
        of = self._slices[number]
        return {name: schemes.read_moment(of, i) for i, name in enumerate(self._names(number))}

    @torch.no_grad()
    def set_state(self, number: int, key: str, values: torch.Tensor) -> None:
        schemes.write_moment(self._slices[number], self._names(number).index(key), values)

    def resting(self, number: int) -> tuple[torch.dtype | None, tuple[torch.dtype, ...]]:
        of = self._slices[number]
        return None if of.master is None else of.master.dtype, tuple(m.dtype for m in of.moments)

    def counters(self) -> Counters:
        missed: Counters = {name: {"behind": count} for name, count in self._steps_missed.items()}
        return {"": {"steps": self._steps}, **missed}

    def set_counters(self, counters: Counters) -> None:
        self._steps = int(counters[""]["steps"])
        counts = {name: mine.get("behind", 0) for name, mine in counters.items() if name in self.group_of}
        self._steps_missed = {name: int(missed) for name, missed in counts.items() if missed}
        self._refresh_tables()
        for number, of in self._slices.items():
            for name in self._names(number):
                self.set_state(number, name, torch.zeros_like(of.storage, dtype=torch.float32))

    def moment_names(self, name: str, counters: Counters) -> tuple[str, ...]:
        if name not in self.group_of or not counters[""]["steps"]:
            return ()
        if name in self._matrix_rows:
            return MUON.moments
        return self._algorithm.kept(self.groups.param_groups)


_STEPS = "must not be called: `engine.step()` updates this rank's pieces"


def _refuse_step(optimizer: torch.optim.Optimizer, closure: Any = None, *, grad_scaler: Any = None) -> None:
    """Raise. A `GradScaler` asks for `grad_scaler`, and reads no gradients before it calls."""
    where = f"{type(optimizer).__name__}.step"
    raise UnsupportedError(where, _STEPS, got="a call", do="Call `engine.step()`.")


# A scheduler made before the engine checks for its mark on the method (torch 2.13 to 2.15).
_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _keys(piece: Owned) -> torch.Tensor:
    keys = keys_of_blocks(piece.rows, piece.start, piece.storage.numel(), piece.part)
    return keys.to(piece.storage.device)


def keys_of_blocks(rows: Iterable[Row], start: int, numel: int, part: int = 0) -> torch.Tensor:
    """Return the random key of every block of a piece, from the parameter's name and the block's place in it.

    `part` is the number of the rows' part, for rows in several parts.
    """
    keys = torch.zeros(-(-numel // BLOCK), dtype=torch.int64)
    for row in rows:
        span = row.within(start, numel)
        if span.stop > span.start:
            first, last = span.start // BLOCK, -(-span.stop // BLOCK)
            before = part * -(-row.numel // BLOCK) if row.parts > 1 else 0
            inside = before + (start + span.start - row.offset) // BLOCK
            keys[first:last] = block_keys(parameter_key(row.name), inside, last - first)
    return keys


_NUMBERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay", "momentum", "dampening"), float),
    **dict.fromkeys(("nesterov", "maximize"), bool),
    "betas": lambda betas: (float(betas[0]), float(betas[1])),
}
"""Fields of `Hyper` that a parameter group may set -> conversion."""


def _hyper(group: Mapping[str, Any], step: int) -> Hyper:
    given = {key: convert(group[key]) for key, convert in _NUMBERS.items() if group.get(key) is not None}
    return Hyper(step=step, **given)


# --- from a config --------------------------------------------------------------------------------------


def from_recipe(plan: Plan, owned: Sequence[Owned], update_slice: UpdateFunction = update) -> FlatUpdater:
    """Return the updater of a config's `optimizer` block. Its groups hold numbers; for their parameters see
    `hold_parameters`."""
    assert plan.policy.optimizer is not None, "neither an optimizer nor a recipe for one"
    algorithm, defaults = arguments(plan.policy.optimizer)
    groups = _muon_groups(defaults) if algorithm is MUON else [defaults]
    empty = [{"params": [nn.Parameter(torch.zeros(0))], **group} for group in groups]
    optimizers = {row.name: piece.update.optimizer for piece in owned for row in piece.rows}
    group_of = {name: int(algorithm is MUON and own != MUON.name) for name, own in optimizers.items()}
    made = Groups(empty, defaults if len(groups) == 1 else {})
    return FlatUpdater(plan, owned, algorithm, Root.EXACT, made, group_of, update_slice)


def arguments(recipe: ComponentSpec) -> tuple[Algorithm, dict[str, Any]]:
    """Return the algorithm of an `optimizer` block, and torch's arguments for it."""
    problems = Problems()
    params = check_arguments("optimizer.params", recipe.type, json.loads(recipe.params), problems)
    problems.raise_as(ConfigError)  # for a recipe that came from no config
    algorithm = algorithm_for(recipe.type, params)
    defaults = dict(algorithm.defaults)
    if algorithm is ADAMW and params.get("torch_adam"):
        defaults["weight_decay"] = TORCH_DECAY
    ours = ANY if not algorithm.matrices else {}
    return algorithm, defaults | {key: params[key] for key in params if key not in ours}


def _muon_groups(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the numbers of Muon's group and of AdamW's, with torch's defaults.

    A shared key sets both, as in DeepSpeed; `muon_lr` and `adam_lr` override `lr`.
    """
    matrices: dict[str, Any] = {field.name: field.default for field in fields(MuonHyper)}
    rest: dict[str, Any] = {**ADAMW.defaults, "weight_decay": TORCH_DECAY}
    for group, own_rate in ((matrices, "muon_lr"), (rest, "adam_lr")):
        group.update((key, value) for key, value in params.items() if key in group)
        group["lr"] = params.get(own_rate, group["lr"])
    return [matrices, rest]


# --- from a torch optimizer -----------------------------------------------------------------------------


def algorithm_of(optimizer: torch.optim.Optimizer) -> tuple[Algorithm, Root] | None:
    """Return the algorithm that equals a torch optimizer exactly; None for any other class or variant."""
    kinds = {getattr(torch.optim, known.torch): known for known in ELEMENTWISE if known.torch}
    algorithm = kinds.get(type(optimizer))
    if algorithm is None:
        return None
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None  # only torch's own step calls them
    variants = ("amsgrad", "capturable", "differentiable")
    if any(group.get(key) for group in optimizer.param_groups for key in variants):
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
