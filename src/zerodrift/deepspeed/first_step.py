"""Under `zerodrift run`: print the precision that the first step of a caller's loop used, on all ranks.

Operations are recorded inside calls of the engine only, from the first forward that trains to the end of the
step. A difference from the plan is printed and does not end the run, for the loop is the caller's.
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
    """Records an engine's first step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stack = contextlib.ExitStack()
        self._observed: EngineRecord | None = None
        self._calls: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def call(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for a forward or a backward."""
        module = self._engine.module
        if self._observed is None and module.training and torch.is_grad_enabled():
            compiled = anything_compiled() or any(map(is_compiled, module.modules()))
            observing = observe_calls(self._engine, operations=not compiled)
            self._observed, self._calls = self._stack.enter_context(observing)
        return self._calls()

    def leave(self) -> None:
        """Stop recording."""
        self._stack.close()

    def end(self) -> None:
        """Print the result on rank 0. Collective."""
        self.leave()
        engine = self._engine
        observed = merged(engine.comm.all_gather_object(self._observed or EngineRecord()))
        if engine.mesh.rank() or self._observed is None:
            return
        lines = [compare.line(engine.plan, observed), *compare.widened(engine.plan, observed)]
        try:
            compare.require_declared(engine.plan, observed)
        except PrecisionError as error:
            lines.append(str(error))
        print("\n".join(lines), flush=True)
