"""Under `run`, the precision line of somebody else's loop: what its first step was seen to do, on all ranks.

It begins with the first forward that trains and ends with the step; operations are looked at inside of calls
of the engine alone. What differs from the plan is said and ends nothing: the loop is not ours.

Invariant: it is said once, on rank 0, and nothing of it is left behind that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from zerodrift.engine.engine import Engine
from zerodrift.errors import PrecisionError
from zerodrift.inspect.check import compare
from zerodrift.inspect.trace.libraries.engine import observe_calls
from zerodrift.inspect.trace.model import is_compiled
from zerodrift.inspect.trace.operations import anything_compiled
from zerodrift.inspect.trace.records import EngineRecord, merged


class FirstStep:
    """What is seen until a step ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stack = contextlib.ExitStack()
        self._seen: EngineRecord | None = None
        self._calls: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def call(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward or a backward."""
        trains = self._engine.module.training and torch.is_grad_enabled()
        if self._seen is None and trains:
            looking = observe_calls(self._engine, operations=not self._compiled)
            self._seen, self._calls = self._stack.enter_context(looking)
        return self._calls()

    @property
    def _compiled(self) -> bool:
        """Whether something may run that cannot be watched."""
        return anything_compiled() or any(map(is_compiled, self._engine.module.modules()))

    def leave(self) -> None:
        """Look no more."""
        self._stack.close()

    def end(self) -> None:
        """Say what was seen. Collective."""
        self.leave()
        engine = self._engine
        seen = merged(engine.comm.all_gather_object(self._seen or EngineRecord()))
        if engine.mesh.rank() or self._seen is None:
            return
        lines = [compare.line(engine.plan, seen), *compare.widened(engine.plan, seen)]
        try:
            compare.require_declared(engine.plan, seen)
        except PrecisionError as error:
            lines.append(str(error))
        print("\n".join(lines), flush=True)
