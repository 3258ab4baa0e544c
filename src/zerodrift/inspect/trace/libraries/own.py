"""zerodrift's own engine, which `observe` sees in its own terms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerodrift.inspect.trace.records import COLUMNS, EngineRecord, ModelRecord, ParameterRecord, merged
from zerodrift.inspect.trace.state import Adapter, OptimizedPart, WatchState


@dataclass
class _EngineRun:
    """An engine that is observed step by step."""

    engine: Any
    modules: frozenset[int]
    records: list[EngineRecord] = field(default_factory=list)
    step: contextlib.ExitStack | None = None

    def begin(self) -> None:
        if self.step is None:
            from zerodrift.inspect.trace.libraries.engine import observe

            self.step = contextlib.ExitStack()
            self.records.append(self.step.enter_context(observe(self.engine)))

    def end(self) -> None:
        if self.step is not None:
            step, self.step = self.step, None
            step.close()


class Own(Adapter):
    """Knows zerodrift's engine."""

    def begin(self, state: WatchState) -> None:
        self._state = state
        self._runs: list[_EngineRun] = []
        state.when_imported("zerodrift.engine.engine", self._imported)

    def _imported(self, module: Any) -> None:
        replace = self._state.patches.replace
        for name in ("__call__", "accumulate", "train_batch"):
            replace(module.Engine, name, self._runs_forward)
        replace(module.Engine, "step", self._steps)
        replace(module.Engine, "destroy", self._destroys)

    def _run(self, engine: Any) -> _EngineRun:
        for run in self._runs:
            if run.engine is engine:
                return run
        modules = {id(part) for root in (engine.module, engine.whole) for part in root.modules()}
        self._runs.append(_EngineRun(engine, frozenset(modules)))
        return self._runs[-1]

    def _runs_forward(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._state.safely(lambda: self._begin(engine), None)
        return original(engine, *args, **kwargs)

    def _begin(self, engine: Any) -> None:
        run = self._run(engine)
        self._state.may_finish()
        if self._state.active:
            run.begin()

    def _steps(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        out = original(engine, *args, **kwargs)
        if engine.global_steps > before:
            self._state.safely(lambda: self._stepped(engine), None)
        return out

    def _stepped(self, engine: Any) -> None:
        self._run(engine).end()
        self._state.has_stepped(engine, engine.accumulation)

    def _destroys(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        for run in self._runs:
            if run.engine is engine:
                run.end()
        return original(engine, *args, **kwargs)

    def claims(self, module: torch.nn.Module) -> bool:
        return any(id(module) in run.modules for run in self._runs)

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart] | None:
        return () if any(optimizer is run.engine.optimizer for run in self._runs) else None

    def models(self) -> Iterator[ModelRecord]:
        for run in self._runs:
            run.end()
            yield _model(run)


def _model(run: _EngineRun) -> ModelRecord:
    seen, parameters = merged(run.records), []
    for row in run.engine.plan.rows:
        parameter = ParameterRecord(row.name, tuple(row.whole_shape), row.klass, row.trained)
        parameter.layout = "sharded" if row.columns.storage.axis else ""
        parameter.also = tuple(row.names[1:])
        parameter.facts["optimized"] = row.trained
        for column in COLUMNS:
            for dtype in sorted(seen.seen(row.name, column)):
                parameter.add(column, dtype, "zerodrift's engine")
        parameters.append(parameter)
    return ModelRecord(type(run.engine.whole).__name__, parameters, wrappers=("zerodrift.Engine",))
