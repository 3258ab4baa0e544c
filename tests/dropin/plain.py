"""Plain torch under the names of DeepSpeed that scripts use, the same at every stage.

Gradients are averaged over micro-batches and ranks by hand, an optimizer of torch updates whatever has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerodrift.optim import schedules as lr_schedules  # compared with their formulas elsewhere


def _from_checkpoint(model: nn.Module, folder: str) -> nn.Module:
    model.load_state_dict(torch.load(f"{folder}/plain", weights_only=False)[0])
    return model


class Engine:
    """An engine of one model in plain torch."""

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        optimizer: Any = None,
        lr_scheduler: Any = None,
        model_parameters: Any = None,
    ) -> None:
        self.module = model
        for value in (*model.parameters(), *model.buffers()):
            dist.broadcast(value.data, 0)
        if optimizer is None:
            block = config["optimizer"]
            params = {key: value for key, value in block["params"].items() if key != "torch_adam"}
            given = list(model.parameters()) if model_parameters is None else model_parameters
            optimizer = getattr(torch.optim, block["type"])(given, **params)
        self.optimizer = optimizer(list(model.parameters())) if not hasattr(optimizer, "step") else optimizer
        if lr_scheduler is None and "scheduler" in config:
            block = config["scheduler"]
            home = lr_schedules if hasattr(lr_schedules, block["type"]) else torch.optim.lr_scheduler
            lr_scheduler = getattr(home, block["type"])(self.optimizer, **block["params"])
        self.lr_scheduler = lr_scheduler
        self._steps = config.get("gradient_accumulation_steps", 1)
        self._counts = config.get("managed_gradient_accumulation", True)
        self._clip = config["gradient_clipping"]
        self.micro_steps = self.global_steps = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.module(*args, **kwargs)

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._counts and (self.micro_steps + 1) % self._steps == 0

    def backward(self, loss: Tensor) -> None:
        assert loss.numel() == 1
        (loss / self._steps).backward()
        if self.is_gradient_accumulation_boundary():
            self._average()

    def _average(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def step(self) -> None:
        if not self._counts:
            self._average()
        if not self._counts or self.is_gradient_accumulation_boundary():
            if self._clip:
                nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_steps += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.micro_steps += 1

    def zero_grad(self) -> None:
        self.module.zero_grad()

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def no_sync(self, *_: Any) -> Any:
        raise AssertionError

    coalesce_grad_reduction = set_gradient_accumulation_boundary = no_sync

    def save_checkpoint(self, folder: str) -> None:
        if dist.get_rank() == 0:
            states = self.module.state_dict(), self.optimizer.state_dict(), self.global_steps
            torch.save(states, f"{folder}/plain")
        dist.barrier()

    def load_checkpoint(self, folder: str) -> None:
        state, optimizer, self.global_steps = torch.load(f"{folder}/plain", weights_only=False)
        self.module.load_state_dict(state)
        self.optimizer.load_state_dict(optimizer)

    def train(self, mode: bool = True) -> Any:
        return self.module.train(mode)

    def eval(self) -> Any:
        return self.module.eval()

    def destroy(self) -> None:
        self.optimizer.zero_grad()


def initialize(**arguments: Any) -> tuple[Any, ...]:
    engine = Engine(**arguments)
    return engine, engine.optimizer, None, engine.lr_scheduler


@contextlib.contextmanager
def _whole(params: Any, modifier_rank: int | None = None, **rest: Any) -> Iterator[None]:
    yield
    if modifier_rank is not None:
        for parameter in [params] if isinstance(params, nn.Parameter) else params:
            dist.broadcast(parameter.data, modifier_rank)


@contextlib.contextmanager
def _init(**rest: Any) -> Iterator[None]:
    yield


zero = SimpleNamespace(
    GatheredParameters=_whole, Init=_init, register_external_parameter=lambda module, parameter: None
)
utils = SimpleNamespace(
    safe_get_full_grad=lambda parameter: parameter.grad,
    zero_to_fp32=SimpleNamespace(load_state_dict_from_zero_checkpoint=_from_checkpoint),
)
runtime = SimpleNamespace(lr_schedules=lr_schedules)

plain = True
"""Mark of this package for `Run.is_plain`."""
