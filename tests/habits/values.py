"""Reading and writing weights from outside: clamps, averages, saves, replaced modules, gradients by hand.

Invariant: a read value is right or an error, and a written value stays.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.loop import Habit, Loop, Trainer, habits_of, refused, refused_cases
from tests.habits.networks import ORDER, WIDTH, Block, Net, Parts, as_loss_of, fit, raises, square, steps_of

# --- reading --------------------------------------------------------------------------------------------


def weights_after_every_step(loop: Loop) -> None:
    """Read statistics of parameters inside `gathered` after every step."""
    net = loop.train(Net())
    for _ in steps_of(loop, net):
        with net.gathered() as full:
            loop.see("norms", {name: value.float().norm() for name, value in full.items()})
            loop.see("through the module", net.module.blocks[1].up.weight)


def an_average_of_weights(loop: Loop) -> None:
    """Average weights: read after every step, copied in for an evaluation, and back."""
    net = loop.train(Net())
    with net.gathered() as full:
        average = {name: value.float().clone() for name, value in full.items()}
    for _ in steps_of(loop, net):
        with net.gathered() as full:
            for name, value in full.items():
                average[name].lerp_(value.float(), 0.1)
    loop.see("average", average)
    with net.gathered(write=True) as full:
        before = {name: value.clone() for name, value in full.items()}
        for name, value in full.items():
            value.copy_(average[name])
    with torch.no_grad():
        loop.see("with the average", net(loop.data(9)))
    with net.gathered(write=True) as full:
        for name, value in full.items():
            value.copy_(before[name])
    fit(loop, net, seed=5)


def values_that_are_kept(loop: Loop) -> None:
    """Use values of `gathered` after the context and more steps: print, convert to numpy, pickle, save."""
    from safetensors.torch import load, save

    net = loop.train(Net())
    fit(loop, net)
    with net.gathered() as full:
        kept = dict(full)
        state = net.module.state_dict()
    if loop.plain:  # where they are the parameters themselves
        kept, state = copy.deepcopy((kept, state))
    fit(loop, net)
    for found in (kept, state):
        loop.see("kept", {name: found[name] for name in sorted(found)})
        loop.see("printed", repr(found["head.bias"])[:20])
        loop.see("numpy", found["head.bias"].float().detach().cpu().numpy().tolist())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loop.see("saved", torch.load(file)["head.weight"])
    loop.see("saved by others", load(save({name: value.detach() for name, value in state.items()})))


def a_write_to_what_is_shown(loop: Loop) -> None:
    """Write in a context that only shows values."""
    net = loop.train(Net())
    with net.gathered() as full:
        full["head.bias"].fill_(3.0)


def a_gather_in_a_gather(loop: Loop) -> None:
    net = loop.train(Net())
    with net.gathered() as full:
        with net.gathered(["head.weight"]) as inner:
            loop.see("inner", inner["head.weight"])
        loop.see("outer", [full["head.weight"], full["blocks.1.up.weight"], net.module.head.weight])
        with torch.no_grad():
            loop.see("called", net(loop.data(0)))
        loop.see("after a call", [full["blocks.0.up.weight"], net.module.blocks[0].up.weight])
    fit(loop, net)


@as_loss_of(Net)
def a_penalty_on_weights(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Add an L1 term over `parameters()` to the loss, inside `gathered`."""
    out = square(net(x))
    with net.gathered():
        penalty = sum(parameter.float().abs().sum() for parameter in net.module.parameters())
    return out + 0.01 * penalty


