"""Habits of loops themselves: accumulation, schedules, evaluation, interrupts, threads, batches of every
size.

Invariant: a loop that runs with plain torch on every rank runs with the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.loop import Habit, Loop, Trainer, each, habits_of
from tests.habits.networks import ORDER, WIDTH, Block, Net, as_loss_of, fit, raises, square, step_on, steps_of

# --- micro-batches --------------------------------------------------------------------------------------


@as_loss_of(Net, micro=4)
def micro_batches(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    return square(net(x))


def micro_batches_without_sync(loop: Loop) -> None:
    """Use `no_sync` around all micro-batches but the last, as with DDP, and one step per update."""
    net = loop.train(Net())
    for step in range(2):
        for micro in range(3):
            with net.no_sync() if micro < 2 else contextlib.nullcontext():
                net.backward(square(net(loop.data(3 * step + micro))) / 3)
        loop.see("updated", net.step())


def a_last_step_that_is_short(loop: Loop) -> None:
    """End the data in the middle of a step, and drop the rest."""
    net = loop.train(Net(), 4)
    for epoch in range(2):
        for number in range(6):
            net.backward(square(net(loop.data(6 * epoch + number))))
            net.step()
        net.zero_grad()


def on_one_rank(loop: Loop, change: Callable[[Tensor], Tensor]) -> None:
    """Change the loss of a bad batch on one rank only."""
    net = loop.train(Net())
    fit(loop, net, steps=1)
    fit(loop, net, lambda x: change(square(net(x))) if loop.rank == 1 else square(net(x)), 1, seed=1)
    fit(loop, net, steps=1, seed=2)


CHANGES: dict[str, Any] = {
    "a_batch_that_one_rank_skips": lambda loss: loss * 0.0,
    "a_loss_without_a_graph_on_one_rank": lambda loss: torch.zeros((), requires_grad=True),
}


def a_loss_that_is_not_finite(loop: Loop) -> None:
    """Return NaN on one rank: no rank updates, and training goes on."""
    net = loop.train(Net())
    for number, first in enumerate([1.0, float("nan") if loop.rank == 1 else 1.0, float("inf"), 1.0]):
        x = loop.data(number)
        x[0, 0] = first
        net.backward(square(net(x)))
        loop.see("updated", net.step())


def batches_of_every_size(loop: Loop) -> None:
    """Use batches of other sizes on other ranks, and an empty one on one."""
    net = loop.train(Net())
    sizes = [pair[loop.rank] for pair in [(4, 2), (1, 7), (3, 0), (0, 5)]]
    data = [loop.data(number, size, WIDTH) for number, size in enumerate(sizes)]
    step_on(net, (net(x).float().square().sum() for x in data))


# --- zero_grad, schedules, clipping ---------------------------------------------------------------------


def zero_grad_in_every_way(loop: Loop) -> None:
    """Call `zero_grad` before the forward, by module and by optimizer, to zero and to None."""
    net = loop.train(Net())
    clearing = (
        (net.optimizer.zero_grad,),
        (partial(net.module.zero_grad, set_to_none=False),),
        (net.module.zero_grad, partial(net.optimizer.zero_grad, set_to_none=False)),
        (),
    )
    for number, calls in enumerate(clearing):
        for call in calls:
            call()
        fit(loop, net, steps=1, seed=number)


def schedules_of_torch(loop: Loop) -> None:
    """Step a scheduler over the optimizer by hand."""
    net = loop.train(Net())
    schedule = torch.optim.lr_scheduler.StepLR(net.optimizer, 2, 0.5)
    for _ in steps_of(loop, net, 4):
        schedule.step()
        loop.see("lr", [group["lr"] for group in net.optimizer.param_groups])


def a_plateau_of_each_ranks_loss(loop: Loop) -> None:
    """Tell a schedule the loss of one rank's data, which gets better on one rank and worse on the other."""
    net = loop.train(Net())
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(net.optimizer, patience=0)
    for number in steps_of(loop, net):
        schedule.step(float(number * (2 * loop.rank - 1)))


