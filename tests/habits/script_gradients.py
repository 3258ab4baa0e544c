"""Scripts that use `param.grad` between backward and step, or freeze and thaw parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.habits.loop import Habit, Loop, each, habits_of
from tests.habits.networks import Seeded, fit, square

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
ZERO = (0,)


def grads(engine: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in engine.module.named_parameters()}


def gradients_that_are_read(loop: Loop) -> None:
    """Read `p.grad` after every backward; before the last micro-batch it is of this rank alone."""
    engine = loop.train(Seeded(), gradient_accumulation_steps=3)
    for step in range(6):
        engine.backward(square(engine(loop.data(step))))
        found = grads(engine)
        loop.see("grads", found if (step + 1) % 3 == 0 or loop.rank == 0 else None)
        engine.step()
        loop.see("none", [p.grad is None for p in engine.module.parameters()] if (step + 1) % 3 == 0 else 0)


def clip(engine: Any, loop: Loop, step: int) -> None:
    """Call `clip_grad_norm_` on the module's parameters, as in plain torch."""
    loop.see("norm", nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-2).float())
    loop.see("clipped", grads(engine))


def clip_by_value(engine: Any, loop: Loop, step: int) -> None:
    """Call `clip_grad_value_` before the last of two micro-batches."""
    if step % 2:
        nn.utils.clip_grad_value_(engine.module.parameters(), 1e-3)


def scale_by_hand(engine: Any, loop: Loop, step: int) -> None:
    """Write by `p.grad.mul_`, `p.grad.data` and `p.grad = ...`, each on some parameters."""
    for number, parameter in enumerate(engine.module.parameters()):
        if number % 3 == 0:
            parameter.grad.mul_(0.5)
        elif number % 3 == 1:
            parameter.grad.data.clamp_(-1e-3, 1e-3)
        else:
            parameter.grad = parameter.grad * 2


def drop_the_head(engine: Any, loop: Loop, step: int) -> None:
    """Set `p.grad = None` for the head, as DINO does at first; its values and momentum stay."""
    for parameter in engine.module.head.parameters() if step in (0, 2) else ():
        parameter.grad = None


def replace_unread(engine: Any, loop: Loop, step: int) -> None:
    """Assign to a `p.grad` that nothing has read, before and after the last micro-batch."""
    for parameter in engine.module.head.parameters():
        parameter.grad = 1e-2 * (step + 1) * torch.ones_like(parameter)


Change = Callable[[Any, Loop, int], None]


def changed(loop: Loop, case: tuple[Change, int, dict[str, Any]]) -> None:
    """Change `param.grad` between the backward and the step of so many micro-batches."""
    change, count, config = case
    engine = loop.train(Seeded(), **config)
    for step in range(count):
        engine.backward(square(engine(loop.data(step))))
        change(engine, loop, step)
        engine.step()


CHANGES: dict[str, tuple[Change, int, dict[str, Any]]] = {
    "gradients_clip": (clip, 3, {"optimizer": ADAMW}),
    "gradients_clip_by_value": (clip_by_value, 4, {"gradient_accumulation_steps": 2}),
    "gradients_scale_by_hand": (scale_by_hand, 3, {}),
    "gradients_drop_the_head": (drop_the_head, 4, {"optimizer": ADAMW}),
    "gradients_replace_unread": (replace_unread, 4, {"gradient_accumulation_steps": 2}),
}


def frozen_and_thawed(loop: Loop) -> None:
    """Freeze and thaw blocks and one bias: moments rest, and each parameter goes on by its own count."""
    engine = loop.train(Seeded(), optimizer=ADAMW)
    net = engine.module
    net.into.requires_grad_(False)
    fit(loop, engine)
    net.blocks[1].requires_grad_(False)
    net.head.bias.requires_grad_(False)
    net.into.requires_grad_(True)
    fit(loop, engine, seed=2)
    loop.see("rests", loop.weights(net)["blocks.1.up.weight"])
    net.requires_grad_(True)
    fit(loop, engine, steps=3, seed=4)


def frozen_in_a_client_optimizer(loop: Loop) -> None:
    """Freeze parameters of groups that the script made itself."""
    net = Seeded()
    groups = [
        {"params": net.blocks.parameters()},
        {"params": [*net.into.parameters(), *net.head.parameters()], "lr": 1e-2},
    ]
    engine = loop.train(net, optimizer=torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1))
    fit(loop, engine, steps=1)
    engine.module.blocks[2].requires_grad_(False)
    fit(loop, engine, seed=1)
    engine.module.blocks[2].requires_grad_(True)
    fit(loop, engine, seed=3)


MOVES = "a frozen parameter goes on by its moments and its decay, and its count of steps with the others'"

HABITS = habits_of(
    globals(),
    *each(changed, CHANGES, stages=ZERO),
    Habit(gradients_that_are_read, stages=ZERO),
    Habit(frozen_and_thawed, alike=ZERO, why=MOVES),
    Habit(frozen_in_a_client_optimizer, alike=ZERO, why=MOVES),
)
