"""A caller's own optimizer on two ranks: plain torch's numbers at every stage, or an error that names it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT, batch
from tests.ranks.harness import run_ranks
from tests.unit import own_optimizers as own
from zerodrift.api import initialize
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.errors import UnsupportedError

STEPS = 4

WHOLE = {"rules": [{"match": "*", "placement": "whole"}]}


def settings(stage: int, **precision: Any) -> dict[str, Any]:
    return {
        "precision": {"mode": "fp32", **precision},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0,
    }


def make(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "Lookahead":
        return own.Lookahead(own.Signs(parameters))
    if kind == "Lookahead around Adagrad":
        return own.Lookahead(torch.optim.Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.1))
    if kind == "ReadsMarks":
        parameters = list(parameters)
        for number, parameter in enumerate(parameters):
            parameter.haste = 1.0 + number
    made: torch.optim.Optimizer = getattr(own, kind)(parameters)
    return made


def beside_torch(kind: str, stage: int, precision: dict[str, Any]) -> list[str]:
    """With the same data on both ranks: parameters that are not the plain loop's."""
    model, other = GPT(tied=False), GPT(tied=False)
    engine = initialize(
        model, make(kind, model.parameters()), settings(stage, **precision), device="cpu", quiet=True
    )
    theirs = make(kind, other.parameters())
    for number in range(STEPS):
        engine.backward(engine(batch(number)))
        engine.step()
        other(batch(number)).backward()
        theirs.step()
        theirs.zero_grad()
    with engine.gathered() as values:
        off = [n for n, p in other.named_parameters() if not torch.equal(values[n], p.detach())]
    engine.destroy()
    return off


@pytest.mark.parametrize("kind", ["Signs", "Assigns", "Foreach", "Lookahead", "ReadsMarks"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_elementwise_ones_make_the_plain_loops_bits(kind: str, stage: int) -> None:
    assert run_ranks(beside_torch, 2, kind, stage, {}) == [[], []]


def gone_on_with(folder: str, stage: int) -> list[str]:
    """Parameters that four steps make otherwise when an engine ends after two, and another goes on."""
    ends = []
    for parts in ((4,), (2, 2)):
        taken = 0
        for steps in parts:
            model = GPT(tied=False)
            optimizer = make("Lookahead around Adagrad", model.parameters())
            engine = initialize(model, optimizer, settings(stage), device="cpu", quiet=True)
            checkpoints = Checkpoints(engine, folder, quiet=True)
            if taken:
                checkpoints.load()
            for number in range(taken, taken + steps):
                engine.backward(engine(batch(number)))
                engine.step()
            taken += steps
            if taken == 2:
                checkpoints.save()
            with engine.gathered() as values:
                end = {name: value.clone() for name, value in values.items()}
            engine.destroy()
        ends.append(end)
    return [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_an_optimizer_inside_another_keeps_is_saved(stage: int, tmp_path: Path) -> None:
    assert run_ranks(gone_on_with, 2, str(tmp_path), stage) == [[], []]


@pytest.mark.parametrize("kind", ["TrustRatio", "Clipped", "ClipsAll", "GuessesRate"])
def test_stage_0_has_them_all(kind: str) -> None:
    assert run_ranks(beside_torch, 2, kind, 0, {}) == [[], []]


@pytest.mark.parametrize("kind", ["TrustRatio", "DecaysMatrices"])
def test_whole_parameters_are_enough_for_what_looks_at_one(kind: str) -> None:
    assert run_ranks(beside_torch, 2, kind, 3, WHOLE) == [[], []]


def refused(kind: str, stage: int, precision: dict[str, Any]) -> str:
    model = GPT(tied=False)
    with pytest.raises(UnsupportedError) as caught:
        initialize(
            model, make(kind, model.parameters()), settings(stage, **precision), device="cpu", quiet=True
        )
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["TrustRatio", "Centred", "DecaysMatrices"])
def test_what_looks_at_a_tensor_is_refused_on_pieces(kind: str, stage: int) -> None:
    for message in run_ranks(refused, 2, kind, stage, {}):
        assert f"got {kind}, and pieces of " in message and "were updated otherwise" in message
        assert "placement: whole" in message and "stage 0" in message


@pytest.mark.parametrize("precision", [{}, WHOLE], ids=["pieces", "whole"])
@pytest.mark.parametrize("kind", ["ClipsAll", "GuessesRate"])
def test_what_looks_at_several_is_refused_even_on_whole_parameters(
    kind: str, precision: dict[str, Any]
) -> None:
    for message in run_ranks(refused, 2, kind, 2, precision):
        assert f"got {kind}: " in message and "Train at stage 0" in message


def on_fsdp2(kind: str) -> float:
    """The largest part of a parameter's way that is not the plain loop's."""
    model, other = GPT(tied=False), GPT(tied=False)
    begun = {name: p.detach().clone() for name, p in other.named_parameters()}
    written = {**settings(3), "backend": "fsdp2"}
    engine = initialize(model, make(kind, model.parameters()), written, device="cpu", quiet=True)
    theirs = make(kind, other.parameters())
    for number in range(STEPS):
        engine.backward(engine(batch(number)))
        engine.step()
        other(batch(number)).backward()
        theirs.step()
        theirs.zero_grad()
    with engine.gathered() as values:
        off = [
            float((values[n] - p).norm() / (p - begun[n]).norm().clamp_min(1e-9))
            for n, p in other.named_parameters()
        ]
    engine.destroy()
    return max(off)


@pytest.mark.parametrize("kind", ["Signs", "TrustRatio", "Centred", "DecaysMatrices", "ClipsAll"])
def test_dtensors_are_whole_to_whoever_looks_at_them(kind: str) -> None:
    """Norms are added up in another order; a step otherwise is of the size of the way."""
    assert max(run_ranks(on_fsdp2, 2, kind)) < 1e-4


def test_new_memory_for_dtensors_is_refused() -> None:
    for message in run_ranks(refused_on_fsdp2, 2):
        assert "what is assigned to `p.data` is lost; got Assigns" in message


def refused_on_fsdp2() -> str:
    with pytest.raises(UnsupportedError) as caught:
        on_fsdp2("Assigns")
    return str(caught.value)


def under_the_drop_in(kind: str, untested: bool) -> str:
    """What it says of a client's optimizer: its error, or what it logged on the way to a step."""
    import zerodrift.deepspeed as deepspeed

    written = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": untested,
    }
    model, heard = GPT(tied=False), listen()
    optimizer = make(kind, model.parameters())
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=written)
        engine.backward(engine(batch(0)))
        engine.step()
        engine.destroy()
    except UnsupportedError as error:
        return str(error)
    return "\n".join(line for line in heard if "optimizer" in line or kind in line)


