"""torch's own optimizer over DTensor parameters, as an `OptimizerState`.

Built from the config's `optimizer` block (fused, where torch has it) or the caller's own, whose parameters
become the sharded ones. Storage is the master, the moments are what torch makes: DTensors of the same
dtype and the same cut.

AdamW, Adam and SGD speak of their state as the native engine does, so that a run which was saved by one
backend goes on with the other; any other class as `TorchOptimizerUpdater` does.

Invariant: an update is one multiplication of the gradient in fp32, and then torch's own step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch.distributed.tensor import DTensor

from zerodrift.backends.group import LiveGroup
from zerodrift.optim import (
    Counters,
    RefuseNewData,
    flat,
    group_of,
    loaded_state,
    require_for_dtensors,
    saved_state,
)
from zerodrift.optimizers import SGD
from zerodrift.plan import Plan


class TensorUpdater:
    """An `OptimizerState` around a torch optimizer over DTensors."""

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[LiveGroup],
        optimizer: torch.optim.Optimizer | None,
        names: Mapping[int, str],
    ) -> None:
        members = {member.row.name: member for group in groups for member in group.trained}
        if optimizer is None:
            if plan.policy.optimizer is None:
                raise AssertionError("neither an optimizer nor a recipe for one")
            algorithm, arguments = flat.arguments(plan.policy.optimizer)
            if not algorithm.torch or algorithm.matrices:
                raise AssertionError(f"{algorithm} on backend fsdp2, which `resolve` refuses")
            # torch's fused SGD does not know DTensors (2.13).
            fused = {} if algorithm is SGD else {"fused": True}
            parameters = [member.sharded for member in members.values()]
            self.groups = getattr(torch.optim, algorithm.torch)(parameters, **arguments, **fused)
            self.group_of: Mapping[str, int] = dict.fromkeys(members, 0)
        else:
            self.groups = optimizer
            self.group_of = group_of(optimizer, names, plan)
            if flat.algorithm_of(optimizer) is None:
                require_for_dtensors(optimizer, self.group_of, plan)
            for number, group in enumerate(optimizer.param_groups):
                held = [name for name, place in self.group_of.items() if place == number]
                group["params"] = [members[name].sharded for name in held if name in members]
        self._members = members
        self._updated = [member for name, member in members.items() if name in self.group_of]
        ours = flat.algorithm_of(self.groups)
        self._algorithm = ours[0] if ours is not None else None
        self.kind = type(self.groups).__name__ if ours is None else ours[0].kind
        self._steps = 0

    def learning_rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self.groups.param_groups)

    @torch.no_grad()
    def step(self, multiplier: float) -> None:
        """Step; every parameter without a gradient gets one of zero, as on the native backend."""
        gradients = [member.gradient() for member in self._updated]
        if multiplier != 1.0 and gradients:
            torch._foreach_mul_(gradients, multiplier)
        first_of_a_class = self._steps == 0 and self._algorithm is None
        with RefuseNewData(self.groups) if first_of_a_class else nullcontext():
            self.groups.step()
        self._steps += 1

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """Return views of this rank's parts of one parameter's moments."""
        parameter = self._members[name].sharded
        state, shape = self.groups.state.get(parameter, {}), parameter.shape
        moments = {k: v for k, v in state.items() if isinstance(v, DTensor) and v.shape == shape}
        return {key: value.to_local().view(-1) for key, value in moments.items()}

    # --- what is not one number per element ---------------------------------------------------------------

    def counters(self) -> Counters:
        if self._algorithm is not None:
            return {"": {"steps": self._steps}}
        state = self.groups.state
        held = [member for member in self._updated if member.sharded in state]
        return {member.row.name: saved_state(state[member.sharded], member.sharded) for member in held}

    def set_counters(self, counters: Counters) -> None:
        if self._algorithm is None:
            for member in self._updated:
                if member.row.name in counters:
                    mine = loaded_state(counters[member.row.name], member.sharded)
                    self.groups.state[member.sharded] = mine
            return
        # The state that torch would have made by now:
        self._steps = steps = int(counters[""]["steps"])
        names = self.moment_names("", counters)
        for member in self._updated:
            state = {name: torch.zeros_like(member.sharded, requires_grad=False) for name in names}
            if self._algorithm is not SGD and steps:
                # Fused updates read it on the device of the parameter.
                state["step"] = torch.tensor(float(steps), device=member.storage().device)
            self.groups.state.pop(member.sharded, None)
            if state:
                self.groups.state[member.sharded] = state

    def moment_names(self, name: str, counters: Counters) -> tuple[str, ...]:
        if self._algorithm is None:
            return tuple(key for key, value in counters.get(name, {}).items() if isinstance(value, str))
        if (name and name not in self.group_of) or not counters[""]["steps"]:
            return ()
        return self._algorithm.kept(self.groups.param_groups)
