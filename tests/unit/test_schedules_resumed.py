"""Schedules resume from our checkpoints and DeepSpeed's, and a bad state replaces nothing."""

from __future__ import annotations

import copy
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerodrift as zd
import zerodrift.deepspeed as deepspeed
from tests.checkpoint_files import seal
from tests.unit.deepspeed_layout import lay_out, values
from tests.unit.test_foreign_files import network
from zerodrift.api import initialize
from zerodrift.errors import CheckpointError
from zerodrift.optim.schedules import make_schedule
from zerodrift.policy.decisions import ComponentSpec
from zerodrift.weights.converter import convert

STEPS, MORE, LR = 3, 4, 1e-3
BLOCKS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10},
    "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 5, "warmup_max_lr": 1e-2},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 5},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 5},
    "linear": {"num_training_steps": 20, "num_warmup_steps": 5},
    "polynomial": {"num_training_steps": 20, "power": 2.0},
}
torchs = torch.optim.lr_scheduler


def of_block(kind: str, groups: torch.optim.Optimizer) -> Any:
    return make_schedule(ComponentSpec(kind, json.dumps(BLOCKS[kind])), groups)


OWN: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "SequentialLR": lambda groups: torchs.SequentialLR(
        groups, [torchs.LinearLR(groups, total_iters=2), torchs.ExponentialLR(groups, 0.9)], [2]
    ),
    "WarmupLR of one's own": lambda groups: of_block("WarmupLR", groups),
}
"""Schedules for `initialize`."""


def config(kind: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1}},
    }
    return made | ({"scheduler": {"type": kind, "params": BLOCKS[kind]}} if kind else {})


def walk(kind: str, steps: int) -> tuple[list[float], Any]:
    """Return the rates of a plain loop around each step, and DeepSpeed's saved state of the schedule."""
    groups = torch.optim.AdamW(network().parameters(), lr=LR)
    schedule = OWN[kind](groups) if kind in OWN else of_block(kind, groups)
    rates = [groups.param_groups[0]["lr"]]
    for _ in range(steps):
        groups.step()
        schedule.step()
        rates.append(groups.param_groups[0]["lr"])
    return rates, schedule.state_dict()


def theirs(place: Path, kind: str) -> Path:
    rates, state = walk(kind, STEPS)
    block = {} if kind in OWN else config(kind)["scheduler"]
    return lay_out(place, 2, step=STEPS, scheduler=(block, state), lr=rates[-1])


def engine_for(kind: str) -> Any:
    """Make a drop-in engine with the schedule in its config, or with one of the caller's own."""
    own = {"lr_scheduler": OWN[kind]} if kind in OWN else {}
    return deepspeed.initialize(model=network(), config=config("" if own else kind), **own)[0]


def go_on(engine: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        loss = engine(torch.randn(2, 3)).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append(engine.optimizer.param_groups[0]["lr"])
    return found


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


KINDS = [*BLOCKS, *OWN]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_deepspeeds_goes_on_with_its_schedule(kind: str, tmp_path: Path) -> None:
    """The checkpoint is read directly, or converted first."""
    folder, expected = theirs(tmp_path / "theirs", kind), walk(kind, STEPS + MORE)[0][STEPS + 1 :]
    engine = engine_for(kind)
    engine.load_checkpoint(folder)
    for name, value in values(0).items():
        assert torch.equal(engine.running.parameter(name).master, value)
    assert engine.global_steps == STEPS
    assert go_on(engine, MORE) == pytest.approx(expected, rel=1e-12)
    engine.destroy()
    if kind in OWN:
        return
    convert(folder, tmp_path / "ours")
    made = initialize(network(), None, config(kind), device="cpu", quiet=True)
    loaded = zd.Checkpoints(made, tmp_path / "ours", quiet=True).load()
    assert loaded.step == STEPS
    assert go_on(made, MORE) == pytest.approx(expected, rel=1e-12)
    made.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_goes_on(kind: str, tmp_path: Path) -> None:
    first = engine_for(kind)
    go_on(first, STEPS)
    first.save_checkpoint(tmp_path)
    expected = go_on(first, MORE)
    second = engine_for(kind)
    second.load_checkpoint(tmp_path)
    assert go_on(second, MORE) == expected
    first.destroy()
    second.destroy()


# --- all or nothing -----------------------------------------------------------------------------------------


def everything(engine: Any) -> dict[str, Any]:
    """Return all state of a run that a load can change."""
    parameters = [engine.parameter(name) for name in values(0)]
    return {
        "masters": [each.master.tolist() for each in parameters],
        "moments": [{k: v.tolist() for k, v in each.state.items()} for each in parameters],
        "steps": (engine.global_steps, engine.skipped_steps, repr(engine.updater.counters())),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups],
        "schedule": (copy.deepcopy(engine.schedule.state_dict()), engine.scaler.state_dict()),
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "module": (engine.module.get_extra_state(), engine.module.count.tolist()),
    }


