"""Traps of an engine over a module: held memory, versions, parameters without values, the end.

The numbers of training, beside a plain loop, are in `tests/habits`.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.habits.networks import WIDTH, Net, square
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, finish, make
from tests.ranks.harness import run_ranks
from zerodrift.engine.engine import Engine
from zerodrift.engine.habits.parameter_guard import LostParameters
from zerodrift.errors import ModelError, UnsupportedError


def sharded(engine: Engine, stage: int) -> bool:
    return stage == 3 and engine.mesh.size("shard") > 1


# --- memory -------------------------------------------------------------------------------------------------


class Wanders(nn.Module):
    """A block with another graph in each forward: more nodes, fewer, others, and one that saves several."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 4 == 0:
            return self.linear(x) * self.other.weight[0]
        if self.calls % 4 == 1:
            return self.linear(self.norm(self.other(x)).tanh())
        if self.calls % 4 == 2:
            return torch.einsum("ab,cb,db->ad", x, self.linear.weight, self.other.weight) * x[0] ** 3
        return self.other(self.norm(x)) + self.linear(x).tanh()


class Loss(Net):
    """A network that returns a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return square(super().forward(x))


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


def no_unit_stays_gathered(stage: int) -> Any:
    """Run forwards whose saved tensors are never all where the one before had them, parts of the model, and
    evaluations: what was gathered for them is freed."""
    torch.manual_seed(1)
    engine = make(config(stage, "fp32"), Loss(Wanders))
    problems = []
    for step in range(6):
        loss = engine(data(step))
        held = [
            segment.number
            for unit in engine.executor.units
            for segment in unit.gathering
            if unit.spec.name and segment.full.untyped_storage().nbytes()
        ]
        problems += [f"step {step}: segments {held} hold memory after a forward"] if held else []
        engine.backward(loss + square(engine.module.blocks[1](data())))
        engine.zero_grad()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                engine.eval()(data())
            if sharded(engine, stage) and any(unit.is_full for unit in engine.executor.units):
                problems.append(f"an evaluation in {context.__name__} leaves units gathered")
        engine.train()
    return problems


def no_sync_holds_the_reduction_back(stage: int) -> Any:
    engine = make(config(stage, "fp32", precision={"reduce": {"when": "last"}}), Loss())
    with engine.comm.record() as log, engine.no_sync():
        engine.backward(engine(data()))
    return [entry for entry in log if entry.op == "reduce_scatter"]


# --- versions -----------------------------------------------------------------------------------------------


def a_change_in_place_between_forward_and_backward_is_caught(stage: int) -> Any:
    """Change a weight by hand, or by a step: an error, as in plain torch. Gathers must not count."""
    engine = make(config(stage, "fp32"), Loss())

    def written_by_value() -> None:
        with engine.gathered(["blocks.1.up.weight"], write=True) as values, torch.no_grad():
            values["blocks.1.up.weight"].mul_(2.0)

    def written_by_parameter() -> None:
        with torch.no_grad(), engine.gathered():
            engine.module.blocks[1].up.weight.mul_(1.0)

    def stepped() -> None:
        engine.backward(engine(data()))
        engine.step()

    problems = []
    for change in (written_by_value, written_by_parameter, stepped):
        loss = engine(data(1))
        change()
        if not is_refused(engine, loss):
            problems.append(f"{change.__name__}: was not caught")

    loss = engine(data())
    with engine.gathered():
        pass
    for unit in engine.executor.units:
        unit.gather()
        unit.release()
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return problems


def is_refused(engine: Any, loss: torch.Tensor) -> bool:
    try:
        engine.backward(loss)
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


# --- parameters without values ------------------------------------------------------------------------------


def reading_a_sharded_parameter(stage: int) -> Any:
    """Read a parameter's metadata, and require an error that names it for every read or write of values.
    Gathered, it is an ordinary parameter."""
    engine, plain = make(config(stage, "fp32"), GPT()), GPT()
    name, model, other = "layers.0.mlp.up.weight", engine.module, plain.layers[0].mlp.up.weight
    parameter = model.layers[0].mlp.up.weight
    problems = []
    if parameter.shape != (64, 32) or parameter.dtype is not torch.float32 or parameter.data.numel() != 2048:
        problems.append("shape and dtype are the parameter's")
    if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad or not parameter.is_leaf:
        problems.append("it is a parameter")
    if sharded(engine, stage):
        for number, use in enumerate(USES):
            with torch.no_grad(), pytest.raises(ModelError, match=rf"`{name}`: must be gathered") as caught:
                use(parameter)
            if "engine.gathered()" not in str(caught.value):
                problems.append(f"use {number} does not say what to do")
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data.fill_(1.0)  # as compiled code writes, which asks no class and counts no version
        if engine.mesh.device.type == "cpu":  # on others the host would wait for the answer
            with pytest.raises(ModelError, match=rf"`{name}`: must be written.*stands for it"):
                engine(batch(0))
        with torch.no_grad():
            engine(batch(0))
        if "not gathered" not in repr(parameter):
            problems.append("it can be printed")
    with engine.gathered([row.name for row in engine.plan.rows][:3]):
        pass
    with engine.gathered():
        if (
            type(parameter) is not nn.Parameter
            or not torch.equal(parameter, other)
            or "path" in vars(parameter)
        ):
            problems.append("gathered it is as ever")
    engine.destroy()
    return problems


USES: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p.sum(),
    lambda p: p.detach().sum(),
    lambda p: p.data.double(),
    lambda p: p.data.float().sum(),
    lambda p: p.T,
    lambda p: p[0],
    lambda p: p.tolist(),
    lambda p: p.numpy(),
    lambda p: p.detach().cpu().numpy(),
    lambda p: p.to("cpu", copy=True),
    lambda p: p + 1,
    lambda p: 1 - p,
    lambda p: p == p,
    lambda p: torch.cat([torch.zeros(1, 32), p]),
    lambda p: torch.stack(list(p)),
    lambda p: nn.functional.linear(torch.ones(1, 32), p),
    lambda p: torch.ones(64, 32).copy_(p),
    lambda p: torch.ones(64, 32).mul_(p.data),
    lambda p: torch._foreach_norm([p]),
    lambda p: torch.nn.utils.parameters_to_vector([p]),
    lambda p: copy.deepcopy(p),
    lambda p: torch.save(p, io.BytesIO()),
    lambda p: pickle.dumps(p.detach()),
    lambda p: p.mul_(2.0),
    lambda p: p.clamp_(-1, 1),
    lambda p: p.data.zero_(),
    lambda p: p.copy_(torch.zeros(64, 32)),
    lambda p: p.__setitem__(0, 1.0),
    lambda p: nn.init.normal_(p),
    lambda p: nn.init.zeros_(p),
]
"""Ways to read or write a parameter's values."""


