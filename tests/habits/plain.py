"""Plain torch for several ranks: a model, an optimizer, an all-reduce by hand.

In bf16 the optimizer has fp32 masters and the model has them rounded, except where a rule pins. Masters adopt
the elements that a script writes into the model's weights, and no others. In fp32 the optimizer has the
parameters themselves.

Scripts of DeepSpeed find its names here as far as they use them, and the averaged gradients in `param.grad`
after the backward of the last micro-batch.

Invariant: of zerodrift only the rounding of split masters is used, and schedules, which are compared with
their formulas elsewhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.habits.loop import Loop
from zerodrift.optim import schedules
from zerodrift.optim.rounding import round_away

LEARNING = {"lr": 0.05, "momentum": 0.9}


class Plain:
    """A trainer by torch alone."""

    def __init__(self, loop: Loop, model: nn.Module, micro: int, config: dict[str, Any]) -> None:
        if loop.deepspeed:
            config = loop.config(**config)
        self.module = model
        self._loop = loop
        self._micro = config.get("gradient_accumulation_steps", micro)
        self._counts = config.get("managed_gradient_accumulation", True)
        self._clip = config.get("gradient_clipping", 0.0)
        self._calls = self.micro_steps = self.global_steps = 0
        # A script of DeepSpeed sees its own gradient of a micro-batch divided.
        self._parts = self._micro if loop.deepspeed else 1
        self._divisor = dist.get_world_size() * self._micro // self._parts
        # As ZeRO does: stages 2 and 3 reduce after every micro-batch, which adds in another order.
        self._every = loop.stage >= 2 and loop.deepspeed is None
        self._sums: dict[str, Tensor] = {}
        self._averaged = False
        self._parameters = dict(model.named_parameters())
        rules = config.get("precision", {}).get("rules", [])
        self._pinned = {n for n in self._parameters for rule in rules if fnmatch(n, rule["match"])}
        self._masters = {name: self._master(name, p) for name, p in self._parameters.items()}
        self.optimizer = self._make_optimizer(config)
        self.lr_scheduler = config.get("lr_scheduler")
        if "scheduler" in config:
            block = config["scheduler"]
            home = schedules if hasattr(schedules, block["type"]) else torch.optim.lr_scheduler
            self.lr_scheduler = getattr(home, block["type"])(self.optimizer, **block["params"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._adopt()
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        (loss / self._parts).backward(**kwargs)
        self._loop.see("loss", loss)
        if self._loop.deepspeed and self.is_gradient_accumulation_boundary():
            self._average()

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._counts and (self._calls + 1) % self._micro == 0

    def step(self) -> bool:
        self._adopt()
        due = self.is_gradient_accumulation_boundary() or not self._counts
        self._calls += 1
        self.micro_steps += 1
        if not due:
            if self._every:
                self._reduce()
            return False
        if not self._averaged:
            self._average()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in self._with_gradient()))
        if self._loop.deepspeed is None:
            self._loop.see_norm(norm)
        if self._clip:
            nn.utils.clip_grad_norm_(self._with_gradient(), self._clip)
        if math.isfinite(norm):
            for name, master in self._masters.items():
                master.grad = self._parameters[name].grad
            self.optimizer.step()
            self._show()
            self.global_steps += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.zero_grad()
        return math.isfinite(norm)

    def zero_grad(self) -> None:
        self._sums = {}
        self._averaged = False
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
        return (grad + self._sums.get(name, 0.0)) / self._divisor

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def masters(self) -> dict[str, Tensor]:
        self._adopt()
        return {name: master.detach().float() for name, master in self._masters.items()}

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

    def close(self) -> None:
        self.zero_grad()

    # --- in between ----------------------------------------------------------------------------------------

    def _master(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Return what the optimizer has of a parameter, and show the parameter in the mode's dtype."""
        if self._loop.mode != "bf16" or name in self._pinned or not parameter.is_floating_point():
            return parameter
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
            return parameter
        master = nn.Parameter(parameter.detach().float().clone())
        parameter.data = round_away(master.detach())
        parameter.grad_dtype = torch.float32
        return master

    def _make_optimizer(self, config: dict[str, Any]) -> Any:
        block = config.get("optimizer", {"type": "SGD", "params": LEARNING})
        trained = [master for master in self._masters.values() if master.requires_grad]
        given = list(self._masters.values()) if self._loop.deepspeed else trained
        if isinstance(block, dict):
            params = {key: value for key, value in block["params"].items() if key != "torch_adam"}
            return getattr(torch.optim, block["type"])(config.get("model_parameters", given), **params)
        return block if hasattr(block, "step") else block(given)

    def _with_gradient(self) -> list[nn.Parameter]:
        """Return the parameters that the step updates."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = self._parameters.items()
        return [p for name, p in named if p.grad is not None and id(self._masters[name]) in held]

    def _local(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return this rank's gradient; a parameter without one counts as zero."""
        if parameter.grad is None:
            return torch.zeros_like(self._masters[name])
        grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        return grad.detach().float().clone()

    def _reduce(self) -> None:
        """Add the sum of all ranks' gradients, in one message, to that of the micro-batches before."""
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

    def _average(self) -> None:
        """Put the mean over ranks of the step's gradients into `param.grad`."""
        self._reduce()
        for name, parameter in self._parameters.items():
            parameter.grad = self._sums[name] / self._divisor if name in self._sums else None
        self._averaged = True

    def _rounded(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, Tensor]]:
        """Yield (parameter, master, what is shown of the master) of all that have a master of their own."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter:
                yield parameter, master, round_away(master.detach())

    @torch.no_grad()
    def _show(self) -> None:
        for parameter, _, shown in self._rounded():
            if parameter.requires_grad:
                parameter.copy_(shown)

    @torch.no_grad()
    def _adopt(self) -> None:
        """Copy elements that a script wrote into the model to the masters."""
        for parameter, master, shown in self._rounded():
            written = parameter.data != shown
            if bool(written.any()):
                master[written] = parameter.data[written].float()


# --- DeepSpeed's functions ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _whole(params: Any, modifier_rank: int | None = None, **rest: Any) -> Iterator[None]:
    yield
    if modifier_rank is not None:
        for parameter in [params] if isinstance(params, nn.Parameter) else params:
            dist.broadcast(parameter.data, modifier_rank)


def _from_checkpoint(model: nn.Module, folder: str) -> nn.Module:
    model.load_state_dict(torch.load(f"{folder}/plain", weights_only=False)[0])
    return model


deepspeed = SimpleNamespace(
    zero=SimpleNamespace(
        GatheredParameters=_whole,
        Init=lambda **rest: contextlib.nullcontext(),
        register_external_parameter=lambda module, parameter: None,
    ),
    utils=SimpleNamespace(
        safe_get_full_grad=lambda parameter: parameter.grad,
        zero_to_fp32=SimpleNamespace(load_state_dict_from_zero_checkpoint=_from_checkpoint),
    ),
    runtime=SimpleNamespace(lr_schedules=schedules),
)
"""Functions of the package that scripts call besides an engine."""