@pytest.mark.parametrize("untested", [False, True])
def test_the_drop_in_lets_nobody_insist(untested: bool) -> None:
    for message in run_ranks(under_the_drop_in, 2, "TrustRatio", untested):
        assert "got TrustRatio, and pieces of " in message
    assert run_ranks(under_the_drop_in, 2, "Signs", untested) == ["", ""]


def listen() -> list[str]:
    """What zerodrift logs from here on."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerodrift").addHandler(handler)
    return heard


class Reduces(own.Own):
    """Sums its gradients itself."""

    def direction(self, p: Any, g: Any, state: Any, group: Any) -> Any:
        torch.distributed.all_reduce(g)
        return g


class NeedsClosure(own.Own):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Wraps(own.Own):
    """Around another with groups of its own."""

    def __init__(self, params: Any) -> None:
        held = list(params)
        super().__init__(held)
        self.inner = own.Signs(held)

    def step(self, closure: Any = None) -> Any:
        self.inner.step()


class Shy(own.Own):
    """Takes only what it knows."""

    def direction(self, p: Any, g: Any, state: Any, group: Any) -> Any:
        if tuple(p.shape) == (132, 136):
            raise RuntimeError("too large for me")
        return g


def by_class(name: str) -> str:
    model = GPT(tied=False)
    heard = listen()
    try:
        optimizer = globals()[name](model.parameters())
        initialize(model, optimizer, settings(1), device="cpu", quiet=True).destroy()
    except UnsupportedError as error:
        return str(error)
    return "\n".join(heard)


def test_one_that_communicates_is_refused() -> None:
    for message in run_ranks(by_class, 2, "Reduces"):
        assert "must leave communication to the engine" in message and "got Reduces" in message


def test_one_that_needs_a_closure_is_refused() -> None:
    for message in run_ranks(by_class, 2, "NeedsClosure"):
        assert (
            "must have a `step` that needs no closure" in message and "NeedsClosure.step(self, clo" in message
        )


def test_one_around_another_with_groups_of_its_own_is_refused() -> None:
    (message,) = run_ranks(by_class, 1, "Wraps")
    assert "must share its parameter groups" in message and "got Wraps around Signs" in message


def test_one_that_cannot_be_tried_is_told_about() -> None:
    for message in run_ranks(by_class, 2, "Shy"):
        assert "Shy could not be tried out" in message and "too large for me" in message
