"""Scripts that use `param.grad` between backward and step, or freeze and thaw parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.dropin.parameters import Net
from tests.dropin.script import Run, Script, square

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
ZERO = (0,)
MOMENTUM = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}


def grads(engine: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in engine.module.named_parameters()}


def gradients_that_are_read(run: Run) -> None:
    """Read `p.grad` after every backward; before the last micro-batch it is of this rank alone."""
    engine = run.engine(Net(), gradient_accumulation_steps=3)
    for step in range(6):
        engine.backward(square(engine(run.data(step))))
        found = grads(engine)
        run.tell("grads", found if (step + 1) % 3 == 0 or run.rank == 0 else None)
        engine.step()
        run.tell("none", [p.grad is None for p in engine.module.parameters()] if (step + 1) % 3 == 0 else 0)


def clip(engine: Any, run: Run, step: int) -> None:
    """Call `clip_grad_norm_` on the module's parameters, as in plain torch."""
    run.tell("norm", nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-2).float())
    run.tell("clipped", grads(engine))


def clip_by_value(engine: Any, run: Run, step: int) -> None:
    """Call `clip_grad_value_` before the last of two micro-batches."""
    if step % 2:
        nn.utils.clip_grad_value_(engine.module.parameters(), 1e-3)


def scale_by_hand(engine: Any, run: Run, step: int) -> None:
    """Write by `p.grad.mul_`, `p.grad.data` and `p.grad = ...`, each on some parameters."""
    for number, parameter in enumerate(engine.module.parameters()):
        if number % 3 == 0:
            parameter.grad.mul_(0.5)
        elif number % 3 == 1:
            parameter.grad.data.clamp_(-1e-3, 1e-3)
        else:
            parameter.grad = parameter.grad * 2


def drop_the_head(engine: Any, run: Run, step: int) -> None:
    """Set `p.grad = None` for the head, as DINO does at first; its values and momentum stay."""
    for parameter in engine.module.head.parameters() if step in (0, 2) else ():
        parameter.grad = None


def add_noise(engine: Any, run: Run, step: int) -> None:
    """Add noise to `p.grad`, the same on all ranks, and a penalty's gradient by hand."""
    for parameter in engine.module.parameters():
        parameter.grad += 1e-2 * torch.ones_like(parameter) + 1e-2 * parameter.detach()


def zero_a_block(engine: Any, run: Run, step: int) -> None:
    """Zero the gradients of a block; the engine clips the rest."""
    for parameter in engine.module.blocks[0].parameters():
        parameter.grad.zero_()


def replace_unread(engine: Any, run: Run, step: int) -> None:
    """Assign to a `p.grad` that nothing has read, before and after the last micro-batch."""
    for parameter in engine.module.head.parameters():
        parameter.grad = 1e-2 * (step + 1) * torch.ones_like(parameter)


CHANGES: dict[Any, tuple[int, dict[str, Any]]] = {
    clip: (3, {"optimizer": ADAMW}),
    clip_by_value: (4, {"gradient_accumulation_steps": 2}),
    scale_by_hand: (3, {}),
    drop_the_head: (4, {"optimizer": ADAMW}),
    add_noise: (3, {}),
    zero_a_block: (3, {"gradient_clipping": 0.02}),
    replace_unread: (4, {"gradient_accumulation_steps": 2}),
}
"""Change of `param.grad` between backward and step -> micro-batches and keys of the config."""


def changes(change: Any, count: int, config: dict[str, Any]) -> Script:
    def script(run: Run) -> None:
        engine = run.engine(Net(), **config)
        for step in range(count):
            engine.backward(square(engine(run.data(step))))
            change(engine, run, step)
            engine.step()

    script.__name__ = f"gradients_{change.__name__}"
    return Script(script, stages=ZERO)


