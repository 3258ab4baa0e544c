"""Plain torch for several ranks: a model, an optimizer, an all-reduce by hand.

In bf16 the optimizer has fp32 masters and the model has them rounded, except where a rule pins. Masters adopt
the elements that a script writes into the model's weights, and no others.

Invariant: of zerodrift only the rounding of split masters is used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.habits.loop import Loop
from zerodrift.optim.rounding import round_away

LEARNING = {"lr": 0.05, "momentum": 0.9}


class Plain:
    """A trainer by torch alone."""

    def __init__(self, loop: Loop, model: nn.Module, micro: int, config: dict[str, Any]) -> None:
        self.module = model
        self._loop = loop
        self._micro = micro
        self._calls = 0
        self._world = dist.get_world_size()
        # As ZeRO does: stages 2 and 3 reduce after every micro-batch, which adds in another order.
        self._every = loop.stage >= 2
        self._sums: dict[str, Tensor] = {}
        self._low = loop.mode == "bf16"
        self._parameters = dict(model.named_parameters())
        self._masters = {
            name: nn.Parameter(_wide(parameter.detach()), requires_grad=parameter.requires_grad)
            for name, parameter in self._parameters.items()
        }
        rules = config.get("precision", {}).get("rules", [])
        self._pinned = {n for n in self._parameters for rule in rules if fnmatch(n, rule["match"])}
        for name, parameter in self._parameters.items():
            if not self._low or name in self._pinned or not parameter.is_floating_point():
                continue
            if parameter.requires_grad:
                parameter.data = self._rounded(name)
                parameter.grad_dtype = torch.float32
            else:
                parameter.data = parameter.data.bfloat16()
                self._masters[name].data = parameter.data
        trained = [master for master in self._masters.values() if master.requires_grad]
        self.optimizer = torch.optim.SGD(trained, **LEARNING)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._adopt()
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self._loop.see("loss", loss)
        loss.backward(**kwargs)

    def step(self) -> bool:
        self._adopt()
        self._calls += 1
        due = self._calls % self._micro == 0
        if due or self._every:
            self._reduce()
        if not due:
            return False
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in self._sums.values()))
        norm /= self._world * self._micro
        self._loop.see_norm(norm)
        if math.isfinite(norm):
            for name, master in self._masters.items():
                grad = self._sums.get(name)
                master.grad = None if grad is None else grad / (self._world * self._micro)
            self.optimizer.step()
            self._show()
        self.zero_grad()
        return math.isfinite(norm)

    def zero_grad(self) -> None:
        self._sums = {}
        self._calls = 0
        for parameter in self._parameters.values():
            parameter.grad = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def gathered(
        self, names: Iterable[str] | None = None, write: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        chosen = self._parameters if names is None else names
        yield {name: self._parameters[name].data for name in chosen}

    def gradient(self, name: str) -> Tensor:
        grad = self._local(name, self._parameters[name])
        dist.all_reduce(grad)
        return (grad + self._sums.get(name, 0.0)) / (self._world * self._micro)

    def masters(self) -> dict[str, Tensor]:
        self._adopt()
        return {name: master.detach().float() for name, master in self._masters.items()}

    def close(self) -> None:
        pass

    # --- in between ----------------------------------------------------------------------------------------

    def _local(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return this rank's gradient; a parameter without one counts as zero."""
        if parameter.grad is None:
            return torch.zeros_like(self._masters[name])
        grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        return grad.detach().float().clone()

    def _reduce(self) -> None:
        held = self._parameters.items()
        trained = {name: p for name, p in held if self._masters[name].requires_grad and p.requires_grad}
        if not trained:
            return
        grads = [self._local(name, parameter) for name, parameter in trained.items()]
        flat = torch.cat([grad.view(-1) for grad in grads])
        dist.all_reduce(flat)
        for name, part in zip(trained, flat.split([grad.numel() for grad in grads]), strict=True):
            grad = part.view(trained[name].shape)
            self._sums[name] = self._sums[name] + grad if name in self._sums else grad
            trained[name].grad = None

    def _rounded(self, name: str) -> Tensor:
        master = self._masters[name].detach()
        if not self._low or name in self._pinned or not self._masters[name].requires_grad:
            return master
        return round_away(master) if master.is_floating_point() else master

    @torch.no_grad()
    def _show(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                parameter.copy_(self._rounded(name))

    @torch.no_grad()
    def _adopt(self) -> None:
        """Copy elements that a script wrote into the model to the masters."""
        for name, parameter in self._parameters.items():
            written = parameter.data != self._rounded(name)
            if bool(written.any()):
                self._masters[name][written] = parameter.data[written].to(self._masters[name].dtype)


def _wide(values: Tensor) -> Tensor:
    """Return a copy, in fp32 unless the values are wider."""
    return values.float().clone() if values.is_floating_point() else values.clone()