def loading(stage: int) -> Any:
    """Load a model and a part: an error outside of `gathered(write=True)`; inside, masters follow."""
    other = GPT(seed=9)
    state = other.state_dict()
    problems = []
    for mode, assign in itertools.product(("fp32", "bf16"), (False, True)):
        model = GPT()
        engine = make(config(stage, mode), model)
        for load, part in ((model, state), (model.layers[0], other.layers[0].state_dict())):
            with pytest.raises(ModelError, match=r"engine.gathered\(write=True\)"):
                load.load_state_dict(part, assign=assign)
        held = dict(model.named_parameters())
        with engine.gathered(write=True):
            model.load_state_dict(copy.deepcopy(state), assign=assign)
        for name, parameter in model.named_parameters():
            if parameter is not held[name]:
                problems.append(f"{mode}, assign {assign}: {name} was detached")
        for name, value in other.named_parameters():
            wide = value if mode == "fp32" or assign else value.bfloat16()
            expected = wide if mode == "fp32" else wide.bfloat16().to(wide.dtype)
            if not torch.equal(engine.parameter(name).master.to(wide.dtype), expected):
                problems.append(f"{mode}, assign {assign}: {name}")
        engine.backward(engine(batch(0)))
        if not engine.step().updated:
            problems.append("step")
        engine.destroy()
    return problems


# --- the end ------------------------------------------------------------------------------------------------


def an_engine_that_is_destroyed_is_gone(stage: int) -> Any:
    """Destroy an engine, whose memory is freed without the garbage collector; the module works no more."""
    gc.collect()
    gc.disable()
    try:
        engine = make(config(stage, "bf16"), GPT())
        engine.backward(engine(batch(0)))
        engine.step()
        model = engine.module
        seen = weakref.ref(engine)
        masters = weakref.ref(engine.updater)
        engine.destroy()
        engine.destroy()
        for use, data in ((engine, batch(0)), (engine.backward, torch.ones(1)), (engine.step, False)):
            with pytest.raises(UnsupportedError, match="after `destroy`"):
                use(data)
        del engine, use
        hooks = [hook for m in model.modules() for hook in held(m)]
        # What was sharded is left with the word that it is gone.
        wrong = [hook for hook in hooks if not (isinstance(hook, LostParameters) and hook.names)]
        return seen() is not None or masters() is not None or wrong
    finally:
        gc.enable()


def held(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


# --- autocast around ----------------------------------------------------------------------------------------


def autocast_of_the_user(stage: int) -> Any:
    """Use autocast around an engine: off inside with one warning, or that of mode autocast."""
    engine = make(config(stage, "bf16"), GPT())
    expected = engine(batch(0))
    device = engine.mesh.device.type
    with torch.autocast(device, torch.float16), pytest.warns(UserWarning, match="and off inside"):
        found = engine(batch(0))
    if not torch.equal(found, expected):
        return "bf16"
    engine.zero_grad()
    engine.destroy()

    runs = []
    for outer in (None, torch.float16, torch.bfloat16):
        engine = make(config(stage, "autocast-bf16"), GPT())
        losses = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.autocast(device, outer or torch.bfloat16, enabled=outer is not None):
                # The whole loop is inside: weights that autocast has cast must not outlive a step.
                for step in range(3):
                    loss = engine(batch(step))
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
        told = [str(w.message) for w in caught if "autocast around the engine" in str(w.message)]
        if len(told) != (outer is torch.float16):
            return f"{outer}: {told}"
        runs.append((losses, finish(engine).weights))
        engine.destroy()
    for losses, values in runs[1:]:
        if losses != runs[0][0]:
            return f"losses {losses}, {runs[0][0]}"
        if any(not torch.equal(value, runs[0][1][name]) for name, value in values.items()):
            return "weights"
    return ""


CHECKS: list[Callable[[int], Any]] = [
    no_unit_stays_gathered,
    no_sync_holds_the_reduction_back,
    a_change_in_place_between_forward_and_backward_is_caught,
    reading_a_sharded_parameter,
    loading,
    an_engine_that_is_destroyed_is_gone,
    autocast_of_the_user,
]


def run_all(stage: int) -> list[str]:
    """Run every check at a stage on this rank, and return the findings."""
    problems = {check.__name__: check(stage) for check in CHECKS}
    return [f"{name}: {problem}" for name, problem in problems.items() if problem]


@pytest.mark.parametrize(
    ("world", "stage"),
    [(1, 0), (2, 3), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((1, 3), (2, 0)))],
)
def test_traps(world: int, stage: int) -> None:
    for found in run_ranks(run_all, world, stage):
        assert found == [], found
