"""Tensors inside of users' objects are found, replaced, and put back."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerodrift.engine.nested import Replacement, tensors_in
from zerodrift.engine.traversal import will_be_recomputed
from zerodrift.errors import ModelError


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Batch:
    x: Any
    rest: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """A dict whose items are attributes too, like the outputs of models."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


MUTABLE = {
    "list": lambda x: [x, "text"],
    "dict": lambda x: {"x": x, "n": 3},
    "user dict": lambda x: collections.UserDict(x=x),
    "deque": lambda x: collections.deque([x]),
    "set": lambda x: {x},
    "dataclass": Batch,
    "frozen dataclass": Frozen,
    "namespace": lambda x: types.SimpleNamespace(x=x),
    "model output": lambda x: Output(x=x),
    "distribution": lambda x: torch.distributions.Normal(x, torch.ones_like(x)),
    "dict in an object": lambda x: Batch({"a": [x]}),
}
FIXED = {
    "tuple": lambda x: (x, None),
    "named": lambda x: Pair(x, 1),
    "frozenset": lambda x: frozenset([x]),
    "packed": lambda x: nn.utils.rnn.pack_sequence([x]),
    "returned": lambda x: torch.max(x.expand(2, 3), 0),
}


def halves(value: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point()]


def to_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("kind", MUTABLE)
def test_what_can_be_written_to_keeps_its_identity(kind: str) -> None:
    tensor = torch.randn(3)
    value = MUTABLE[kind](tensor)
    assert Replacement(lambda tensor: tensor).apply(value) is value, "nothing to change"
    replacement = Replacement(to_bf16)
    inside = replacement.apply(value)
    assert inside is value or isinstance(value, tuple)
    assert set(halves(inside)) == {torch.bfloat16}
    replacement.undo()
    assert any(found is tensor for found in tensors_in(value))
    assert set(halves(value)) == {torch.float32}


@pytest.mark.parametrize("kind", FIXED)
def test_what_cannot_change_is_built_anew(kind: str) -> None:
    value = FIXED[kind](torch.randn(3))
    assert Replacement(lambda tensor: tensor).apply(value) is value, "nothing to change"
    inside = Replacement(to_bf16).apply(value)
    assert type(inside) is type(value)
    assert set(halves(inside)) == {torch.bfloat16}
    assert set(halves(value)) == {torch.float32}


def test_what_was_written_meanwhile_stays() -> None:
    first, second = torch.randn(3), torch.randn(3)
    value: dict[str, Any] = {"x": first, "kept": [second]}
    replacement = Replacement(to_bf16)
    inside = replacement.apply(value)
    made = torch.zeros(2)
    inside["new"] = made
    inside["kept"].append(made)
    inside["moved"] = inside.pop("x")
    replacement.undo()
    assert value["new"] is made and value["moved"] is first
    assert value["kept"][0] is second and value["kept"][1] is made


def test_one_tensor_in_two_places_stays_one() -> None:
    tensor = torch.randn(3)
    inside = Replacement(to_bf16).apply(([tensor], {"again": tensor}))
    assert inside[0][0] is inside[1]["again"]


def test_circles_and_modules_are_no_trouble() -> None:
    tensor = torch.randn(3)
    value: list[Any] = [tensor, nn.Linear(2, 2), len, Batch, "text"]
    value.append(value)
    assert list(tensors_in(value)) == [tensor]
    assert Replacement(to_bf16).apply(value) is value
    assert value[0].dtype is torch.bfloat16 and value[1].weight.dtype is torch.float32


class ReadOnly(collections.UserDict):  # type: ignore[type-arg]
    def __setitem__(self, key: str, value: Any) -> None:
        if key in self:
            raise TypeError("read only")
        super().__setitem__(key, value)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_under_activation_checkpointing_will_be_recomputed(reentrant: bool) -> None:
    found = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        found.append(will_be_recomputed())
        return x * 2

    x = torch.ones(2, requires_grad=True)
    forward(x)
    checkpoint(forward, x, use_reentrant=reentrant)
    assert found == [False, True]


def test_what_can_neither_be_written_to_nor_built_is_named() -> None:
    with pytest.raises(ModelError, match=r"ReadOnly.*must let its floating tensors be replaced"):
        Replacement(to_bf16).apply(ReadOnly(x=torch.randn(3)))
    ids = ReadOnly(x=torch.arange(3))
    assert Replacement(to_bf16).apply(ids) is ids
