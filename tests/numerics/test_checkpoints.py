"""A resumed run has the bits of an uninterrupted one, for every optimizer, scheme, stage and mesh."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint_files import misplaced_chunks
from tests.numerics import experts
from tests.numerics.networks import GPT, VOCABULARY, batch
from tests.numerics.runs import Run, config, diff, finish, make, masters, require_alike, train
from tests.numerics.test_frozen import adapted
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.engine.engine import Engine
from zerodrift.errors import CheckpointError


def later(engine: Engine, start: int, steps: int) -> Run:
    """Train some more steps, on data of their own."""
    return train(engine, steps, data=lambda step, rank, micro: batch(start + step, rank, micro))


Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


def save(engine: Engine, folder: str | Path, **rest: Any) -> None:
    Checkpoints(engine, folder, quiet=True).save(**rest)


def plain() -> tuple[nn.Module, dict[str, Any]]:
    return GPT(layers=1, moe=True), {}


def of_experts() -> tuple[nn.Module, dict[str, Any]]:
    return experts.Network(), {}


def frozen_base() -> tuple[nn.Module, dict[str, Any]]:
    return adapted(), {}


def of_torch(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model with an optimizer of torch in two groups and a scheduler."""
    model = GPT()
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    optimizer = kind([{"params": matrices, "lr": 2e-3}, {"params": vectors, "weight_decay": 0.0}], **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return model, {"optimizer": optimizer, "schedule": schedule}


def precision(**cells: Any) -> dict[str, Any]:
    return {"precision": cells}


def changed(build: Build, stage: int, keys: dict[str, Any], factor: float = 1.5) -> Engine:
    """Make an engine whose initial values are multiplied."""
    model, rest = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    keys = copy.deepcopy(keys)
    written = config(stage, keys.pop("mode", "bf16"), **keys)
    if "optimizer" in rest:
        del written["optimizer"]
    return make(written, model, **rest)


FP16 = {"initial_scale_power": 6, "loss_scale_window": 3}
DECAY = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 10}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
NARROW, SPLIT, WIDE = precision(gather="fp8"), precision(master="split"), precision(master="fp32")
nadam = partial(of_torch, torch.optim.NAdam, lr=1e-3, weight_decay=0.01)
CASES: dict[str, tuple[Build, int, dict[str, Any]]] = {
    "fp32": (plain, 2, {"mode": "fp32"}),
    "split": (plain, 3, SPLIT),
    "master fp32": (plain, 1, WIDE),
    "fp16": (plain, 3, {"mode": "fp16", "fp16": FP16}),
    "bf16 state": (plain, 3, precision(state="bf16-stochastic")),
    "8bit state": (plain, 3, precision(state="8bit")),
    "muon": (plain, 2, MUON),
    "schedule": (plain, 3, {"scheduler": DECAY}),
    "torch nadam": (nadam, 3, {}),
    "torch asgd": (partial(of_torch, torch.optim.ASGD, lr=1e-2), 3, {}),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_every_scheme_and_optimizer_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Two steps are saved, and the third is run twice: on, and in a new engine."""
    engine = changed(*CASES[name], 1.0)
    later(engine, 0, 2)
    save(engine, tmp_path)
    expected = later(engine, 2, 1)
    engine = changed(*CASES[name])
    loaded = Checkpoints(engine, tmp_path, quiet=True).resume()
    assert loaded is not None and loaded.step == engine.global_steps == 2 and loaded.differences == ()
    require_alike(expected, later(engine, 2, 1))
    assert any(any(bool(m.any()) for m in state.values()) or not state for state in expected.states.values())


class Noisy(GPT):
    """A model with dropout, and a running mean that differs on every rank."""

    def __init__(self) -> None:
        super().__init__(seed=0)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.float().mean()
        self.calls += 1
        return super().forward(tokens) * self.drop(torch.ones(64)).mean()

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def random_batch(step: int, rank: int, micro: int) -> torch.Tensor:
    """Return data from every random generator."""
    number = int(1000 * (random.random() + np.random.rand() + float(torch.rand(())) + random.gauss(0, 1)))
    return (batch(step, rank, micro) + number) % VOCABULARY


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "beside training"])
@on_ranks(2)
def test_random_numbers_buffers_and_the_clients_state_go_on(asynchronous: bool, tmp_path: Path) -> None:
    runs, ends = [], []
    for resumed in (False, True):
        engine = make(config(3, "bf16"), Noisy())
        rank = engine.mesh.rank()
        checkpoints = Checkpoints(engine, tmp_path, asynchronous=asynchronous, quiet=True)
        if resumed:
            loaded = checkpoints.resume()
            assert loaded is not None and loaded.differences == () and loaded.client == 1 + rank
        else:
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(rank + 10)
            train(engine, 2, data=random_batch)
            checkpoints.save(client=1 + rank)
        runs.append(train(engine, 3, data=random_batch))
        checkpoints.wait()
        ends.append((float(engine.module.seen), engine.module.calls, random.random(), float(torch.rand(()))))
    assert runs[0].differs(runs[1]) == [] and ends[0] == ends[1], ends


@on_ranks(2)
def test_an_engine_can_go_back(tmp_path: Path) -> None:
    """A running engine loads its own checkpoint, also one before the first step."""
    engine = make(config(3, "bf16"))
    checkpoints = Checkpoints(engine, tmp_path, quiet=True)
    checkpoints.save()
    first = later(engine, 0, 2)
    checkpoints.save()
    second = later(engine, 2, 2)
    checkpoints.load("step-00000000")
    require_alike(first, later(engine, 0, 2))
    checkpoints.load("step-00000002")
    require_alike(second, later(engine, 2, 2))


Side = tuple[int, int, dict[str, Any]]
"""(stage, ranks, more keys of the config)"""


@dataclass(frozen=True)
class Move:
    """A run that saves, and others that load."""

    source: Side
    targets: Sequence[Side]
    build: Build = plain
    data: Callable[[int, int, int], torch.Tensor] = batch
    is_rounded: bool = False
    """Whether those that load round the same masters to other weights."""


def frozen(word: str | None) -> dict[str, Any]:
    return precision(frozen=word, storage="fp32")


SPREAD, EXPERTS = {"sharding": {"replicate": 2}}, {"experts": {"ranks": 2}}
MOVES: dict[str, Move] = {
    "1 to 2": Move((0, 1, {}), [(3, 2, {})]),
    "2 to 3": Move((1, 2, {}), [(0, 3, {})]),
    "4 to 1": Move((3, 4, {}), [(2, 1, {})]),
    "muon 3 to 1": Move((1, 3, MUON), [(3, 1, MUON)]),
    "counts of NAdam": Move((3, 4, {}), [(3, 2, {})], nadam),
    "replicas": Move((3, 4, SPREAD), [(2, 2, {})]),
    "narrow": Move((3, 2, NARROW), [(1, 1, NARROW)]),
    "ranks of experts": Move((3, 4, EXPERTS), [(0, 1, {}), (1, 2, EXPERTS)], of_experts, experts.batch),
    "frozen in fp8": Move((3, 2, frozen("fp8")), [(0, 1, frozen("fp8")), (3, 1, frozen(None))], frozen_base),
    "frozen in nf4": Move((0, 2, frozen("nf4")), [(2, 1, frozen("nf4"))], frozen_base),
    "split to fp32": Move((3, 2, SPLIT), [(3, 2, WIDE)], is_rounded=True),
    "fp32 to split": Move((3, 2, WIDE), [(3, 2, SPLIT)], is_rounded=True),
}


def values_of(engine: Engine) -> Run:
    """Return all values and counts, without weights where a rank shows its own experts only."""
    run, counters = finish(engine), engine.updater.counters().values()
    counts = (count for state in counters if isinstance(state, dict) for count in state.values())
    run.scales = sorted({float(count) for count in counts if isinstance(count, torch.Tensor)})
    return run if engine.mesh.size("expert") == 1 else replace(run, weights={})


def save_one(folder: str, name: str) -> Run:
    move = MOVES[name]
    stage, _, keys = move.source
    engine = changed(move.build, stage, keys, 1.0)
    train(engine, 3, data=move.data)
    save(engine, folder, client={"epoch": 3})
    return values_of(engine)


def load_one(folder: str, name: str, number: int) -> Any:
    move = MOVES[name]
    stage, _, keys = move.targets[number]
    engine = changed(move.build, stage, keys)
    loaded = Checkpoints(engine, folder, quiet=True).load()
    run = values_of(engine)
    train(engine, 1, data=move.data)  # it runs
    return run, loaded.client, {difference.what for difference in loaded.differences}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.second] * (name != "1 to 2")) for name in MOVES]
)
def test_a_mesh_loads_what_another_saved(name: str, tmp_path: Path) -> None:
    """Masters, moments and weights agree: whole matrices go to their owners, replicas save once, experts go
    to any rank, and the blocks of frozen parameters have one form."""
    move = MOVES[name]
    stage, world, _ = move.source
    saved = run_ranks(save_one, world, str(tmp_path), name)[0]
    if "frozen" not in name:  # whose bytes the rule does not know
        assert misplaced_chunks(tmp_path / "step-00000003") == []
    for number, (other, ranks, _) in enumerate(move.targets):
        for run, client, said in run_ranks(load_one, ranks, str(tmp_path), name, number):
            run.weights = run.weights if saved.weights else {}
            differs = saved.differs(run)
            assert differs == [] or (
                move.is_rounded and all(what.startswith("weights ") for what in differs)
            ), (name, number, differs)
            assert len(saved.masters) > 10 and bool(saved.scales) is ("NAdam" in name)
            assert client == {"epoch": 3}
            assert ("random numbers" in said) == (world != ranks) and ("ranks" in said or world == ranks)
            assert ("stage" in said) == (stage != other) and ("master" in said or not move.is_rounded)


@on_ranks(2)
def test_weights_can_be_taken_without_the_optimizer(tmp_path: Path) -> None:
    engine = make(config(3, "bf16"), GPT())
    saved = train(engine, 3).masters
    save(engine, tmp_path)
    engine.destroy()
    lion = config(2, "fp32", optimizer={"type": "Lion", "params": {"lr": 1e-4}})
    engine = make(lion, GPT(seed=4))
    checkpoints = Checkpoints(engine, tmp_path, quiet=True)
    with pytest.raises(CheckpointError, match="`optimizer`: must be adamw, as when it was saved; got lion"):
        checkpoints.load()
    assert engine.global_steps == 0
    loaded = checkpoints.load(parts="weights")
    assert diff(saved, masters(engine)) == [] and engine.global_steps == 0
    train(engine, 1)
    assert "optimizer" in {difference.what for difference in loaded.differences}
    checkpoints.load(allow=("optimizer",))
    assert diff(saved, masters(engine)) == [] and engine.global_steps == 3
