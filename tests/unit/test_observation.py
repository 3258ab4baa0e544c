"""`zerodrift.observe` around a user's loop: its findings, and that it changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

import zerodrift
from zerodrift.errors import ModelError, ZerodriftError
from zerodrift.inspect.trace.model import LiveModel
from zerodrift.inspect.trace.parameter import LiveParameter, Samples
from zerodrift.inspect.trace.records import COLUMNS, ParameterRecord


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False)
        return self.head(self.drop(x))


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Reset torch.compile, because nothing is observed in a process that has compiled code."""
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, autocast: bool = False) -> None:
    for step in range(steps):
        for micro in range(2):
            torch.manual_seed(10 * step + micro)
            tokens = torch.randint(16, (4, 3))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(tokens)
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def head_of(seen: zerodrift.Observation, name: str = "head.weight") -> ParameterRecord:
    found = seen.models[0].parameter(name)
    assert found is not None
    return found


def watched(model: nn.Module, **how: Any) -> zerodrift.Observation:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with zerodrift.observe(model, optimizer) as seen:
        train(model, optimizer, **how)
    return seen


FP32, BF16 = torch.float32, torch.bfloat16
CASES = {"fp32": (FP32, False, FP32), "bf16": (BF16, False, BF16), "autocast": (FP32, True, BF16)}
"""Dtype of the model and its sums and states, whether under autocast, and the head's compute dtype."""


@pytest.mark.parametrize("case", CASES)
def test_cells_are_what_the_loop_does_and_bits_those_of_the_loop_alone(case: str) -> None:
    dtype, autocast, computes = CASES[case]
    mine, doors_before = net(dtype), doors()
    seen = watched(mine, autocast=autocast)
    (model,), head = seen.models, head_of(seen)
    for column in ("storage", "compute", "accumulate", "state"):
        word = str(computes if column == "compute" else dtype).removeprefix("torch.")
        assert head.dtypes(column) == (word,), column  # type: ignore[arg-type]
    assert model.name == "Net" and head.dtypes("master") == ("same",)
    assert head.facts["gradients"] == 4 and head.facts["changed"]
    (compute,) = head.cells["compute"]
    assert compute.module == "head" and compute.line.startswith("test_observation.py:")
    for parameter in model.parameters:  # every cell was seen, or says why not
        assert all(bool(parameter.cells.get(c)) != bool(parameter.unseen.get(c)) for c in COLUMNS)
    assert same_bits(mine, alone(dtype, autocast=autocast)) and doors() == doors_before
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in mine.parameters())


def alone(dtype: torch.dtype = torch.float32, **how: Any) -> Net:
    """Return the model after a loop without an observer."""
    model = net(dtype)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **how)
    return model


def same_bits(mine: Net, other: Net) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True))


def doors() -> list[Any]:
    """Return every function that the observer hooks or replaces."""
    clip, scale = torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler.scale
    return [
        *(torch.autograd.backward, torch.autograd.grad, torch.optim.Optimizer.__init__, torch.compile),
        *(clip, scale, torch.save, torch.distributed.all_reduce),
        *map(dict, (modules._global_forward_hooks, modules._global_forward_pre_hooks)),
        dict(optimizers._global_optimizer_pre_hooks),
        torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "ADInplaceOrView"),
    ]


class Stopped(BaseException):
    """An exception like an interrupt, for which torch calls no hook."""