def gradients_in_a_step_and_outside(run: Run) -> None:
    """Call `safe_get_full_grad` before a backward, after it, after the step, and after `zero_grad`."""
    engine = run.engine(Net(), gradient_accumulation_steps=2)
    parameter = engine.module.head.weight

    def read() -> None:
        run.tell("gradient", run.deepspeed.utils.safe_get_full_grad(parameter))

    read()
    for micro in range(4):
        engine.backward(square(engine(run.data(micro))))
        if micro % 2:
            read()
        engine.step()
        if micro % 2:
            read()
    engine.backward(square(engine(run.data(4))))
    engine.zero_grad()
    read()


def a_part_that_is_frozen(run: Run) -> None:
    """Freeze a part after some steps, for good."""
    engine = run.engine(Net())
    run.train(engine, 2)
    engine.module.blocks[0].requires_grad_(False)
    run.train(engine, 3, first=2)


def frozen_and_thawed_with_adam(run: Run) -> None:
    """Freeze and thaw; moments rest, and bias correction goes on from the parameter's own count."""
    engine = run.engine(Net(), optimizer=ADAMW)
    engine.module.into.requires_grad_(False)
    run.train(engine, 2)
    engine.module.blocks[1].requires_grad_(False)
    engine.module.into.requires_grad_(True)
    run.train(engine, 2, first=2)
    run.tell("rests", run.weights(engine.module)["blocks.1.up.weight"])
    engine.module.requires_grad_(True)
    run.train(engine, 3, first=4)


def frozen_and_thawed_with_momentum(run: Run) -> None:
    """Freeze and thaw under SGD with momentum and decay; whole blocks, and one bias."""
    engine = run.engine(Net(), optimizer=MOMENTUM)
    run.train(engine, 2)
    engine.module.blocks.requires_grad_(False)
    engine.module.head.bias.requires_grad_(False)
    run.train(engine, 2, first=2)
    engine.module.requires_grad_(True)
    run.train(engine, 2, first=4)


def two_adversaries(run: Run) -> None:
    """Train one of two halves at a time, as generator and discriminator, with accumulation."""
    engine = run.engine(Net(), gradient_accumulation_steps=2)
    for step in range(8):
        turn = step // 2 % 2 == 0
        engine.module.blocks.requires_grad_(turn)
        engine.module.head.requires_grad_(not turn)
        loss = square(engine(run.data(step)))
        engine.backward(loss)
        engine.step()
        run.tell("loss", loss)


def gradual_unfreezing(run: Run) -> None:
    """Give all layers to the engine, freeze the lower ones at once, and thaw them one by one."""
    engine = run.engine(Net(), optimizer=ADAMW)
    for parameter in engine.module.parameters():
        parameter.requires_grad = False
    for step, part in enumerate((engine.module.head, *reversed(engine.module.blocks), engine.module.into)):
        part.requires_grad_(True)
        run.train(engine, 1, first=step)


def frozen_in_a_client_optimizer(run: Run) -> None:
    """Freeze parameters of groups that the script made itself."""
    net = Net()
    groups = [
        {"params": net.blocks.parameters()},
        {"params": [*net.into.parameters(), *net.head.parameters()], "lr": 1e-2},
    ]
    engine = run.engine(net, optimizer=torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1))
    run.train(engine, 1)
    engine.module.blocks[2].requires_grad_(False)
    run.train(engine, 2, first=1)
    engine.module.blocks[2].requires_grad_(True)
    run.train(engine, 2, first=3)


MOVES = "a frozen parameter goes on by its moments and its decay, and its count of steps with the others'"
SUMS = "gradients are in pieces and out of reach"

SCRIPTS = (
    Script(gradients_that_are_read, stages=ZERO),
    *(changes(change, *rest) for change, rest in CHANGES.items()),
    Script(gradients_in_a_step_and_outside, alike=ZERO, why="stages 1-2 raise, 3 has what was last"),
    Script(a_part_that_is_frozen),
    Script(frozen_and_thawed_with_adam, alike=ZERO, why=MOVES),
    Script(frozen_and_thawed_with_momentum, alike=ZERO, why=MOVES),
    Script(two_adversaries),
    Script(gradual_unfreezing, alike=ZERO, why=MOVES),
    Script(frozen_in_a_client_optimizer, alike=ZERO, why=MOVES),
)
