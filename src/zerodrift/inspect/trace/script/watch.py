"""Watch the operations of a script's own code, outside of forwards, backwards and torch's optimizers.

Losses, copies of weights and averages are computed there. See [Note: once is enough]: after a few steps they
are not watched again.

Invariant: torch's stack of modes is left as it was. The mode is entered on an empty stack only, and is left
only from the top.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from zerodrift.inspect.trace.operations import anything_compiled, every_operation, name_of
from zerodrift.inspect.trace.script.copies import CopyWatch
from zerodrift.inspect.trace.script.losses import LossWatch
from zerodrift.inspect.trace.state import WatchState, guarded

_STEPS = 3  # steps after which it is not watched again


class ScriptWatch:
    """The mode between forwards, and what listens in it."""

    def __init__(self, state: WatchState) -> None:
        self.state = state
        self.losses = LossWatch()
        self.copies = CopyWatch(state)
        self.in_step = False  # whether an optimizer's step is under way
        self._mode = every_operation(self._called, compiled=False)
        self._is_entered = False

    def enter(self) -> None:
        state = self.state
        if self._is_entered or not state.active or state.in_backward or state.process.steps > _STEPS:
            return
        if anything_compiled() or _get_current_dispatch_mode_stack():
            return
        state.remember()
        self._mode.__enter__()
        self._is_entered = True

    def leave(self) -> bool:
        """Leave the mode; return True if it was on."""
        if threading.get_ident() != self.state.thread:
            return False
        if not self._is_entered or _get_current_dispatch_mode() is not self._mode:
            return False  # a script that is inside a mode of its own keeps both
        self._is_entered = False
        self._mode.__exit__(None, None, None)
        return True

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        if func.namespace == "aten":
            self._computed(name_of(func), args, kwargs, out)

    @guarded
    def _computed(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        if not self.in_step:
            self.losses.computed(name, args, kwargs, out, None)
        self.copies.computed(name, args, kwargs, out, self.in_step)

    def record(self) -> None:
        """Hand over what was seen, once the run is over."""
        self.state.process.events += [*self.losses.events(), *self.copies.events()]
