"""Inputs and outputs of a model and its blocks: lists, dicts, batches, objects.

Invariant: the caller sees every change that the model makes to its arguments.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.habits.loop import Habit, Loop, Trainer, each, habits_of
from tests.habits.networks import WIDTH, Block, Net, as_loss_of, fit, net_of, square


class Appends(Block):
    """A block that appends a tensor to a list in its arguments."""

    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        y = super().forward(x)
        found.append(y.float().square().mean())
        return y


@as_loss_of(lambda: Net(Appends))
def a_list_that_blocks_append_to(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Add the auxiliary losses of a mixture of experts."""
    found: list[Tensor] = []
    out = net(x, found)
    loop.see("aux", found)
    return square(out) + 0.1 * sum(found)


class Remembers(Block):
    """A block that writes its result into a cache in its arguments."""

    def forward(self, x: Tensor, cache: dict[Block, Tensor], *, past: list[Tensor]) -> Tensor:
        y = super().forward(x + cache[self] if self in cache else x)
        cache[self] = y
        past += [y.detach()]
        return y


class Cached(Net):
    """A model whose blocks have a cache from one call to the next."""

    def through(self, block: nn.Module, x: Tensor, cache: Any, past: Any) -> Tensor:
        return block(x, cache, past=past)

    def forward(self, x: Tensor, cache: dict[Block, Tensor], past: list[Tensor]) -> Tensor:
        return self.head(self.trunk(x, cache, past))


