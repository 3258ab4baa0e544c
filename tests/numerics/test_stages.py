"""Stages 0-3 have the same bits in every mode, with different memory.

This holds too for gradients that are read and written before a step, for replicas, and for small segments
that are gathered with the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.numerics import runs
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import Run, config, finish, make, require_alike, same, train
from tests.numerics.test_frozen import adapted
from tests.numerics.test_muon import PARAMS, network
from tests.ranks.harness import on_ranks
from zerodrift import cost
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.engine.engine import Engine
from zerodrift.plan import builder as build
from zerodrift.plan import layout

MODES = ("fp32", "bf16", "fp16", "autocast-bf16")
STAGES = (0, 1, 2, 3)
TWO, FEW, ENOUGH, MANY = 2, 3, 8, 50
"""Numbers of steps. The first few cover all differences between stages; the others are enough to learn."""


@dataclass(frozen=True)
class Kind:
    """A model with keys of its config, to be trained in any mode on any number of ranks."""

    model: Callable[[], nn.Module] = GPT
    precision: dict[str, Any] = field(default_factory=dict)
    micro: int = 1
    stages: tuple[int, ...] = STAGES
    is_near: bool = False
    """Whether losses must differ from those without its precision, by two percent at most."""
    rest: dict[str, Any] = field(default_factory=dict)


MOE = partial(GPT, moe=True)


def on_ties() -> GPT:
    """Return a model with every weight half-way between two bf16 values, where roundings differ."""
    model = GPT()
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(torch.int32)
            bits.copy_(bits & ~0xFFFF | 0x8000)
    return model


MUON = {"optimizer": {"type": "Muon", "params": PARAMS}}
ON_ROUTERS = {"rules": [{"match": "*.router.weight", "optimizer": "Muon", "pin": "fp32"}]}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
LION = {"type": "Lion", "params": {"lr": 3e-3}}


def wire(dtype: str, when: str, rounding: str) -> Kind:
    reduce = {"wire": dtype, "when": when, "rounding": rounding}
    return Kind(MOE, {"reduce": reduce, "gather": "fp8"}, micro=2)


KINDS: dict[str, Kind] = {
    "dense": Kind(),
    "experts": Kind(MOE),
    "reduced at the end": Kind(MOE, {"reduce": {"when": "last"}}, micro=4),
    "reduced every time": Kind(MOE, {"reduce": {"when": "every"}}, micro=4),
    "whole gradients": Kind(micro=4, stages=(0, 1)),
    "slices of gradients": Kind(micro=4, stages=(2, 3)),
    "weights on ties": Kind(on_ties),
    "drawn moments": Kind(on_ties, {"state": "bf16-stochastic"}),
    "replicas": Kind(MOE, rest={"sharding": {"replicate": 2}}),
    **{f"gathered in {each}": Kind(MOE, {"gather": each}, is_near=True) for each in ("fp8", "mxfp8", "int8")},
    **{f"sent in {each}": wire(each, "every", "stochastic") for each in ("fp8", "mxfp8", "e5m2-128")},
    **{f"sent in {each}": wire(each, "last", "nearest") for each in ("int8", "int4", "int4-64-bf16")},
    "products in fp8": Kind(MOE, {"compute": "fp8"}, is_near=True),
    "gradients of weights in bf16": Kind(precision={"compute": "fp8-hp-grad-weight"}, is_near=True),
    "8-bit SGD": Kind(precision={"state": "8bit"}, rest={"optimizer": SGD}),
    "8-bit Lion": Kind(precision={"state": "8bit"}, rest={"optimizer": LION}),
    "Muon": Kind(network, rest=MUON),
    "Muon, drawn": Kind(network, {"state": "bf16-stochastic"}, rest=MUON),
    "Muon of routers": Kind(network, ON_ROUTERS, rest=MUON),
}


def train_kind(kind: Kind, mode: str, stage: int, steps: int) -> Run:
    engine = make(config(stage, mode, kind.micro, precision=kind.precision, **kind.rest), kind.model())
    run = train(engine, steps, kind.micro)
    engine.destroy()
    return run


def train_alike(kind: Kind, mode: str, stages: Iterable[int], steps: int) -> Run:
    """Train at several stages on this rank, require the same bits, and return the first run."""
    runs = [train_kind(kind, mode, stage, steps) for stage in stages]
    assert same(runs) == [], same(runs)
    return runs[0]


FOUR = (
    *(("dense", "fp16"), ("experts", "bf16"), ("replicas", "fp32")),
    *(("sent in int4", "bf16"), ("Muon", "bf16")),
)
"""Kinds and modes of `make test` on four ranks."""


def cells(world: int) -> Iterator[Any]:
    """Yield the product of kinds and modes. On two ranks each kind is quick in one mode, in turn."""
    for number, kind in enumerate(KINDS):
        for mode in MODES:
            quick = (kind, mode) in FOUR if world == 4 else mode == MODES[number % len(MODES)]
            yield pytest.param(world, kind, mode, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("world", "kind", "mode"), [*cells(2), *cells(4)])
@on_ranks("world", timeout=200)
def test_all_stages_are_the_same_bits(world: int, kind: str, mode: str) -> None:
    of = KINDS[kind]
    run = train_alike(of, mode, of.stages, TWO if of.micro > 1 else FEW)
    assert all(value.any() for state in run.states.values() for value in state.values())
    if of.is_near:
        plain = train_kind(replace(of, precision={}), mode, 0, FEW)
        assert run.losses != plain.losses and run.losses == pytest.approx(plain.losses, rel=0.02), run.losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "kind", "stages", "steps"),
    [
        (1, "experts", STAGES, ENOUGH),
        (2, "dense", (0, 3), ENOUGH),
        pytest.param(4, "experts", STAGES, MANY, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", MODES)
@on_ranks("world", timeout=280)
def test_a_run_that_learns_is_the_same_bits(
    world: int, kind: str, stages: tuple[int, ...], steps: int, mode: str
) -> None:
    losses = train_alike(KINDS[kind], mode, stages, steps).losses
    assert losses[-1] < losses[0] - 1.0, f"did not learn: {losses[0]} -> {losses[-1]}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("column", "value", "usual", "batches", "steps", "near"),
    [
        ("state", "8bit", "fp32", 8, 200, {"abs": 0.1}),
        ("compute", "fp8", "bf16", 150, 150, {"rel": 0.03}),
        pytest.param(
            *("compute", "fp8-hp-grad-weight", "bf16", 150, 150, {"rel": 0.03}), marks=pytest.mark.slow
        ),
    ],
)
@on_ranks(1, timeout=120)
def test_a_narrow_column_learns_as_the_usual_one(
    column: str, value: str, usual: str, batches: int, steps: int, near: dict[str, float]
) -> None:
    """A run with one wrong product, or with moments that stand still, does not reach these losses."""
    last = []
    for each in (usual, value):
        engine = make(config(3, "bf16", precision={column: each}))
        losses = train(engine, steps, data=lambda step, rank, micro: batch(step % batches, rank)).losses
        last.append(sum(losses[-steps // 10 :]) / (steps // 10))
        engine.destroy()
        assert last[-1] < 0.5 * losses[0], f"nothing was learned: {losses[0]} -> {last[-1]}"
    assert last[1] == pytest.approx(last[0], **near), last


def gradients(stage: int, replicate: int, extra: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return gradients as read, as read after every other one was doubled, and the masters after a step."""
    blocks = {**extra, "sharding": {"replicate": replicate}, "gradient_clipping": 0.0}
    blocks["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    torch.manual_seed(0)
    engine = make(config(stage, "fp32", 1, **blocks), GPT(layers=1))
    engine.backward(engine(batch(0, engine.mesh.rank())))
    read = runs.gradients(engine)
    for name in list(read)[::2]:
        engine.parameter(name).gradient = 2 * read[name]
    again = runs.gradients(engine)
    engine.step()
    return [read, again, runs.masters(engine)]


PREDIVIDED = {"gradient_predivide_factor": 2.0}


@pytest.mark.parametrize("extra", [{}, PREDIVIDED], ids=["", "predivided"])
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_replicas_read_as_slices_do(stage: int, extra: dict[str, Any]) -> None:
    """A sum over two ranks has the same bits in any order."""
    sliced, replicas = (gradients(stage, count, extra) for count in (1, 2))
    for one, other in zip(sliced, replicas, strict=True):
        require_alike(one, other)
    read, again, _ = replicas
    doubled = list(read)[::2]
    require_alike(again, {name: read[name] * (2 if name in doubled else 1) for name in read})
    assert any(read[name].any() for name in read)


@on_ranks(4)
def test_replicas_of_slices_read_as_slices_do() -> None:
    for one, other in zip(gradients(3, 1, {}), gradients(3, 2, {}), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


ON_FEW, ON_SOME, ON_MANY = 2, 512, 16384
"""Numbers of ranks on which no parameters, the pinned norms, and all parameters of blocks are small."""
PINNED = {"rules": [{"match": "layers.*.norm*", "pin": "fp32"}]}


def make_as_on(ranks: int, stage: int) -> Engine:
    """Make an engine whose small segments are those of so many ranks and a model as much larger."""
    move = build.move_small_segments

    def moved(units: Any, columns: Any, model: Any, slices: int) -> Any:
        return move(units, columns, model, ranks // 32 if ranks > ON_FEW else 1)

    with (
        mock.patch.object(layout, "MIN_SLICED_ELEMENTS", 256 * 256 // 32),
        mock.patch.object(build, "move_small_segments", moved),
    ):
        return make(config(stage, "bf16", 2, precision=PINNED))


def train_as_on(ranks: int, stage: int) -> tuple[Run, int, int]:
    """Return a run, the rows of the root, and the collectives of a step."""
    engine = make_as_on(ranks, stage)
    train(engine, 1, 2)
    with engine.comm.record() as calls:
        run = train(engine, 1, 2)
    rows = len(engine.plan.units[0].rows)
    return run, rows, len(calls)


@pytest.mark.parametrize(("ranks", "stage", "moved"), [(ON_SOME, 3, 8), (ON_MANY, 0, 22)])
@on_ranks(2)
def test_bits_are_the_same_where_small_segments_are_gathered_with_the_root(
    ranks: int, stage: int, moved: int
) -> None:
    (apart, root, calls), (together, more, fewer) = (train_as_on(n, stage) for n in (ON_FEW, ranks))
    require_alike(apart, together)
    assert more - root == moved and fewer < calls, (more - root, fewer, calls)


@on_ranks(2)
def test_a_checkpoint_of_one_layout_is_loaded_into_the_other(tmp_path: Path) -> None:
    engine = make_as_on(ON_FEW, 3)
    train(engine, 1, 2)
    before = finish(engine)
    Checkpoints(engine, tmp_path, quiet=True).save()
    engine.destroy()
    engine = make_as_on(ON_SOME, 3)
    Checkpoints(engine, tmp_path, quiet=True).load()
    require_alike(before, finish(engine))


COPIED: dict[str, tuple[dict[str, Any], Any]] = {
    "bf16": ({}, partial(GPT, moe=True)),
    "fp32": ({"gather": "int8", "frozen": "nf4"}, adapted),
    "autocast-bf16": ({"gather": "fp32", "rules": [{"match": "*.norm*", "pin": "fp32"}]}, GPT),
}


@pytest.mark.parametrize(
    ("world", "copies", "modes"),
    [
        (4, 2, ("bf16", "fp32")),
        pytest.param(4, 2, ("autocast-bf16",), marks=pytest.mark.slow),
        *(pytest.param(each, each, COPIED, marks=pytest.mark.slow) for each in (3, 4)),
    ],
)
@on_ranks("world", timeout=200)
def test_a_second_copy_changes_where_a_backward_gathers_and_no_value(
    world: int, copies: int, modes: Iterable[str]
) -> None:
    for mode in modes:
        precision, model = COPIED[mode]
        found = []
        for ranks in (1, copies):
            sharding = {"secondary": ranks}
            engine = make(config(3, mode, 2, precision=precision, sharding=sharding), model())
            kept = [segment.secondary for segment in engine.executor.segments if segment.secondary]
            run = train(engine, 1, 2)
            with torch.no_grad():  # values that change between steps, and in an evaluation
                engine.parameter("layers.0.norm1.weight").master = torch.full((32,), 0.25)
                engine.eval()
                engine(batch(9, 0))
                assert not kept or not all(copy.is_current for copy in kept)
                engine.train()
                engine(batch(9, 0))
                assert all(copy.is_current for copy in kept)
                engine.parameter("layers.0.norm1.weight").master = torch.full((32,), 0.5)
            run.losses += train(engine, TWO, 2).losses
            found.append(finish(engine, run))
            assert bool(kept) == (1 < ranks < world)
            rest = cost(engine.plan).rest.secondary
            assert rest == sum(copy.part.nbytes for copy in kept)
            engine.destroy()
        assert same(found) == [], same(found)
