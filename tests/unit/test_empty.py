"""Models without memory: their appearance, and the initial values of their own modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zerodrift.errors import ModelError
from zerodrift.model import recipe
from zerodrift.model.empty_model import SMALL, empty


def play(parameter: nn.Parameter, name: str = "x", seed: int = 0) -> torch.Tensor:
    found = recipe.find_recipe(parameter)
    assert found is not None and not recipe.find_obstacle(parameter)
    return recipe.replay(found, name, seed)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.outer(torch.arange(7.0), torch.tensor([1.0, 0.1])).cos())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.inner = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Parameter(torch.empty(3), requires_grad=False)


def test_parameters_have_no_memory_and_all_else_is_as_ever() -> None:
    with empty():
        model = Rotary()
    plain = Rotary()
    assert all(parameter.is_meta for parameter in model.parameters())
    for (name, buffer), (other, there) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert name == other and torch.equal(buffer, there) and not buffer.is_meta
    assert model.tied.weight is model.inner.weight
    assert model.state_dict().keys() == plain.state_dict().keys()
    for (name, ours), (other, there) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other and ours.stride() == there.stride()
        for known in ("shape", "dtype", "requires_grad"):
            assert getattr(ours, known) == getattr(there, known)


def one(make: Callable[[], torch.Tensor]) -> nn.Module:
    module = nn.Module()
    module.x = nn.Parameter(make())
    return module


def blank(*shape: int) -> nn.Module:
    return one(lambda: torch.empty(shape))


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "zeros, then a row": lambda x: (nn.init.zeros_(x), x.data[1].fill_(2.0)),
    "eye": nn.init.eye_,
    "setitem": lambda x: (x.data.zero_(), x.data.__setitem__((slice(None), 2), 1.0)),
    "out of an operation": lambda x: torch.full(x.shape, 7.0, out=x.data),
    "a transposed view": lambda x: (x.data.zero_(), x.data.t()[0].fill_(4.0)),
}


@pytest.mark.parametrize("what", WRITES)
def test_writes_without_chance_give_the_same_bits(what: str) -> None:
    def build() -> nn.Module:
        module = blank(5, 4)
        with torch.no_grad():
            WRITES[what](module.x)
        return module

    with empty():
        model = build()
    assert model.x.is_meta
    assert torch.equal(play(model.x), build().x.detach())


RANDOM: dict[str, Callable[[torch.Tensor], object]] = {
    "normal": lambda x: nn.init.normal_(x, 1.0, 0.5),
    "kaiming": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "orthogonal": nn.init.orthogonal_,
    "method": lambda x: x.data.normal_().clamp_(-1, 1),
}


@pytest.mark.parametrize("what", RANDOM)
def test_writes_with_chance_are_what_torch_draws_from_the_same_seed(what: str) -> None:
    """The bits are equal, not only the distribution: each parameter has its own seed."""
    with empty():
        model = blank(40, 30)
        with torch.no_grad():
            RANDOM[what](model.x)
    before = torch.random.get_rng_state()
    found = play(model.x, "layers.0.x", seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(recipe.derive_seed("layers.0.x", 3))
    want = nn.Parameter(torch.empty(40, 30))
    with torch.no_grad():
        RANDOM[what](want)
    assert torch.equal(found, want.detach())
    assert not torch.equal(play(model.x, "layers.1.x", seed=3), found)
    assert not torch.equal(play(model.x, "layers.0.x", seed=4), found)


def test_a_draw_that_torch_refuses_is_refused_inside_too() -> None:
    """Without memory a valid draw is only recorded; an invalid one must still raise."""
    with empty(), torch.no_grad():
        bare = blank(40, 30).x
        with pytest.raises(RuntimeError, match="std"):
            bare.normal_(0.0, -1.0)
        assert bare.normal_(mean=2.0, std=0) is bare
    assert torch.equal(play(bare), torch.full((40, 30), 2.0))


@pytest.mark.parametrize("factory", [torch.zeros, torch.randn])
def test_what_is_made_with_values_keeps_them(factory: Callable[..., torch.Tensor]) -> None:
    with empty():
        model = one(lambda: factory(300, 300))
    assert model.x.is_meta
    torch.manual_seed(recipe.derive_seed("x", 0))
    assert torch.equal(play(model.x), factory(300, 300))


def test_what_was_computed_stays_where_it_is_small_and_has_no_values_where_it_is_large() -> None:
    with empty():
        small = one(lambda: torch.arange(1, 9.0).log())
        large = one(lambda: torch.randn(SMALL + 1) * 0.1)
        never = blank(3, 3)
    assert torch.equal(small.x.detach(), torch.arange(1, 9.0).log())
    names = [("large", large.x), ("never", never.x), ("small", small.x)]
    assert recipe.list_obstacles(names) == [
        ("large", "values that were computed, not written in place"),
        ("never", "memory that no operation wrote"),
    ]


def test_writes_after_the_context_and_elements_that_nobody_wrote_are_noticed() -> None:
    with empty():
        model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.normal_()
    assert "after" in recipe.find_obstacle(model.weight) and not recipe.find_obstacle(model.bias)
    assert recipe.find_obstacle(nn.Linear(3, 3, device="meta").weight) == "no record of how it is initialised"
    with empty():
        model = blank(4, 4)
        model.x.data[1:].zero_()
    initial = recipe.RecipeValues({"x": model.x}, 0)
    with pytest.raises(ModelError, match="`x`: must be initialized as a whole"):
        initial.fill("x", 0, torch.empty(16))


def test_clones_casts_and_wider_declarations() -> None:
    with empty():
        layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
        half = nn.Linear(6, 6).half()
    assert recipe.list_obstacles(layers.named_parameters()) == []
    initial = recipe.RecipeValues(dict(half.named_parameters()), 0)
    assert initial.exact("weight") is torch.float16
    out = torch.empty(36)
    initial.fill("weight", 0, out)
    assert torch.equal(out, play(half.weight, "weight").half().float().view(-1))
    with empty(torch.float32):
        wide = nn.Linear(6, 6, dtype=torch.bfloat16)
    assert wide.weight.dtype is torch.float32
    assert not torch.equal(play(wide.weight), play(wide.weight).bfloat16().float())


class Scan(nn.Module):
    """A module that follows the device of its parameters, as state space models of `transformers` do."""

    @torch.no_grad()
    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.empty(6, 4))
        self.step, self.scale = nn.Parameter(torch.empty(6)), nn.Parameter(torch.empty(6))
        here = self.step.device
        rates = torch.arange(1, 5, dtype=torch.float32, device=here)[None, :]
        self.decay.copy_(torch.log(rates.expand(6, -1).contiguous()))
        drawn = torch.exp(torch.rand(6, device=here) * 4 - 7).clamp(min=1e-4)
        self.step.copy_(drawn + torch.log(-torch.expm1(-drawn)))
        self.scale[1:].copy_(torch.linspace(0, 1, 6, device=here)[1:])
        self.scale[0] = 3.0


def test_what_a_module_computes_where_its_parameters_are_is_computed_again() -> None:
    plain = Scan()
    with empty():
        model = Scan()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(play(model.decay), plain.decay)
    assert torch.equal(play(model.scale), plain.scale)
    torch.manual_seed(recipe.derive_seed("x", 0))
    drawn = torch.exp(torch.rand(6) * 4 - 7).clamp(min=1e-4)  # once, though it is used twice
    assert torch.equal(play(model.step), drawn + torch.log(-torch.expm1(-drawn)))


def shares_random_numbers(one: nn.Parameter, other: nn.Parameter) -> None:
    drawn = torch.rand(4, device=one.device)
    one.copy_(drawn + 1)
    other.copy_(-drawn)


def reads_the_other(one: nn.Parameter, other: nn.Parameter) -> None:
    one.uniform_()
    other.copy_(one * 2)


@pytest.mark.parametrize(
    ("fill", "told"),
    [
        (shares_random_numbers, "random numbers that another parameter has too"),
        (reads_the_other, "a tensor that has no memory"),
    ],
)
def test_what_cannot_be_computed_again_is_said(fill: Callable[..., None], told: str) -> None:
    with empty(), torch.no_grad():
        first, other = blank(4).x, blank(4).x
        fill(first, other)
    assert recipe.find_obstacle(first) == ""
    assert recipe.find_obstacle(other) == f"`copy_` with {told}"