@as_loss_of(lambda: Cached(Remembers))
def a_cache_that_blocks_write(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Truncate backpropagation: the second call reads the first one's cache, in one graph."""
    cache: dict[Block, Tensor] = {}
    past: list[Tensor] = []
    one, two = net(x, cache, past), net(x + 1.0, cache, past=past)
    loop.see("cache", [len(cache), past])
    return square(one) + square(two)


@dataclass
class State:
    """State that one block hands to the next."""

    h: Tensor
    losses: list[Tensor]
    steps: int = 0


class Bag:
    """An object of an unknown class."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(steps=0, **values)


class Stateful(Block):
    """A block that changes an object in its arguments, and returns nothing."""

    def forward(self, state: Any) -> None:
        state.h = super().forward(state.h)
        state.steps += 1
        state.losses.append(state.h.float().abs().mean())


class ByState(Net):
    """A model whose blocks share an object."""

    def __init__(self, make: Any) -> None:
        super().__init__(Stateful)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        state = self.make(h=self.into(x), losses=[])
        for block in self.blocks:
            block(state)
        return state


def share_state(loop: Loop, make: Any) -> None:
    """Share a state between blocks, as AlphaFold and diffusion models do."""
    net = loop.train(ByState(make))

    def loss(x: Tensor) -> Tensor:
        state = net(x)
        loop.see("state", [state.steps, len(state.losses)])
        return square(state.h) + 0.1 * sum(state.losses)

    fit(loop, net, loss)


STATES = {"a_dataclass_that_blocks_change": State, "an_object_that_blocks_change": Bag}


# --- batches --------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A batch."""

    x: Tensor
    mask: Tensor
    label: Tensor


class FromBatch(Net):
    """A model that reads a batch by key or by attribute, and returns the dtype of its floats."""

    def forward(self, batch: Any) -> dict[str, Any]:
        def get(name: str) -> Any:
            return getattr(batch, name) if hasattr(batch, name) else batch[name]

        out = super().forward(get("x"))
        loss = torch.where(get("mask")[:, None], out.float(), 0.0).square().mean()
        return {"loss": loss, "dtype": str(get("x").dtype), "kind": type(batch).__name__}


def batches(loop: Loop, make: Any) -> None:
    """Pass fp32 batches of a data loader, which are cast for the model and unchanged for the caller."""
    net = loop.train(FromBatch())
    for number in range(2):
        x = loop.data(number).float() + 2**-12  # not a bf16 value
        mask, label = torch.tensor([True, False, True, True]), loop.integers(number, 5, 4)
        batch, before = make(x=x, mask=mask, label=label), x.clone()
        # Plain torch casts by hand what the engine casts.
        out = net(make(x=x.to(loop.dtype), mask=mask, label=label) if loop.plain else batch)
        loop.see("what the model saw", [out["dtype"], out["kind"]])
        net.backward(out["loss"])
        net.step()
        left = batch["x"] if isinstance(batch, (dict, collections.UserDict)) else batch.x
        loop.see("left alone", [left is x, torch.equal(left, before), left.dtype == torch.float32])


def as_batch_feature(**values: Any) -> Any:
    """Return a batch as tokenizers and image processors of `transformers` do."""
    from transformers.feature_extraction_utils import BatchFeature

    return BatchFeature(values)


BATCHES = {
    "a_dict_as_a_batch": dict,
    "a_user_dict_as_a_batch": collections.UserDict,
    "a_named_tuple_as_a_batch": Pair,
    "a_frozen_dataclass_as_a_batch": make_dataclass("FrozenBatch", Pair._fields, frozen=True),
    "an_object_as_a_batch": Bag,
    "an_encoding_as_a_batch": as_batch_feature,
}


class Masked(Net):
    """A model that embeds tokens, adds an optional float, and masks by bools."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH, padding_idx=0)

    def forward(self, tokens: Tensor, keep: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        h = self.tokens(tokens)
        h = h if keep is None else h.masked_fill(~keep[..., None], 0.0)
        return super().forward(h if extra is None else h + extra)


def integers_bools_and_nothing(loop: Loop) -> None:
    """Pass inputs that are no floats, and None."""
    net = loop.train(Masked())
    for number in range(3):
        tokens = loop.integers(number, 11, 2, 5)
        keep = tokens > 2 if number else None
        out = net(tokens, keep, extra=None if number < 2 else loop.data(number, 2, 5, WIDTH))
        net.backward(square(out))
        net.step()


# --- outputs --------------------------------------------------------------------------------------------


def answers(loop: Loop, wrap: Any) -> None:
    """Return an object that holds the output and its loss."""
    net = loop.train(net_of(lambda self, x: wrap(out := Net.forward(self, x), square(out)))())
    fit(loop, net, lambda x: net(x).loss)


def as_output(out: Tensor, loss: Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(loss=loss, logits=out)


OUTPUTS: dict[str, Any] = {
    "an_output_of_a_class_of_its_own": lambda out, loss: Bag(logits=[out], loss=loss),
    "an_output_of_a_model_of_transformers": as_output,
}


@as_loss_of(net_of(lambda self, x: setattr(self, "loss", square(Net.forward(self, x)))))
def a_loss_that_is_stashed(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Call a model that returns None."""
    assert net(x) is None
    return net.module.loss


class Yields(Net):
    """A model that returns a generator, whose body runs after the call has ended."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        h = self.into(x)
        for block in self.blocks:
            h = block(h)
            yield self.head(h)


def an_output_that_is_a_generator(loop: Loop) -> None:
    """Train one loss per block, for early exits."""
    net = loop.train(Yields())
    fit(loop, net, lambda x: sum(square(out) for out in net(x)))


class BlockBag(Block):
    """A block whose output hides its tensors."""

    def forward(self, x: Any) -> Any:
        return Bag(h=super().forward(x if isinstance(x, Tensor) else x.h))


def blocks_that_hand_on_objects(loop: Loop) -> None:
    """Hand only objects of an unknown class from block to block."""
    fit(loop, loop.train(net_of(lambda self, x: self.head(self.trunk(x).h))(BlockBag)))


@as_loss_of(net_of(lambda self, x, y: (Net.forward(self, x), y)), 1)
def an_input_is_the_output(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Return the model's input beside its output."""
    out, echo = net(x, x)
    loop.see("echo", [echo, echo is x])
    return square(out - echo)


HABITS = habits_of(
    globals(),
    *each(share_state, STATES),
    *each(batches, BATCHES),
    *each(answers, OUTPUTS),
    Habit(
        an_output_that_is_a_generator,
        refused="got a generator",
        why="its body runs after the call, without weights",
    ),
)
