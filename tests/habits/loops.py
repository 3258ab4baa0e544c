"""Habits of loops themselves: accumulation, schedules, evaluation, interrupts, threads, batches of every
size.

Invariant: a loop that runs with plain torch on every rank runs with the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.habits.loop import Habit, Loop, Trainer, each, habits_of
from tests.habits.networks import (
    ORDER,
    WIDTH,
    Block,
    Net,
    Parts,
    as_loss_of,
    fit,
    raises,
    square,
    step_on,
    steps_of,
)

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


def a_batch_that_is_skipped(loop: Loop) -> None:
    """Skip a batch on every rank, by `continue` before the backward."""
    net = loop.train(Net())
    for number in range(4):
        loss = square(net(loop.data(number)))
        if number == 1:
            continue
        net.backward(loss)
        net.step()


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


def scheduled(loop: Loop, make: Callable[[torch.optim.Optimizer], tuple[Any, ...]]) -> None:
    """Step a scheduler over the optimizer by hand."""
    net = loop.train(Net())
    schedule, *told = make(net.optimizer)
    for _ in steps_of(loop, net, 5):
        schedule.step(*told)
        loop.see("lr", [group["lr"] for group in net.optimizer.param_groups])


SCHEDULES: dict[str, Any] = {
    "schedules_of_torch": lambda of: (torch.optim.lr_scheduler.StepLR(of, 2, 0.5),),
    # Told what the loss was.
    "a_plateau": lambda of: (torch.optim.lr_scheduler.ReduceLROnPlateau(of, factor=0.5, patience=0), 1.0),
}


def learning_rates_by_hand(loop: Loop) -> None:
    """Assign `group["lr"] = ...` before every step."""
    net = loop.train(Net())
    for number in range(4):
        for group in net.optimizer.param_groups:
            group["lr"] = 0.02 * (number + 1)
        fit(loop, net, steps=1, seed=number)


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


@as_loss_of(Net, micro=2)
def evaluation_between_micro_batches(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    with torch.no_grad():
        loop.see("evaluated", net(loop.data(90)))
    return square(net(x))


def generation(loop: Loop) -> None:
    """Sample token by token, calling the module by itself."""

    class Language(Net):
        def __init__(self) -> None:
            super().__init__(out=11)
            self.tokens = nn.Embedding(11, WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(self.tokens(tokens))

        @torch.no_grad()
        def generate(self, tokens: Tensor) -> Tensor:
            for _ in range(4):
                chances = self(tokens)[:, -1].float().softmax(-1)
                tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
            return tokens

    net = loop.train(Language())
    for number in range(2):
        tokens = loop.integers(number, 11, 2, 4)
        net.backward(nn.functional.cross_entropy(net(tokens).float().flatten(0, 1), tokens.flatten()))
        net.step()
        loop.see("generated", net.module.generate(tokens))


def evaluation_of_other_lengths(loop: Loop) -> None:
    """Evaluate all data of each rank: the last batches of rank 0 run alone."""
    net = loop.train(Net())
    fit(loop, net)
    net.module.eval()
    with torch.no_grad():
        for number in range(2):
            loop.see("evaluated", net(loop.data(90 + number, 4 - loop.rank, WIDTH)))
    net.module.train()
    fit(loop, net)


def inference_tensors(loop: Loop) -> None:
    """Train on data that were made in inference_mode."""
    net = loop.train(Net())
    with torch.inference_mode():
        x = loop.data(0) * 2
    step_on(net, (square(net(x.clone() + loop.data(number))) for number in range(2)))


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


def a_default_device(loop: Loop) -> None:
    """Use `with torch.device(...)` around everything."""
    with torch.get_default_device():
        fit(loop, loop.train(Net()))


def gradients_off_around(loop: Loop) -> None:
    """Run a whole script under no_grad, and train under enable_grad."""
    with torch.no_grad():
        net = loop.train(Net())
        with torch.enable_grad():
            fit(loop, net)
        loop.see("evaluated", net(loop.data(9)))


def a_thread(loop: Loop) -> None:
    """Train in a thread other than the main one, as servers and notebooks do."""
    net = loop.train(Net())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fit, loop, net).result()
    fit(loop, net, seed=2)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def surrounded(loop: Loop, case: tuple[Callable[[], Any], Callable[[Any], bool]]) -> None:
    """Train inside a context, and record its state."""
    around, counted = case
    net = loop.train(Net())
    with around() as held:
        fit(loop, net)
    loop.see("counted", counted(held))


SURROUNDINGS: dict[str, Any] = {
    "another_default_dtype": (double_by_default, bool),
    "deterministic_algorithms": (deterministic, bool),
    "a_dispatch_mode": (lambda: FlopCounterMode(display=False), lambda held: held.get_total_flops() > 0),
    "a_profiler": (
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        lambda held: len(held.events()) > 0,
    ),
    "anomaly_mode": (lambda: torch.autograd.detect_anomaly(check_nan=True), bool),
}


class GathersFeatures(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        found = [torch.zeros_like(out) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(found, out.detach())
        return out - torch.stack(found).mean((0, 1))


@as_loss_of(GathersFeatures)
def collectives_of_ones_own(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Average losses for a log, and gather features inside the model."""
    loss = square(net(x))
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    loop.see("mean", mean)
    return loss


