"""The engine as a trainer of habits, by its own calls and by those of DeepSpeed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.loop import Loop
from tests.habits.plain import LEARNING
from tests.numerics.runs import whole_values
from zerodrift.api import initialize


class Driven:
    """Trains a model with an engine."""

    def __init__(self, loop: Loop, model: nn.Module, micro: int, config: dict[str, Any]) -> None:
        written = {
            "precision": {"mode": loop.mode, **config.pop("precision", {})},
            "zero_optimization": {"stage": loop.stage},
            "gradient_accumulation_steps": micro,
            "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": LEARNING},
            **config,
        }
        self.engine = initialize(model, config=written, device="cpu", quiet=True)
        self.module = self.engine.module
        self._names = [name for name, _ in model.named_parameters()]
        self._loop = loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.engine.backward(loss, **kwargs)
        self._loop.see("loss", loss)

    def step(self) -> bool:
        result = self.engine.step()
        if result.grad_norm is not None:
            self._loop.see_norm(result.grad_norm)
        return result.updated

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.no_sync()

    def gathered(
        self, names: Iterable[str] | None = None, write: bool = False
    ) -> contextlib.AbstractContextManager[dict[str, Tensor]]:
        return self.engine.gathered(names, write)

    def gradient(self, name: str) -> Tensor:
        return self.engine.parameter(name).gradient

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        found = self.engine.optimizer
        assert found is not None
        return found

    def masters(self) -> dict[str, Tensor]:
        masters = whole_values(self.engine)["master"]
        # Nobody holds an element of a parameter without elements.
        return {n: masters[n] if n in masters else self.engine.parameter(n).master for n in self._names}

    def close(self) -> None:
        self.engine.destroy()


ARGUMENTS = frozenset(("args", "config", "lr_scheduler", "model_parameters", "training_data"))
"""Arguments of `deepspeed.initialize` that are no keys of a config."""


class OnDeepSpeed:
    """Trains a model with an engine of the drop-in, or of DeepSpeed, and has its other names."""

    def __init__(self, loop: Loop, model: nn.Module, micro: int, config: dict[str, Any]) -> None:
        names = ARGUMENTS if isinstance(config.get("optimizer", {}), dict) else {*ARGUMENTS, "optimizer"}
        arguments = {name: config.pop(name) for name in names & config.keys()}
        if not {"args", "config"} & arguments.keys():
            arguments["config"] = loop.config(**config)
        self.engine, _, self.loader, self.schedule = loop.deepspeed.initialize(model=model, **arguments)
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.engine.backward(loss, **kwargs)
        self._loop.see("loss", loss)

    def masters(self) -> dict[str, Tensor]:
        return self._loop.weights(self.engine.module)

    def close(self) -> None:
        self.engine.destroy()
