"""zerodrift's own engine, which `observe` sees in its own terms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerodrift.inspect.trace.records import COLUMNS, EngineRecord, ModelRecord, ParameterRecord, merged
from zerodrift.inspect.trace.state import Adapter, OptimizedPart, WatchState


class Own(Adapter):
    def begin(self, state: WatchState) -> None:
        self._state = state
        self._seen: dict[Any, list[EngineRecord]] = {}  # engine -> a record of each step
        self._steps: dict[Any, contextlib.ExitStack] = {}  # engine -> the observation of the step under way
        self._modules: set[int] = set()
        state.when_imported("zerodrift.engine.engine", self._imported)

    def _imported(self, module: Any) -> None:
        replace = self._state.patches.replace
        for name in ("__call__", "accumulate", "train_batch"):
            replace(module.Engine, name, self._runs_forward)
        replace(module.Engine, "step", self._takes_step)
        replace(module.Engine, "destroy", self._destroys)

    def _runs_forward(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._state.safely(lambda: self._step_begins(engine), None)
        return original(engine, *args, **kwargs)

    def _step_begins(self, engine: Any) -> None:
        if engine not in self._seen:
            self._seen[engine] = []
            self._modules |= {id(part) for root in (engine.module, engine.whole) for part in root.modules()}
        self._state.may_finish()
        if self._state.active and engine not in self._steps:
            from zerodrift.inspect.trace.libraries.engine import observe

            self._steps[engine] = contextlib.ExitStack()
            self._seen[engine].append(self._steps[engine].enter_context(observe(engine)))

    def _step_ends(self, engine: Any) -> None:
        if engine in self._steps:
            self._steps.pop(engine).close()

    def _takes_step(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        out = original(engine, *args, **kwargs)
        if engine.global_steps > before:
            self._state.safely(lambda: self._step_ends(engine), None)
            self._state.safely(lambda: self._state.has_stepped(engine, engine.accumulation), None)
        return out

    def _destroys(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        self._step_ends(engine)
        return original(engine, *args, **kwargs)

    def claims(self, module: torch.nn.Module) -> bool:
        return id(module) in self._modules

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart] | None:
        return () if any(optimizer is engine.optimizer for engine in self._seen) else None

    def models(self) -> Iterator[ModelRecord]:
        for engine, records in self._seen.items():
            self._step_ends(engine)
            seen, parameters = merged(records), []
            for row in engine.plan.rows:
                parameter = ParameterRecord(row.name, tuple(row.whole_shape), row.klass, row.trained)
                parameter.layout = "sharded" if row.columns.storage.axis else ""
                parameter.also = tuple(row.names[1:])
                parameter.facts["optimized"] = row.trained
                for column in COLUMNS:
                    for dtype in sorted(seen.seen(row.name, column)):
                        parameter.add(column, dtype, "zerodrift's engine")
                parameters.append(parameter)
            yield ModelRecord(type(engine.whole).__name__, parameters, wrappers=("zerodrift.Engine",))