def a_model_in_ddp(loop: Loop) -> None:
    """Wrap the model in DDP, as an older script does."""
    net = loop.train(Net())
    # With a broadcast first, DDP itself fails where parameters are sharded.
    wrapped = nn.parallel.DistributedDataParallel(net.module, init_sync=False)
    net.backward(square(wrapped(loop.data(0))))


def a_model_that_another_in_ddp_calls(loop: Loop) -> None:
    """Call a teacher in an engine from the forward of a student in DDP."""
    teacher = loop.train(Net())

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return square(self.head(x.float()) - target)

    student = nn.parallel.DistributedDataParallel(Parts(forward, head=nn.Linear(WIDTH, WIDTH)))
    for number in range(2):
        loss = student(loop.data(number))
        loop.see("loss", loss)
        loss.backward()
        fit(loop, teacher, steps=1, seed=number)


def a_forward_that_is_patched(loop: Loop) -> None:
    """Replace a block's forward by a function, as patches for long contexts do."""
    net = loop.train(Net())
    block = net.module.blocks[1]
    old = block.forward
    block.forward = lambda x, *rest: old(x) * 0.5
    fit(loop, net)
    del block.forward
    fit(loop, net, seed=2)


def functions_over_modules(loop: Loop) -> None:
    """Call `module.apply`, `modules()`, and `train(False)` of a part."""

    def quiet(module: Any) -> None:
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    net = loop.train(Net(lambda: nn.Sequential(Block(), nn.Dropout(0.5), nn.LayerNorm(WIDTH))))
    net.module.apply(quiet)
    net.module.blocks[0].eval()
    loop.see("modules", [type(module).__name__ for module in net.module.modules()])
    fit(loop, net)


STEPPED = "must not be called: `engine.step()` updates"

FAILURES = {
    "an_exception_in_the_forward": RuntimeError("out of memory"),
    "an_interrupt": KeyboardInterrupt(),
}

HABITS = habits_of(
    globals(),
    *each(failing, FAILURES),
    *each(scheduled, SCHEDULES),
    *each(on_one_rank, CHANGES),
    *each(surrounded, SURROUNDINGS),
    Habit(micro_batches_without_sync, close=ORDER, why="stage 3 reduces after every backward"),
    Habit(an_optimizer_that_is_stepped, refused=STEPPED, why="the engine has the gradients"),
    Habit(a_gradient_scaler, refused=STEPPED, why="the engine has the gradients"),
    Habit(a_model_in_ddp, refused="must not be in `DistributedDataParallel`", why="both would sum gradients"),
)