@as_loss_of(Net)
def a_penalty_outside_of_gathered(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Add an L1 term without `gathered`: right, or an error, and no NaN."""
    penalty = sum(parameter.float().square().sum() for parameter in net.module.parameters())
    return square(net(x)) + 0.01 * penalty


def gradients_for_a_log(loop: Loop) -> None:
    """Read gradients between backward and step."""
    net = loop.train(Net(), 2)
    for number in range(4):
        net.backward(square(net(loop.data(number))))
        loop.see("gradient", [net.gradient("head.weight"), net.gradient("blocks.1.up.bias")])
        net.step()


# --- writing --------------------------------------------------------------------------------------------


def weights_that_a_forward_writes(loop: Loop) -> None:
    """Write through `.data` in a forward, as a weight constraint does: lost in a gathered block."""

    class Clamps(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.up.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    fit(loop, loop.train(Net(Clamps)))


def weights_that_a_forward_normalizes(loop: Loop) -> None:
    """Normalize in place in a forward, which moves the weight's version."""

    class Normalizes(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.div_(self.up.weight.float().norm())
            return super().forward(x)

    fit(loop, loop.train(Net(Normalizes)))


def a_mask_on_weights(loop: Loop) -> None:
    """Prune: zero the same elements after every step."""
    net = loop.train(Net())
    for _ in steps_of(loop, net):
        with net.gathered(["blocks.1.up.weight"], write=True) as full:
            full["blocks.1.up.weight"].tril_()


def written_outside(loop: Loop, write: Callable[[nn.Linear], Any], **precision: str) -> None:
    """Write between steps, outside of `gathered`: masters take the elements that changed."""
    net = loop.train(Net(), precision=precision)
    fit(loop, net, steps=1)
    write(net.module.head)
    fit(loop, net, seed=1)


AWAY = "`head.weight`: must be"
WRITES: dict[str, Any] = {
    "a_write_through_data": (lambda head: head.weight.data.zero_(), AWAY),
    "a_write_of_one_element": (lambda head: head.weight.data[0, 3].fill_(-7.0), AWAY),
}


def a_write_beside_a_whole_master(loop: Loop) -> None:
    """Write one element where masters are no half of what is shown."""
    written_outside(loop, WRITES["a_write_of_one_element"][0], master="fp32")


# --- surgery --------------------------------------------------------------------------------------------


def operated(loop: Loop, change: Callable[[nn.Module], Any]) -> None:
    """Change the model after the engine was made."""
    model = Net()
    model.blocks[2].up.requires_grad_(False)
    net = loop.train(model)
    fit(loop, net)
    change(net.module)
    fit(loop, net, seed=3)


STAYS = "`head.weight`: must stay"
SURGERY: dict[str, Any] = {
    "a_parameter_that_is_thawed": (
        lambda net: net.blocks[2].up.requires_grad_(True),
        "`blocks.2.up.weight`: must stay frozen",
    ),
    "a_model_that_is_cast": (lambda net: net.double(), "`into.weight`: must"),
    "a_parameter_that_is_replaced": (
        lambda net: setattr(net.head, "weight", nn.Parameter(torch.zeros(8, 8))),
        STAYS,
    ),
    "a_module_that_is_added": (
        lambda net: net.blocks[1].add_module("extra", nn.Linear(8, 8)),
        "`blocks.1.extra.",
    ),
    "a_module_that_is_removed": (lambda net: net.blocks.pop(1), "`blocks.1."),
}


def memory_that_is_assigned(loop: Loop) -> None:
    """Assign other memory to `.data`: the next step takes its values over where they rest whole."""
    operated(loop, lambda net: setattr(net.head.weight, "data", torch.zeros(8, 8, dtype=loop.dtype)))


def modules_that_come_and_wrap(loop: Loop) -> None:
    """Add what has no parameters, and wrap modules that have some."""
    net = loop.train(Net())
    fit(loop, net)
    net.module.dropout = nn.Dropout()
    net.module.blocks[0] = Parts(lambda self, x: self.inside(x), inside=net.module.blocks[0])
    net.module.head = nn.Sequential(net.module.head)
    fit(loop, net, seed=3)


def a_part_that_is_frozen_for_a_forward(loop: Loop) -> None:
    """Switch training off for a forward without gradients, as for a reference policy."""
    net = loop.train(Net())
    for _ in steps_of(loop, net):
        net.module.blocks.requires_grad_(False)
        with torch.no_grad():
            loop.see("reference", net(loop.data(9)))
        net.module.blocks.requires_grad_(True)


def a_model_that_is_moved_to_where_it_is(loop: Loop) -> None:
    """Call `model.to(device)` before an evaluation, `cpu()` and the like."""
    net = loop.train(Net())
    for _ in steps_of(loop, net):
        for kind in ("cpu", torch.device("cpu"), torch.zeros(1, dtype=loop.dtype)):
            net.module.to(kind)
        net.module.cpu()


def a_parameter_that_is_frozen(loop: Loop) -> None:
    net = loop.train(Net())
    fit(loop, net)
    net.module.into.requires_grad_(False)
    fit(loop, net, seed=3)


# --- gradients by hand ----------------------------------------------------------------------------------


def gradients_that_are_set(loop: Loop) -> None:
    """Assign `param.grad = ...` before the step, on every rank."""
    net = loop.train(Net())
    for _ in range(2):
        for seed, parameter in enumerate(net.module.parameters()):
            source = torch.Generator().manual_seed(10 * seed + loop.rank)
            parameter.grad = torch.randn(parameter.shape, generator=source)
        net.step()
    fit(loop, net)


def a_gradient_that_is_added(loop: Loop) -> None:
    """Add noise, or weight decay by hand, after the backward."""
    net = loop.train(Net(), 2)
    for number in range(4):
        net.backward(square(net(loop.data(number))))
        with net.gathered():
            for parameter in net.module.parameters():
                # A loop by hand writes `parameter.grad += ...`; after an engine's backward there is none.
                more = 0.01 * parameter.detach().float()
                parameter.grad = more if parameter.grad is None else parameter.grad + more
        net.step()


def touched(loop: Loop, touch: Callable[[nn.Module], Any]) -> None:
    """Touch gradients between backward and step, while the engine has them."""
    net = loop.train(Net())
    net.backward(square(net(loop.data(0))))
    touch(net.module)
    net.step()


def set_on_one_rank(loop: Loop, before: bool) -> None:
    """Set a gradient on one rank alone, after a backward or without one."""
    net = loop.train(Net())
    if before:
        net.backward(square(net(loop.data(0))))
    if loop.rank == 1:
        net.module.blocks[2].down.bias.grad = torch.ones(WIDTH)
    net.step()


SET: dict[str, Any] = {
    "a_gradient_that_is_set_on_one_rank": (False, "`blocks.2.down.bias` on some ranks only"),
    "a_gradient_that_is_added_on_one_rank": (True, "must be set on every rank or on none"),
}


def frozen_on_one_rank(loop: Loop) -> None:
    net = loop.train(Net())
    net.module.blocks[0].requires_grad_(loop.rank == 0)
    fit(loop, net)


def scaled(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def dropped(module: nn.Module) -> None:
    """Drop the gradients of the last layer, as DINO does."""
    for parameter in module.head.parameters():
        parameter.grad = None


TOUCHES: dict[str, Any] = {
    "gradients_that_are_clipped_by_hand": (
        lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1e-3),
        "got `linalg_vector_norm` of `param.grad`",
    ),
    "gradients_that_are_scaled_where_there_are_some": (
        scaled,
        "`into.weight`: its gradient must be read from the engine",
    ),
    "gradients_that_are_dropped_after_a_backward": (
        dropped,
        "`head.weight`: its gradient must be cleared through the engine",
    ),
    # Plain torch would not move the weights.
    "gradients_that_are_zeroed_after_a_backward": (
        lambda module: module.zero_grad(set_to_none=False),
        "its gradient must be cleared through the engine",
    ),
}


def two_engines(loop: Loop) -> None:
    """Train a GAN: two models, two optimizers, one process."""
    make, judge = loop.train(Net()), loop.train(Net(out=1))
    for number in range(2):
        real, noise = loop.data(number), loop.data(number + 50)
        fake = make(noise)
        judge.backward(square(judge(real) - 1) + square(judge(fake.detach())))
        judge.step()
        make.backward(square(judge(make(noise)) - 1))
        make.step()
        judge.zero_grad()


def a_value(trainer: Trainer, name: str) -> Any:
    with trainer.gathered([name]) as full:
        return full[name].clone()


def a_pretrained_model_that_is_frozen(loop: Loop) -> None:
    """Use a frozen model inside another's loss: VGG features, a reward model."""
    net, judge = loop.train(Net()), loop.train(Net(out=1))
    before = a_value(judge, "head.weight")
    judge.module.eval()
    fit(loop, net, lambda x: square(judge(net(x)).float() - 1))
    judge.zero_grad()
    loop.see("judge", torch.equal(before, a_value(judge, "head.weight")))


def bad_calls(loop: Loop) -> None:
    """Make calls that plain torch refuses, and train on."""
    net = loop.train(Net())
    raises(loop, "a wrong shape", lambda: net(torch.ones(4, 3, dtype=loop.dtype)))
    raises(loop, "no scalar", lambda: net.backward(net(loop.data(0))))
    net.zero_grad()
    raises(loop, "no graph", lambda: net.backward(net(loop.data(0)).detach().sum()))
    net.zero_grad()
    fit(loop, net)


OUTSIDE = "must be written inside `engine.gathered(write=True)`"
ABSENT = "no rank has the values"

HABITS = habits_of(
    globals(),
    *refused(ABSENT, {a_penalty_outside_of_gathered: "`into.weight`: must be gathered"}, at=(3,)),
    *refused(ABSENT, {a_write_beside_a_whole_master: AWAY}, at=(3,)),
    *refused(
        "the values are there for the forward alone",
        {
            weights_that_a_forward_writes: "got a write to its values in a forward",
            weights_that_a_forward_normalizes: "`blocks.0.up.weight`: must be written inside",
        },
        at=(3,),
        split=OUTSIDE,
    ),
    *refused_cases(ABSENT, written_outside, WRITES, at=(3,), split=OUTSIDE),
    *refused_cases("the engine has the gradients", touched, TOUCHES),
    *refused_cases("ranks would update different parameters", set_on_one_rank, SET),
    *refused(
        "ranks would update different parameters",
        {frozen_on_one_rank: "must be trained on every rank or on none"},
    ),
    *refused_cases("the plan is of the model as it was", operated, SURGERY),
    *refused("no rank has the values", {memory_that_is_assigned: STAYS}, at=(3,), split=OUTSIDE),
    *refused("it would be lost", {a_write_to_what_is_shown: "`head.bias`: must be written inside"}),
    Habit(gradients_for_a_log, close=ORDER, why="what is looked at is reduced before the rest of its step"),
    Habit(a_gradient_that_is_added, close=ORDER, why="it is added after the ranks' sum"),
)
