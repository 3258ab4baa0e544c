"""Scripts with learning rates that are tensors, and with attributes of schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.dropin.parameters import Net
from tests.dropin.script import Run, Script, square

MAKES: dict[str, Callable[[Any, Any], Any]] = {
    "WarmupLR": lambda s, o: s.WarmupLR(o, 1e-3, 1e-2, 4, "linear"),
    "WarmupDecayLR": lambda s, o: s.WarmupDecayLR(o, 6, 1e-3, 1e-2, 3),
    "WarmupCosineLR": lambda s, o: s.WarmupCosineLR(o, 6, 0.1, 3),
    "OneCycle": lambda s, o: s.OneCycle(o, 1e-3, 1e-2, cycle_first_step_size=2),
    "LRRangeTest": lambda s, o: s.LRRangeTest(o, 1e-3, 2, 1.0),
}

READ = {
    "WarmupLR": "warmup_num_steps warmup_type min_lrs max_lrs delta_lrs inverse_log_warm_up",
    "WarmupDecayLR": "warmup_num_steps warmup_type total_num_steps min_lrs max_lrs",
    "WarmupCosineLR": "warmup_num_steps warmup_type total_num_steps cos_min_ratio warmup_min_ratio",
    "OneCycle": "step_ratio total_size first_step_size second_step_size min_lrs max_lrs",
    "LRRangeTest": "step_size step_rate staircase min_lr",
}


def a_tensor_stays_a_tensor(run: Run) -> None:
    """Step every schedule over a tensor: the rate stays the same object, with a new value."""
    from_here = run.deepspeed.runtime.lr_schedules
    for name, make in MAKES.items():
        rate = torch.tensor(0.01)
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate, foreach=False)
        schedule = make(from_here, optimizer)
        rates = []
        for _ in range(8):
            optimizer.step()
            schedule.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        run.tell(name, rates)
        run.tell(f"{name} is the same", optimizer.param_groups[0]["lr"] is rate)
        run.tell(f"{name} last", [float(last) for last in schedule.get_last_lr()])
        run.tell(f"{name} read", {key: getattr(schedule, key) for key in READ[name].split()})


def an_unknown_warmup(run: Run) -> None:
    """Set an unknown warmup type, which means the logarithmic one."""
    from_here = run.deepspeed.runtime.lr_schedules
    for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
        own = {"WarmupLR": {}}.get(name, {"total_num_steps": 9})
        schedule = getattr(from_here, name)(optimizer, warmup_num_steps=5, warmup_type="cubic", **own)
        for _ in range(4):
            schedule.step()
        run.tell(name, [schedule.warmup_type, optimizer.param_groups[0]["lr"]])


def an_unknown_warmup_in_the_config(run: Run) -> None:
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "cubic"}
    engine = run.engine(Net(), scheduler={"type": "WarmupLR", "params": params})
    run.tell("type", engine.lr_scheduler.warmup_type)
    for step in range(4):
        engine.backward(square(engine(run.data(step))))
        engine.step()
        run.tell("rate", engine.get_lr())


def a_tensor_in_training(run: Run) -> None:
    """Train an optimizer of the script's own with a tensor for its rate, and a schedule of DeepSpeed's."""
    net, rate = Net(), torch.tensor(0.05)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    schedule = run.deepspeed.runtime.lr_schedules.WarmupLR(optimizer, 0.0, 0.1, 4, "linear")
    engine = run.engine(net, optimizer=optimizer, lr_scheduler=schedule)
    run.train(engine, steps=4)
    run.tell("rate", float(rate))


SCRIPTS = (
    Script(a_tensor_stays_a_tensor, stages=(0,)),
    Script(an_unknown_warmup, stages=(0,)),
    Script(an_unknown_warmup_in_the_config),
    Script(a_tensor_in_training),
)
