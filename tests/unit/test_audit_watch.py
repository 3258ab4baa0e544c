"""A watched forward has the bits of an unwatched one, and its errors are those of fp64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from zerodrift.inspect.audit.rounding import Rounding, RoundingRecorder, Roundings, Widener
from zerodrift.inspect.trace.operations import paths_in


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute in bf16, for any input."""
    return functional.linear(x, weight.to(torch.bfloat16)).float().square().sum()


class Narrows(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = product) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.compute = nn.Parameter(torch.randn(24, 40)), compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.weight, x)


class Angles(nn.Module):
    """A table without gradients, of positions in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(300))

    def forward(self) -> torch.Tensor:
        positions = torch.arange(300).bfloat16()
        return (positions.float() * self.scale).sum()


def watched(model: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Rounding]]:
    found = Roundings()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with paths_in(model) as path, RoundingRecorder(model, names, path, found, {}):
        out = model(*inputs)
    out.backward()
    return out.detach(), {place.operation: place for place in reversed(found.places.values())}


def given() -> torch.Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_a_watched_forward_has_the_bits_of_an_unwatched_one() -> None:
    plain, seen = Narrows(), Narrows()
    loss = plain(given())
    loss.backward()
    out, _ = watched(seen, given())
    assert torch.equal(out, loss.detach())
    assert plain.weight.grad is not None and seen.weight.grad is not None
    assert torch.equal(plain.weight.grad, seen.weight.grad)


def test_a_local_error_is_that_of_fp64() -> None:
    model = Narrows()
    _, places = watched(model, given())
    x, weight = given().double(), model.weight.detach().bfloat16().double()
    rounded = functional.linear(given(), model.weight.detach().bfloat16())
    exact = x @ weight.T
    error = rounded.double() - exact
    gradient = 2 * rounded.double()  # of the sum of squares
    product = places["linear"]
    assert product.error == pytest.approx(float(error.square().sum()), rel=1e-3)
    assert product.size == pytest.approx(float(exact.square().sum()), rel=1e-5)
    # The gradient itself is one of bf16, and so are the errors that are kept for it.
    assert product.square == pytest.approx(float((gradient * error).square().sum()), rel=0.02)
    assert product.signed == pytest.approx(float((gradient * error).sum()), rel=0.05, abs=1.0)


def test_what_is_cast_is_charged_with_what_it_loses() -> None:
    model = Narrows()
    _, places = watched(model, given())
    lost = model.weight.detach().bfloat16().double() - model.weight.detach().double()
    assert places["to"].error == pytest.approx(float(lost.square().sum()), rel=1e-5)
    assert places["to"].parameter == "weight"


@pytest.mark.parametrize("name", ["half", "bfloat16", "float8_e4m3fn"])
def test_a_cast_by_name_and_an_8_bit_float_are_seen(name: str) -> None:
    def casts(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        narrow = weight.to(getattr(torch, name)) if "8" in name else getattr(weight, name)()
        return narrow.to(torch.float32).square().sum()

    _, places = watched(Narrows(casts), given())
    place = places["to" if name == "float8_e4m3fn" else name]
    assert place.error > 0
    if name == "float8_e4m3fn":
        assert place.dtype == name and place.relative > 0.01


def test_numbers_without_a_gradient_have_what_they_would_be() -> None:
    """Odd positions above 256 are not numbers of bf16: their cost comes with the gradients of users."""
    _, places = watched(Angles())
    table = places["bfloat16"]
    lost = torch.arange(300).bfloat16().double() - torch.arange(300).double()
    assert table.constant
    assert table.error == float(lost.square().sum()) == 22.0
    assert math.sqrt(table.square) == pytest.approx(math.sqrt(22.0), rel=1e-2)


def test_widened_leaves_out_what_the_code_narrows() -> None:
    model, found = Narrows(), Roundings()
    x = given().float()
    with paths_in(model) as path, RoundingRecorder(model, {}, path, found, {}):
        model(x.bfloat16())
    places = frozenset((place.module, place.line) for place in found.places.values())
    with paths_in(model) as path, torch.no_grad(), Widener(path, places):
        wide = model(x)
    with torch.no_grad():
        true = functional.linear(x, model.weight).square().sum()
        assert torch.equal(wide, true)
        assert not torch.equal(model(x.bfloat16()), true)


def test_what_is_set_is_rounded_where_it_is_set() -> None:
    def sets(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        held = torch.zeros(24, 40, dtype=torch.bfloat16)
        held[3:] = weight[3:]
        return held.float().square().sum()

    model = Narrows(sets)
    plain = model(given()).detach()
    out, places = watched(model, given())
    assert torch.equal(out, plain)
    lost = model.weight.detach()[3:].bfloat16().double() - model.weight.detach()[3:].double()
    assert places["__setitem__"].error == pytest.approx(float(lost.square().sum()), rel=1e-5)
    assert places["__setitem__"].square > 0


def test_what_writes_into_a_tensor_is_compared_with_what_was_there() -> None:
    def adds(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(40, dtype=torch.bfloat16)
        for row in weight.detach():
            sums += row
        return sums.float().sum() * weight.sum()

    model = Narrows(adds)
    plain = model(given()).detach()
    out, places = watched(model, given())
    assert torch.equal(out, plain)
    name = next(name for name in places if "add" in name)
    assert 0 < places[name].error < 1
    assert places[name].calls == 24