def an_optimizer_that_is_stepped(loop: Loop) -> None:
    """Call the optimizer's own `step`, as a loop without an engine does."""
    net = loop.train(Net())
    net.backward(square(net(loop.data(0))))
    net.optimizer.step()


def a_gradient_scaler(loop: Loop) -> None:
    """Step the optimizer by torch's own scaler."""
    net = loop.train(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(square(net(loop.data(0)))).backward()
    scaler.step(net.optimizer)


# --- evaluation -----------------------------------------------------------------------------------------


def evaluation_between_steps(loop: Loop) -> None:
    """Evaluate under no_grad, inference_mode, eval and train, with and without."""
    net = loop.train(Net(lambda: nn.Sequential(Block(), nn.Dropout(0.2))))
    for number in range(3):
        net.module.train()
        fit(loop, net, steps=1, seed=number)
        net.module.eval()
        with torch.no_grad():
            loop.see("no_grad", net(loop.data(90)))
        with torch.inference_mode():
            loop.see("inference_mode", net(loop.data(91)).clone())
        loop.see("with gradients", net(loop.data(92)))


# --- what goes wrong ------------------------------------------------------------------------------------


class Fails(Net):
    """A model that raises an error in the middle of a forward on request."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](self.into(x))
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.head(self.blocks[2](self.blocks[1](h)))


def failing(loop: Loop, error: BaseException) -> None:
    """Leave a failed batch out; or press Ctrl-C in a notebook, and run the cell again."""
    net = loop.train(Fails())
    for number in range(4):
        net.module.error = error if number == 2 else None
        try:
            net.backward(square(net(loop.data(number))))
        except type(error):
            loop.see("raised", number)
            net.zero_grad()
            continue
        net.step()


def a_forward_that_fails_between_micro_batches(loop: Loop) -> None:
    """Catch an error of a forward: the micro-batches before it stay."""
    net = loop.train(Fails(), 2)
    for number in range(4):
        if number % 2:
            net.module.error = ValueError("mine")
            raises(loop, "forward", partial(net, loop.data(90)))
        fit(loop, net, steps=1, seed=number)


def _fail(grad: Tensor) -> None:
    raise ValueError("mine")


def an_exception_in_the_backward(loop: Loop) -> None:
    """Raise in a hook on a tensor."""
    net = loop.train(Net())
    for number in range(3):
        out = net(loop.data(number))
        if number == 1:
            out.register_hook(_fail)
        try:
            net.backward(square(out))
        except ValueError:
            loop.see("raised", number)
            net.zero_grad()
            continue
        net.step()


# --- surroundings ---------------------------------------------------------------------------------------


def a_thread(loop: Loop) -> None:
    """Train in a thread other than the main one, as servers and notebooks do."""
    net = loop.train(Net())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fit, loop, net).result()
    fit(loop, net, seed=2)


def a_model_in_ddp(loop: Loop) -> None:
    """Wrap the model in DDP, as an older script does."""
    net = loop.train(Net())
    # With a broadcast first, DDP itself fails where parameters are sharded.
    wrapped = nn.parallel.DistributedDataParallel(net.module, init_sync=False)
    net.backward(square(wrapped(loop.data(0))))


STEPPED = "must not be called: `engine.step()` updates"

FAILURES = {"an_exception_in_the_forward": RuntimeError("out of memory"), "an_interrupt": KeyboardInterrupt()}

HABITS = habits_of(
    globals(),
    *each(failing, FAILURES),
    *each(on_one_rank, CHANGES),
    Habit(micro_batches_without_sync, close=ORDER, why="stage 3 reduces after every backward"),
    Habit(
        a_plateau_of_each_ranks_loss,
        refused="`optimizer.param_groups`: must have the same learning rates on every rank",
        why="each rank would move its pieces at a rate of its own",
    ),
    Habit(an_optimizer_that_is_stepped, refused=STEPPED, why="the engine has the gradients"),
    Habit(a_gradient_scaler, refused=STEPPED, why="the engine has the gradients"),
    Habit(a_model_in_ddp, refused="must not be in `DistributedDataParallel`", why="both would sum gradients"),
)
