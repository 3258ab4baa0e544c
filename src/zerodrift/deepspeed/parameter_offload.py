"""`optimizer.parameter_offload`: what stage 3 of DeepSpeed gathers and releases by, as others see it.

TRL and its kin take DeepSpeed's hooks off around a generation, inside `zero.GatheredParameters`, and put them
back. Here nothing need be taken off: a unit that is gathered in that context stays so, in every forward, till
the context ends. So there are lists without hooks, and putting them back does nothing.

Invariant: nothing of the engine changes by what others do with it.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class ParamCoordinator:
    """Who knows in DeepSpeed which parameter comes next. The order of units is the plan's."""

    def is_complete_trace(self) -> bool:
        return False

    def is_invalid_trace(self) -> bool:
        """There is no trace that could be out of date."""
        return True

    def is_record_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None: ...

    def reset_step(self) -> None: ...


class ParameterOffload:
    """Of one engine at stage 3."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = ParamCoordinator()

    def get_param_coordinator(self) -> ParamCoordinator:
        return self.param_coordinator

    def empty_partition_cache(self) -> None: ...

    def setup_zero_stage3_hooks(self) -> None: ...

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None: ...

    def _register_hooks_recursively(self, module: nn.Module, count: Any = None) -> None: ...
