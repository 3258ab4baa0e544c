"""Scripts about names in a config, and about mistakes in configs and calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.dropin.parameters import Net
from tests.dropin.script import Run, Script

TORCHS = ("Adagrad", "RMSprop", "NAdam", "Adadelta")


def optimizers_of_torchs(run: Run) -> None:
    """Train with `optimizer.type` set to classes of `torch.optim`."""
    for name in TORCHS:
        engine = run.engine(Net(), optimizer={"type": name, "params": {"lr": 0.01}})
        run.train(engine, 3)


def an_optimizer_of_torchs_over_groups(run: Run) -> None:
    """Train over `model_parameters` in groups with numbers of their own."""
    net = Net()
    groups = [{"params": list(net.head.parameters()), "lr": 0.02}, {"params": list(net.into.parameters())}]
    engine = run.engine(net, optimizer={"type": "RMSprop", "params": {"lr": 0.01}}, model_parameters=groups)
    run.train(engine, 3)
    run.tell("rates", engine.get_lr())


def schedules_of_torchs(run: Run) -> None:
    """Train with `scheduler.type` set to classes of `torch.optim.lr_scheduler`."""
    schedules: dict[str, dict[str, Any]] = {"StepLR": {"step_size": 2, "gamma": 0.5}}
    schedules |= {"CosineAnnealingLR": {"T_max": 5}, "OneCycleLR": {"max_lr": 0.2, "total_steps": 9}}
    momentum = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    for name, params in schedules.items():
        engine = run.engine(Net(), optimizer=momentum, scheduler={"type": name, "params": params})
        run.train(engine, 3)
        run.tell("rates", engine.get_lr())


def names_of_what_is_used(run: Run) -> None:
    """Read `optimizer_name`, `scheduler_name` and their arguments."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 3}}
    for kind in ("AdamW", "SGD", "RMSprop"):
        block = {"type": kind, "params": {"lr": 0.01}}
        if kind == "AdamW":
            block["params"]["torch_adam"] = True
        if run.is_plain:
            expected = "adamw" if kind == "AdamW" else kind
            run.tell(kind, [expected, schedule["type"], schedule["params"]])
            continue
        engine = run.engine(Net(), optimizer=block, scheduler=schedule)
        run.tell(kind, [engine.optimizer_name(), engine.scheduler_name(), engine.scheduler_params()])
        run.end(engine)


def raises(kind: type[Exception], call: Callable[[], Any]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


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


def mistakes_in_a_config(run: Run) -> None:
    """Make mistakes that scripts catch as AssertionError, or as the ValueError of a schema."""
    for name, (keys, kind) in MISTAKES.items():
        make = partial(run.deepspeed.initialize, model=Net(), config=run.config(**keys))
        run.tell(name, run.is_plain or raises(kind, make))


def losses_that_are_none(run: Run) -> None:
    """Pass losses that `backward` refuses by an assertion, and train on."""
    engine = run.engine(Net())
    engine(run.data(0))
    for name, loss in {"none": None, "number": 1.0, "constant": torch.tensor(1.0)}.items():
        run.tell(name, run.is_plain or raises(AssertionError, partial(engine.backward, loss)))
    run.train(engine, 2)


def checkpoints_that_are_missing(run: Run) -> None:
    """Load a tag that is missing, and from a folder without any."""
    engine = run.engine(Net())
    run.train(engine, 1)
    engine.save_checkpoint(str(run.folder))
    folder, other = str(run.folder), str(run.folder / "other")
    if run.is_plain:
        run.tell("errors", [True] * 3)
        run.tell("nothing", [None, None])
    else:
        read = run.deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
        calls: tuple[tuple[type[Exception], Any], ...] = (
            (AssertionError, lambda: engine.load_checkpoint(folder, tag="other")),
            (FileNotFoundError, lambda: read(folder, tag="other")),
            (ValueError, lambda: read(other)),
        )
        run.tell("errors", [raises(kind, call) for kind, call in calls])
        run.tell("nothing", engine.load_checkpoint(other))
    run.train(engine, 1, first=1)


SCRIPTS = (
    Script(optimizers_of_torchs),
    Script(an_optimizer_of_torchs_over_groups),
    Script(schedules_of_torchs, alike=(0,), why="its optimizer is none to torch's schedules"),
    Script(names_of_what_is_used, stages=(0,)),
    Script(mistakes_in_a_config, stages=(0,)),
    Script(losses_that_are_none),
    Script(checkpoints_that_are_missing, alike=(1, 2, 3), why="stage 0 saves no weights to read"),
)
