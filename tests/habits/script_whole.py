"""Whole scripts with names of DeepSpeed that plain torch lacks; each asserts its own results."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.habits.loop import Habit, Loop, differences, differs, habits_of
from tests.habits.networks import WIDTH, Seeded, fit, square


def arguments_a_file_and_a_loader(loop: Loop) -> None:
    """Pass a script's arguments, a config file with a schedule, and data for a loader of `initialize`."""
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}}
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    path = loop.folder / "config.json"
    if loop.rank == 0:
        path.write_text(json.dumps(loop.config(gradient_clipping=1.0, optimizer=adamw, scheduler=warmup)))
    dist.barrier()
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = loop.deepspeed.add_config_arguments(parser)
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, 4))
    inputs = torch.randn(48, 16)
    labels = (inputs @ torch.randn(16, 4)).argmax(-1)
    engine = loop.train(
        model,
        args=parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)]),
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        training_data=torch.utils.data.TensorDataset(inputs, labels),
    )
    losses, norms, rates = [], [], []
    for _ in range(2):
        for x, y in engine.loader:
            loss = F.cross_entropy(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(float(engine.get_global_grad_norm()))
            rates.append(engine.get_lr()[0])
    loop.see("norms, rates", [norms, rates, engine.schedule.get_last_lr()])
    loop.see("counts", [engine.global_steps, engine.global_samples, len(engine.loader)])
    assert sum(losses[-3:]) < sum(losses[:3])
    assert rates[0] == 0.0 and abs(rates[-1] - 1e-2) < 1e-9
    assert engine.global_samples == 4 * dist.get_world_size() * 2 * len(engine.loader)


def boundaries_that_the_script_sets(loop: Loop) -> None:
    """Call `step` once, after the last of four micro-batches; count them; or divide losses in the script."""
    ends = []
    for how in ("told", "counted", "divided"):
        adamw = torch.optim.AdamW((net := Seeded()).parameters(), lr=5e-3, weight_decay=0.1)
        engine = loop.train(net, optimizer=adamw, gradient_accumulation_steps=4, gradient_clipping=0.5)
        for number in range(12):
            is_last = number % 4 == 3
            if how == "told":
                engine.set_gradient_accumulation_boundary(is_last)
            loss = square(engine(loop.data(number)))
            if how == "divided":
                engine.backward(loss / 4, scale_wrt_gas=False)
            else:
                engine.backward(loss)
            assert engine.is_gradient_accumulation_boundary() is is_last
            if how != "told" or is_last:
                engine.step()
                assert engine.was_step_applied() is is_last
            if is_last:
                loop.see("norm", float(engine.get_global_grad_norm()))
        assert engine.global_steps == 3 and engine.train_batch_size() == 16 * dist.get_world_size()
        ends.append(loop.weights(net))
    assert not any(differs(ends[0], end, 0.0) for end in ends[1:])


def a_scale_that_begins_too_high(loop: Loop) -> None:
    """Train in fp16 with a dynamic scale: the first steps are skipped, and the scale rises again."""
    fp16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 4, "hysteresis": 1}
    adam = {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
    engine = loop.train(model, optimizer=adam, gradient_clipping=1.0, fp16=fp16)
    assert engine.fp16_enabled() and engine.optimizer.dynamic_loss_scale
    scales, overflows = [2.0**24], []
    for step in range(24):
        x = loop.data(step)
        loss = F.mse_loss(engine(x.half()).float(), x.sum(-1, keepdim=True))
        engine.backward(loss)
        engine.step()
        scales.append(float(engine.optimizer.cur_scale))
        overflows.append(bool(engine.optimizer.overflow))
        assert engine.skipped_steps == sum(overflows)
    loop.see("scales", [scales, overflows, engine.global_steps])
    for before, after, overflow in zip(scales, scales[1:], overflows, strict=False):
        assert after == before / 2 if overflow else after in (before, 2 * before)
    assert overflows[0] and not all(overflows) and engine.global_steps == len(overflows)
    loop.end(engine)  # weights begin elsewhere: from what fp16 left of them


class Ranked(Seeded):
    """A model with other initial values of one parameter on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((WIDTH,), 1.0 + dist.get_rank()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.factor)


def values_that_are_whole(loop: Loop) -> None:
    """Read gradients, masters and moments of parameters in pieces, and write into a running engine."""
    utils, last = loop.deepspeed.utils, dist.get_world_size() - 1
    momentum = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    with loop.deepspeed.zero.Init(config_dict_or_path=loop.config()):
        net = Ranked()
    assert loop.weights(net)["factor"].tolist() == [1.0] * WIDTH, "rank 0's values are everybody's"
    engine = loop.train(net, optimizer=momentum)
    weight, bias = engine.module.blocks[1].up.weight, engine.module.blocks[0].down.bias
    for step in range(6):
        engine.backward(square(engine(loop.data(step))))
        loop.see("gradient", utils.safe_get_full_grad(weight))
        engine.step()
        loop.see("norm", float(engine.get_global_grad_norm()))
        if step == 3:  # into the master too, as DeepSpeed wants it
            with loop.deepspeed.zero.GatheredParameters([bias], modifier_rank=last):
                if loop.rank == last:
                    bias.data.fill_(0.125)
            utils.safe_set_full_fp32_param(bias, torch.full((WIDTH,), 0.125))
    loop.see("master", utils.safe_get_full_fp32_param(weight))
    loop.see("moment", utils.safe_get_full_optimizer_state(weight, "momentum_buffer"))
    assert list(weight.ds_shape) == [2 * WIDTH, WIDTH]


def a_run_that_is_resumed(loop: Loop) -> None:
    """Resume in the middle of a schedule, with a client state, from DeepSpeed's files and fp32 weights."""
    decay = {"total_num_steps": 12, "warmup_max_lr": 2e-3, "warmup_num_steps": 4}
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.05, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": decay},
    }
    folder = str(loop.folder)
    engine = loop.train(Seeded(), **config)
    assert engine.load_checkpoint(folder) == (None, None)
    fit(loop, engine, steps=5)
    engine.save_checkpoint(folder, client_state={"epoch": 3, "seen": [1, 2, 3]})
    engine.save_checkpoint(folder, tag="chosen", save_latest=False)
    engine.save_16bit_model(folder, "weights.bin")
    fit(loop, engine, steps=4, seed=5)
    after = loop.seen[-4:]
    loop.end(engine)
    engine = loop.train(Seeded(), **config)
    path, client = engine.load_checkpoint(folder)
    assert (client["epoch"], client["seen"]) == (3, [1, 2, 3])
    fit(loop, engine, steps=4, seed=5)
    assert not differences(after, loop.seen[-4:], 0.0)
    loop.see("rate", engine.get_lr())
    assert engine.global_steps == 9 and path.startswith(folder)
    names = {each.name for each in loop.folder.iterdir()}
    # 0.19.7 and 0.19.8 write one more, which docs/migrating.md names.
    wanted = {"latest", "global_step5", "chosen", "weights.bin", "zero_to_fp32.py"}
    assert names - {"zero_to_torch.py"} == wanted
    assert (loop.folder / "latest").read_text().strip() == "global_step5"
    masters = loop.deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    weights = torch.load(loop.folder / "weights.bin", weights_only=True)
    assert {str(value.dtype) for value in weights.values()} == {"torch.float32"}
    loop.see("weights", weights)
    loop.see("masters", dict(masters))


TWO, THREE = (2, 3), (3,)
OTHERS = "other stages were not compared"

HABITS = habits_of(
    globals(),
    Habit(arguments_a_file_and_a_loader, stages=(1, 3), alike=(1,), why=OTHERS, own=True),
    Habit(boundaries_that_the_script_sets, stages=TWO, alike=(2,), why=OTHERS, own=True),
    # Masters start from the model's bits here, and from fp16-rounded ones there.
    Habit(a_scale_that_begins_too_high, stages=TWO, alike=(2,), why=OTHERS, own=True, close=1e-3),
    Habit(values_that_are_whole, stages=THREE, own=True),
    Habit(a_run_that_is_resumed, stages=TWO, alike=(2,), why=OTHERS, own=True),
)
