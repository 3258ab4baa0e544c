"""Scripts about names in a config, and mistakes in configs and calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.habits.loop import Habit, Loop, habits_of
from tests.habits.networks import Seeded, fit


def optimizers_of_torchs(loop: Loop) -> None:
    """Train with `optimizer.type` set to classes of `torch.optim`, two of them over groups."""
    for name in ("Adagrad", "RMSprop", "SGD"):
        net = Seeded()
        head, into = list(net.head.parameters()), list(net.into.parameters())
        groups = {"model_parameters": [{"params": head, "lr": 0.02}, {"params": into}]}
        block = {"type": name, "params": {"lr": 0.01}}
        engine = loop.train(net, optimizer=block, **(groups if name != "Adagrad" else {}))
        fit(loop, engine, steps=3)
        loop.see("rates", engine.get_lr())


def schedules_of_torchs(loop: Loop) -> None:
    """Train with `scheduler.type` set to classes of `torch.optim.lr_scheduler`."""
    schedules = {"StepLR": {"step_size": 2, "gamma": 0.5}, "OneCycleLR": {"max_lr": 0.2, "total_steps": 9}}
    momentum = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    for name, params in schedules.items():
        engine = loop.train(Seeded(), optimizer=momentum, scheduler={"type": name, "params": params})
        fit(loop, engine, steps=3)
        loop.see("rates", engine.get_lr())


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "sizes that do not fit": ({"train_batch_size": 9, "gradient_accumulation_steps": 2}, AssertionError),
    "no accumulation": ({"gradient_accumulation_steps": 0}, AssertionError),
    "no batch": ({"train_micro_batch_size_per_gpu": 0}, AssertionError),
    "two modes": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, AssertionError),
    "an optimizer that nobody has": ({"optimizer": {"type": "Nobodys"}}, AssertionError),
    "a stage that is none": ({"zero_optimization": {"stage": 4}}, ValueError),
    "a key that is none": ({"zero_optimization": {"stages": 2}}, ValueError),
    "a device that is none": ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, ValueError),
    "an argument that is elsewhere": (
        {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "max_grad_norm": 1.0}}},
        ValueError,
    ),
}


def mistakes_in_a_config(loop: Loop) -> None:
    """Make mistakes that scripts catch as AssertionError, or as the ValueError of a schema."""
    for keys, kind in MISTAKES.values():
        with pytest.raises(kind):
            loop.train(Seeded(), **keys)


def losses_that_are_none(loop: Loop) -> None:
    """Pass losses that `backward` refuses by an assertion, and train on."""
    engine = loop.train(Seeded())
    engine(loop.data(0))
    for loss in () if loop.plain else (None, 1.0, torch.tensor(1.0)):
        with pytest.raises(AssertionError):
            engine.backward(loss)
    fit(loop, engine)


def checkpoints_that_are_missing(loop: Loop) -> None:
    """Load a tag that is missing, and from a folder without any."""
    engine = loop.train(Seeded())
    fit(loop, engine, steps=1)
    folder, other = str(loop.folder), str(loop.folder / "other")
    engine.save_checkpoint(folder)
    read = loop.deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    with pytest.raises(AssertionError):
        engine.load_checkpoint(folder, tag="other")
    with pytest.raises(FileNotFoundError):
        read(folder, tag="other")
    with pytest.raises(ValueError):
        read(other)
    assert engine.load_checkpoint(other) == (None, None)
    fit(loop, engine, steps=1, seed=1)


HABITS = habits_of(
    globals(),
    Habit(schedules_of_torchs, alike=(0,), why="its optimizer is none to torch's schedules"),
    Habit(mistakes_in_a_config, stages=(0,), own=True),
    Habit(checkpoints_that_are_missing, alike=(1, 2, 3), why="stage 0 saves no weights to read", own=True),
)