@pytest.mark.parametrize("error", [Stopped, IndexError])
def test_an_interrupt_or_error_of_the_loop_is_its_own_and_leaves_nothing(error: type[BaseException]) -> None:
    """The observer goes on if the script catches it."""
    before, model, stop = doors(), net(), [error is Stopped] * 2

    def interrupt(*args: Any) -> None:
        if stop and stop.pop():
            raise Stopped

    model.head.register_forward_pre_hook(interrupt)
    tokens = torch.tensor([99 if error is IndexError else 1])
    with pytest.raises(error), zerodrift.observe(model):
        model(tokens)
    assert doors() == before
    with zerodrift.observe(model) as seen:
        with pytest.raises(error):
            model(tokens)
        train(model, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    assert head_of(seen).dtypes("compute") == ("float32",)
    assert doors() == before


PLACES = [(LiveParameter, "arrives"), (LiveModel, "held")]
"""Methods in which a defect is planted: in a backward, and in a step."""


@pytest.mark.parametrize(("holder", "name"), PLACES)
def test_a_defect_of_the_observer_ends_it_and_not_the_loop(
    holder: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(holder, name, fails)
    mine, before = net(), doors()
    seen = watched(mine)
    assert same_bits(mine, alone())
    assert any("planted" in note for note in seen.process.notes) and seen.process.ended == "broken"
    assert doors() == before


CHANGED = ("storage", "compute", "grad", "accumulate", "state")
CHANGES: dict[str, tuple[Callable[[Net], Any], bool, tuple[str, ...]]] = {
    "cast": (lambda model: model.bfloat16(), False, CHANGED),
    "head": (lambda model: setattr(model, "head", nn.Linear(8, 16, dtype=BF16)), True, CHANGED),
    "autocast": (lambda model: None, True, ("compute",)),
}
"""Name -> a change before the third step, whether autocast is on from there, and changed columns."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_differs_from_those_before_is_seen(change: str) -> None:
    done, autocast, columns = CHANGES[change]
    model = net()
    with zerodrift.observe(model) as seen:
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        done(model)
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), autocast=autocast)
    head = head_of(seen)
    for column in CHANGED:
        both = ("float32", "bfloat16") if column in columns else ("float32",)
        assert head.dtypes(column) == both, column  # type: ignore[arg-type]


class Branches(nn.Module):
    """A module with another branch in every other forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16)])
        self.bare = nn.ParameterList([torch.ones(8), torch.ones(8, dtype=torch.bfloat16)])
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        way = self.steps % 2
        self.steps += 1
        y = self.ways[way](x.to(self.ways[way].weight.dtype))
        return (y * self.bare[way]).float().sum()


def test_a_module_that_is_called_later_and_a_parameter_that_is_used_later_are_seen() -> None:
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with zerodrift.observe(model, optimizer) as seen:
        for _ in range(4):
            model(torch.randn(2, 8)).backward()
            optimizer.step()
    (found,) = seen.models
    cells = {parameter.name: parameter.dtypes("compute") for parameter in found.parameters}
    assert cells["ways.1.weight"] == cells["bare.1"] == ("bfloat16",)


def test_samples_are_elements_of_what_passes_by() -> None:
    whole = torch.arange(60.0).reshape(6, 10)
    one = Samples(60)
    one.arrives(whole)
    one.arrives(whole.t().contiguous().t())
    for begin in range(0, 60, 20):
        one.given(whole.view(-1).bfloat16(), begin, begin, 20)
    own, used = one.end()
    assert own == [2.0 * place for place in one.places]
    assert used == [float(torch.tensor(float(place)).bfloat16()) for place in one.places]
    one.given(torch.arange(100.0), 13, 50, 20)  # elements 13 to 33, from place 50
    one.arrives(whole)
    one.missed = True
    own, used = one.end()
    assert own == []
    assert used == [50.0 + place - 13 if 13 <= place < 33 else None for place in one.places]


@pytest.mark.long
def test_what_is_compiled_runs_as_it_does_alone() -> None:
    mine, other = net(), net()
    with zerodrift.observe(mine) as seen:
        compiled = torch.compile(mine, backend="eager")
        train(compiled, torch.optim.SGD(mine.parameters(), 0.1))
    train(torch.compile(other, backend="eager"), torch.optim.SGD(other.parameters(), 0.1))
    assert same_bits(mine, other)
    assert seen.process.ended == "steps" and seen.process.steps == 2


def test_compiled_code_is_not_watched_and_said() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with zerodrift.observe(model) as seen:
        compiled = torch.compile(model.forward, backend="eager", disable=True)
        compiled(torch.randint(16, (4, 3)))
        train(model, optimizer, steps=1)
    head = head_of(seen)
    assert not head.dtypes("compute") and head.dtypes("accumulate") == ("float32",)
    assert any("TORCH_COMPILE_DISABLE" in note for note in seen.process.notes)


def test_what_never_ran_and_what_is_no_optimizer_are_refused_and_reading_comes_after() -> None:
    with pytest.raises(ModelError, match="forward"), zerodrift.observe(net()):
        pass
    with pytest.raises(ZerodriftError, match=r"torch\.optim\.Optimizer"), zerodrift.observe(net(), object()):
        pass
    with pytest.raises(ZerodriftError, match="after the `with`"), zerodrift.observe(net()) as seen:
        seen.table()