class WithState(torch.nn.Sequential):
    """A model with a buffer and extra state."""

    def __init__(self) -> None:
        super().__init__(*network())
        self.register_buffer("count", torch.zeros(2))
        self.own = 0

    def get_extra_state(self) -> int:
        return self.own

    def set_extra_state(self, state: Any) -> None:
        if not isinstance(state, int):
            raise ValueError("must be a number")
        self.own = state


def replace_entry(state: Any, where: tuple[str, ...], what: Any) -> Any:
    key, *rest = where
    if rest:
        return {**state, key: replace_entry(state[key], tuple(rest), what)}
    return {k: v for k, v in state.items() if k != key} | ({} if what is None else {key: what})


SPOILT: list[tuple[str, tuple[str, ...], Any]] = [
    ("shared.pt", ("schedule", "last_batch_iteration"), "soon"),
    ("shared.pt", ("counters", ""), None),
    ("shared.pt", ("groups",), [{}, {}, {}]),
    ("rank-00000.pt", ("random", "python"), (3, [1, 2], None)),
    ("rank-00000.pt", ("modules", ""), "text"),
    ("rank-00000.pt", ("client",), None),
]
"""(file, place, value at that place); None removes the entry."""


def test_what_is_refused_of_a_checkpoint_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """The bad entry may be anywhere, and be met late."""

    def run() -> Any:
        given = config("WarmupLR") | {"fp16": {"enabled": True, "initial_scale_power": 8}}
        del given["bf16"]
        return initialize(WithState(), None, given, device="cpu", quiet=True)

    def train(engine: Any, steps: int) -> None:
        go_on(engine, steps)
        engine.module.own += steps
        engine.module.count += steps

    saver = run()
    train(saver, STEPS)
    zd.Checkpoints(saver, tmp_path / "run", quiet=True).save("good")
    saver.destroy()
    engine = run()
    train(engine, 1)
    before = everything(engine)
    for name, where, what in SPOILT:
        shutil.copytree(tmp_path / "run" / "good", tmp_path / "run" / "bad")
        path = tmp_path / "run" / "bad" / name
        state = torch.load(path, weights_only=True)
        torch.save(replace_entry(state, where, what), path)
        seal(path.parent)
        with pytest.raises(CheckpointError):
            zd.Checkpoints(engine, tmp_path / "run", quiet=True).load("bad")
        assert everything(engine) == before, (name, where)
        shutil.rmtree(path.parent)
    zd.Checkpoints(engine, tmp_path / "run", quiet=True).load("good")
    assert everything(engine) != before and engine.global_steps == STEPS
    engine.destroy()


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_loaded_place_sets_what_the_steps_to_it_set(kind: str) -> None:
    """Rates agree, and the betas that one of them moves: a run with changed numbers begins with these."""
    walked, loaded = (torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=LR) for _ in range(2))
    schedule = of_block(kind, walked)
    for _ in range(STEPS):
        schedule.step()
    of_block(kind, loaded).load_state_dict({"last_batch_iteration": STEPS - 1})
    for key in ("lr", "betas"):
        assert loaded.param_groups[0][key] == walked.param_groups[0][key], key


def test_a_schedule_that_refuses_a_state_of_deepspeeds_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    engine, block = engine_for("WarmupLR"), config("WarmupLR")["scheduler"]
    broken = lay_out(tmp_path, 2, scheduler=(block, {"steps": 3}))
    go_on(engine, 1)
    before = {name: engine.running.parameter(name).master for name in values(0)}
    for options in ({}, {"load_optimizer_states": False}):
        with pytest.raises(CheckpointError, match="`schedule`: must take the saved state"):
            engine.load_checkpoint(broken, **options)
        assert all(torch.equal(before[name], engine.running.parameter(name).master) for name in before)
        assert engine.global_steps == 1
    engine.destroy()
