"""Stages 0-3 have the same bits in every mode.

This holds too for gradients that are read and written before a step, for replicas, and for small segments
that are gathered with the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
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
from zerodrift.engine.engine import Engine
from zerodrift.plan import builder as build
from zerodrift.plan import layout

MODES = ("fp32", "bf16", "fp16", "autocast-bf16")
STAGES = (0, 1, 2, 3)
STEPS = 2
"""Steps that cover all differences between stages: the second one has moments."""


@dataclass(frozen=True)
class Kind:
    """A model with keys of its config, to be trained in any mode on any number of ranks."""

    model: Callable[[], nn.Module] = GPT
    precision: dict[str, Any] = field(default_factory=dict)
    micro: int = 1
    is_near: bool = False
    """Whether losses must differ from those without its precision, by two percent at most."""
    rest: dict[str, Any] = field(default_factory=dict)


MOE = partial(GPT, moe=True)


MUON = {"optimizer": {"type": "Muon", "params": PARAMS}}
ON_ROUTERS = {"rules": [{"match": "*.router.weight", "optimizer": "Muon", "pin": "fp32"}]}


def wire(dtype: str, when: str, rounding: str) -> Kind:
    reduce = {"wire": dtype, "when": when, "rounding": rounding}
    return Kind(MOE, {"reduce": reduce, "gather": "fp8"}, micro=2)


KINDS: dict[str, Kind] = {
    "dense": Kind(),
    "experts": Kind(MOE),
    "reduced at the end": Kind(MOE, {"reduce": {"when": "last", "order": "rank"}}, micro=3),
    "replicas": Kind(MOE, rest={"sharding": {"replicate": 2}}),
    "gathered in mxfp8": Kind(MOE, {"gather": "mxfp8"}, is_near=True),
    "sent in fp8": wire("fp8", "every", "stochastic"),
    "sent in int4": wire("int4", "last", "nearest"),
    "products in fp8": Kind(MOE, {"compute": "fp8"}, is_near=True),
    "Muon, drawn": Kind(network, {"state": "bf16-stochastic"}, rest=MUON),
    "Muon of routers": Kind(network, ON_ROUTERS, rest=MUON),
}


def train_kind(kind: Kind, mode: str, stage: int) -> Run:
    engine = make(config(stage, mode, kind.micro, precision=kind.precision, **kind.rest), kind.model())
    run = train(engine, STEPS, kind.micro)
    engine.destroy()
    return run


FOUR = (("experts", "bf16"), ("replicas", "fp32"), ("sent in int4", "fp16"))
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
    runs = [train_kind(of, mode, stage) for stage in STAGES]
    assert same(runs) == [], same(runs)
    run = runs[0]
    assert all(value.any() for state in run.states.values() for value in state.values())
    if of.is_near:
        plain = train_kind(replace(of, precision={}), mode, 0)
        assert run.losses != plain.losses and run.losses == pytest.approx(plain.losses, rel=0.02), run.losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("column", "value", "usual", "batches", "steps", "near"),
    [("state", "8bit", "fp32", 8, 120, {"abs": 0.1}), ("compute", "fp8", "bf16", 150, 100, {"rel": 0.03})],
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


def gradients(stage: int, replicate: int) -> list[dict[str, torch.Tensor]]:
    """Return gradients as read, as read after every other one was doubled, and the masters after a step.
    They are divided by the replicas before they are summed, and by the rest behind."""
    blocks: dict[str, Any] = {"sharding": {"replicate": replicate}, "gradient_clipping": 0.0}
    blocks |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_predivide_factor": replicate}
    torch.manual_seed(0)
    engine = make(config(stage, "fp32", 1, **blocks), GPT(layers=1))
    engine.backward(engine(batch(0, engine.mesh.rank())))
    read = runs.gradients(engine)
    for name in list(read)[::2]:
        engine.parameter(name).gradient = 2 * read[name]
    again = runs.gradients(engine)
    engine.step()
    return [read, again, runs.masters(engine)]


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_replicas_read_as_slices_do(stage: int) -> None:
    """A sum over two ranks has the same bits in any order."""
    sliced, replicas = (gradients(stage, count) for count in (1, 2))
    for one, other in zip(sliced, replicas, strict=True):
        require_alike(one, other)
    read, again, _ = replicas
    doubled = list(read)[::2]
    require_alike(again, {name: read[name] * (2 if name in doubled else 1) for name in read})
    assert any(read[name].any() for name in read)


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


COPIED: dict[str, tuple[dict[str, Any], Any]] = {
    "bf16": ({}, partial(GPT, moe=True)),
    "fp32": ({"gather": "int8", "frozen": "nf4"}, adapted),
}


@on_ranks(4, timeout=200)
def test_a_second_copy_changes_where_a_backward_gathers_and_no_value() -> None:
    for mode, (precision, model) in COPIED.items():
        found = []
        for ranks in (1, 2):
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
            run.losses += train(engine, 1, 2).losses
            found.append(finish(engine, run))
            assert bool(kept) == (ranks == 2)
            rest = cost(engine.plan).rest.secondary
            assert rest == sum(copy.part.nbytes for copy in kept)
            engine.destroy()
        assert same(found) == [], same(found)
