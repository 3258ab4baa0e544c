"""zerodrift's own engine, which `observe` sees in its own terms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerodrift.observer.adapter import Adapter, OptimizedPart
from zerodrift.observer.observed import Observed, merged
from zerodrift.observer.seen import SeenModel, SeenParameter
from zerodrift.observer.watch import Watcher


@dataclass
class _OwnRun:
    """An engine that is observed, step by step."""

    engine: Any
    modules: frozenset[int]
    seen: list[Observed] = field(default_factory=list)
    step: contextlib.ExitStack | None = None
    """What is entered while a step is under way."""

    def begin(self) -> None:
        if self.step is None:
            from zerodrift.observer.observe import observe

            self.step = contextlib.ExitStack()
            self.seen.append(self.step.enter_context(observe(self.engine)))

    def end(self) -> None:
        if self.step is not None:
            step, self.step = self.step, None
            step.close()


class Own(Adapter):
    def begin(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._runs: list[_OwnRun] = []
        watcher.when_imported("zerodrift.engine.engine", self._imported)

    def _imported(self, module: Any) -> None:
        patch = self._watcher.patches.replace
        for name in ("__call__", "accumulate", "train_batch"):
            patch(module.Engine, name, self._runs_forward)
        patch(module.Engine, "step", self._steps)
        patch(module.Engine, "destroy", self._destroyed)

    def _run(self, engine: Any) -> _OwnRun:
        for run in self._runs:
            if run.engine is engine:
                return run
        modules = {id(part) for root in (engine.module, engine.whole) for part in root.modules()}
        self._runs.append(_OwnRun(engine, frozenset(modules)))
        return self._runs[-1]

    def _runs_forward(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._watcher.safely(lambda: self._begin(engine), None)
        return original(engine, *args, **kwargs)

    def _begin(self, engine: Any) -> None:
        run = self._run(engine)
        self._watcher.may_finish()
        if self._watcher.active:
            run.begin()

    def _steps(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        out = original(engine, *args, **kwargs)
        if engine.global_steps > before:
            self._watcher.safely(lambda: self._stepped(engine), None)
        return out

    def _stepped(self, engine: Any) -> None:
        self._run(engine).end()
        self._watcher.has_stepped(engine, engine.accumulation)

    def _destroyed(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        for run in self._runs:
            if run.engine is engine:
                run.end()
        return original(engine, *args, **kwargs)

    def claims(self, module: torch.nn.Module) -> bool:
        return any(id(module) in run.modules for run in self._runs)

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart] | None:
        own = any(optimizer is run.engine.optimizer for run in self._runs)
        return () if own else None

    def models(self) -> Iterator[SeenModel]:
        for run in self._runs:
            run.end()
            yield _model(run)


def _model(run: _OwnRun) -> SeenModel:
    seen = merged(run.seen)
    parameters = []
    for row in run.engine.plan.rows:
        parameter = SeenParameter(
            name=row.name,
            shape=tuple(row.whole_shape),
            kind=row.klass,
            trained=row.trained,
            layout="sharded" if row.columns.storage.axis else "",
            also=tuple(row.names[1:]),
            facts={"optimized": row.trained},
        )
        for column, words in seen.cells.get(row.name, {}).items():
            for word in sorted(words):
                parameter.see(column, word, "zerodrift's engine")  # type: ignore[arg-type]
        parameters.append(parameter)
    return SeenModel(type(run.engine.whole).__name__, parameters, wrappers=("zerodrift.Engine",))
