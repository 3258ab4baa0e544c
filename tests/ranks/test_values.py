"""Values in contexts that fail, in copies, in one engine after another, and where they are absent.

Reads and writes beside a plain loop are in `tests/habits/values.py`.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.habits import networks
from tests.habits.networks import WIDTH, square
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, diff, finish, make, masters
from tests.ranks.harness import on_ranks
from zerodrift.engine.engine import Engine
from zerodrift.engine.habits.parameter_guard import LostParameters
from zerodrift.errors import ModelError, RankError, UnsupportedError, ZerodriftError


class Net(networks.Net):
    """A network that returns a loss."""

    def __init__(self, block: Callable[[], nn.Module] = networks.Block) -> None:
        torch.manual_seed(5)
        super().__init__(block, out=1, blocks=2)

    def forward(self, x: Tensor) -> Tensor:
        return square(super().forward(x))


def engine_of(stage: int, mode: str, model: nn.Module | None = None) -> Engine:
    return make(config(stage, mode), Net() if model is None else model)


def data(seed: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def step(engine: Engine) -> Any:
    engine.backward(engine(data(engine.mesh.rank())))
    return engine.step()


@on_ranks(2)
def test_a_write_on_one_rank_is_an_error_on_all() -> None:
    for stage, mode in ((0, "fp32"), (1, "fp16")):
        engine = engine_of(stage, mode)
        step(engine)
        if engine.mesh.rank() == 1:
            engine.module.head.weight.data.add_(1.0)
        engine.backward(engine(data()))
        with pytest.raises((RankError, ModelError), match=r"engine.gathered"):
            engine.step()
        engine.destroy()


@on_ranks(2)
def test_what_ranks_assign_is_what_rank_0_assigns() -> None:
    engine = engine_of(0, "fp32")
    step(engine)
    handle = engine.parameter("head.weight")
    mine = torch.full(handle.shape, float(engine.mesh.rank()))
    handle.master = mine
    for key in handle.state:
        handle.state[key] = mine
    for value in (handle.master, handle.value, *handle.state.values()):
        assert not value.any(), "another rank's"


@on_ranks(2)
def test_a_write_to_half_a_master_is_taken_where_it_is_said() -> None:
    engine = engine_of(2, "bf16")
    step(engine)
    engine.module.head.weight.data.neg_()
    for act in (step, masters):
        with pytest.raises(ModelError, match=r"`head.weight`: must be written inside .*write=True"):
            act(engine)
    engine.zero_grad()
    shown = engine.module.head.weight.detach().clone()
    with engine.gathered(write=True):
        pass
    assert torch.equal(engine.parameter("head.weight").master, shown.float())
    assert step(engine).updated


def failing_writes(stage: int, mode: str) -> list[str]:
    """Raise inside a context: everything stays as it was, on all ranks."""
    wrong = []
    engine = engine_of(stage, mode)
    step(engine)
    held = dict(engine.module.named_parameters())
    other = Net()
    nn.init.ones_(other.head.weight)

    def nested(values: dict[str, Tensor]) -> None:
        with engine.gathered(["head.weight"], write=True) as inner:
            inner["head.weight"].fill_(3.0)

    spoils: dict[str, Callable[[dict[str, Tensor]], Any]] = {
        "in place": lambda values: values["head.weight"].zero_(),
        "assigned": lambda values: engine.module.load_state_dict(other.state_dict(), assign=True),
        "replaced": lambda values: setattr(engine.module.head.weight, "data", torch.ones(1, 8)),
        "nested": nested,
    }
    for (kind, spoil), culprit in itertools.product(spoils.items(), (None, 1)):
        before = masters(engine)
        mine = culprit in (None, engine.mesh.rank())
        expected = pytest.raises(ValueError if mine else RankError, match="on purpose")
        with expected, engine.gathered(write=True) as values:
            spoil(values)
            if mine:
                raise ValueError("on purpose")
        with engine.gathered() as values:
            shown = {name: value.float() for name, value in values.items()}
            kept = {name: before[name].to(value.dtype).float() for name, value in values.items()}
        differs = diff(before, masters(engine)) + diff(kept, shown)
        if differs or any(p is not held[name] for name, p in engine.module.named_parameters()):
            wrong.append(f"{kind} {mode} stage {stage}: {differs}")
    # An inner one that fails costs the outer one nothing.
    with engine.gathered(write=True) as values:
        values["head.bias"].fill_(2.0)
        with pytest.raises(ValueError), engine.gathered(write=True) as inner:
            inner["head.bias"].fill_(5.0)
            raise ValueError
        with pytest.raises(UnsupportedError, match="must not be called inside"):
            engine.step()
    if engine.parameter("head.bias").master.item() != 2.0 or not (step(engine).updated or mode == "fp16"):
        wrong.append(f"{mode} stage {stage}: the outer one's, or the next step")
    return wrong


@on_ranks(2, timeout=240)
def test_a_context_that_fails_leaves_what_was_there() -> list[str]:
    return [wrong for cell in ((0, "fp32"), (3, "bf16"), (1, "fp16")) for wrong in failing_writes(*cell)]


def copies(stage: int, mode: str) -> list[str]:
    """Copy a model: a plain module where its values are present, else an error by name."""
    wrong = []
    engine = engine_of(stage, mode)
    step(engine)
    away = not all(segment.is_full for segment in engine.executor.segments)
    ways: dict[str, Callable[[], Any]] = {
        "deepcopy": lambda: copy.deepcopy(engine.module),
        "pickle": lambda: through_a_file(engine.module),
        "state_dict": lambda: loaded(engine.module.state_dict()),
    }
    for name, way in ways.items():
        if away:
            with pytest.raises(ModelError, match=r"inside `engine.gathered"):
                way()
        with engine.gathered():
            then = finish(engine).weights
            copied = way()
        step(engine)
        found = {key: p.detach() for key, p in copied.named_parameters()}
        if diff(then, found):
            wrong.append(f"{name} at stage {stage}: values")
        if not is_plain(copied):
            wrong.append(f"{name} at stage {stage}: gradients")
        engine_of(0, "fp32", copied.float()).destroy()
    engine.destroy()
    return wrong


def through_a_file(model: nn.Module) -> nn.Module:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def loaded(state: dict[str, Tensor]) -> nn.Module:
    (model := Net()).load_state_dict(state, assign=True)
    return model.requires_grad_(True)


def again(stage: int, mode: str) -> list[str]:
    """Make one engine after another over one model; two at once are refused."""
    model, wrong = Net(), []
    engine = engine_of(stage, mode, model)
    step(engine)
    with pytest.raises(ModelError, match="`model`: must not have another engine"):
        engine_of(stage, mode, model)
    step(engine)
    full = finish(engine).weights
    with engine.gathered():
        engine.destroy()
    if diff(full, {name: p.detach() for name, p in model.named_parameters()}) or not is_plain(model):
        wrong.append(f"stage {stage} {mode}: it is no plain model with its values")
    model.zero_grad()
    second = engine_of(stage, mode, model)
    if diff(full, finish(second).weights):
        wrong.append(f"stage {stage} {mode}: what is taken over")
    step(second)
    away = not all(segment.is_full for segment in second.executor.segments)
    second.destroy()
    if away:
        for act in (
            lambda: model.head(data()),
            lambda: engine_of(stage, mode, model),
            model.state_dict,
            lambda: copy.deepcopy(model),
        ):
            with pytest.raises(ZerodriftError, match="must hold values"):
                act()
        model.load_state_dict(Net().state_dict(), assign=True)
        model.requires_grad_(True)
    step(engine_of(stage, "fp32", model.float()))
    return wrong


def is_plain(model: nn.Module) -> bool:
    """Return whether a backward gives each parameter a gradient of its own dtype."""
    model(data().to(model.head.weight.dtype)).backward()
    return all(p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())


@pytest.mark.parametrize(("stage", "mode"), [(0, "fp32"), (3, "bf16")])
@on_ranks(2, timeout=240)
def test_copies_are_plain_and_one_engine_follows_another(stage: int, mode: str) -> list[str]:
    return [*copies(stage, mode), *again(stage, mode)]


def sharded(engine: Engine, stage: int) -> bool:
    return stage == 3 and engine.mesh.size("shard") > 1


class Wanders(nn.Module):
    """A block with another graph in each forward: more nodes, others, and one that saves several."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            return self.linear(x) * self.other.weight[0]
        if self.calls % 3 == 1:
            return self.linear(self.other(x).tanh())
        return torch.einsum("ab,cb,db->ad", x, self.linear.weight, self.other.weight) * x[0] ** 3


def no_unit_stays_gathered(stage: int) -> Any:
    """Run forwards whose saved tensors are never all where the one before had them, parts of the model, and
    evaluations: what was gathered for them is freed."""
    torch.manual_seed(1)
    engine = engine_of(stage, "fp32", Net(Wanders))
    problems = []
    for number in range(6):
        loss = engine(data(number))
        for unit in engine.executor.units:
            if unit.spec.name and any(s.full.untyped_storage().nbytes() for s in unit.gathering):
                problems.append(f"step {number}: {unit.spec.name} holds memory after a forward")
        engine.backward(loss + square(engine.module.blocks[1](data())))
        engine.zero_grad()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                engine.eval()(data())
            if sharded(engine, stage) and any(unit.is_full for unit in engine.executor.units):
                problems.append(f"an evaluation in {context.__name__} leaves units gathered")
        engine.train()
    return problems


def a_change_in_place_between_forward_and_backward_is_caught(stage: int) -> Any:
    """Change a weight by hand, or by a step: an error, as in plain torch. Gathers must not count."""
    engine = engine_of(stage, "fp32")

    def written() -> None:
        with torch.no_grad(), engine.gathered(["blocks.1.up.weight"], write=True) as values:
            values["blocks.1.up.weight"].mul_(2.0)

    def written_by_parameter() -> None:
        with torch.no_grad(), engine.gathered():
            engine.module.blocks[1].up.weight.mul_(1.0)

    for change in (written, written_by_parameter, lambda: step(engine)):
        loss = engine(data(1))
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)

    loss = engine(data())
    with engine.gathered():
        pass
    for unit in engine.executor.units:
        unit.gather()
        unit.release()
    engine.backward(loss)
    engine.step()


def reading_a_sharded_parameter(stage: int) -> Any:
    """Read a parameter's metadata, and require an error that names it for every read or write of values.
    Gathered, it is an ordinary parameter."""
    engine, plain = make(config(stage, "fp32"), GPT()), GPT()
    name, model, other = "layers.0.mlp.up.weight", engine.module, plain.layers[0].mlp.up.weight
    parameter = model.layers[0].mlp.up.weight
    problems: list[str] = []
    if (parameter.shape, parameter.dtype, parameter.is_leaf) != ((64, 32), torch.float32, True):
        problems.append("shape and dtype are the parameter's")
    if sharded(engine, stage):
        for number, use in enumerate(USES):
            with torch.no_grad(), pytest.raises(ModelError, match=rf"`{name}`: must be gathered") as caught:
                use(parameter)
            if "engine.gathered()" not in str(caught.value):
                problems.append(f"use {number} does not say what to do")
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data.fill_(1.0)  # as compiled code writes, which asks no class and counts no version
        if engine.mesh.device.type == "cpu":  # on others the host would wait for the answer
            with pytest.raises(ModelError, match=rf"`{name}`: must be written.*to its placeholder"):
                engine(batch(0))
        with torch.no_grad():
            engine(batch(0))
        assert "not gathered" in repr(parameter), "it can be printed"
    with engine.gathered():
        if type(parameter) is not nn.Parameter or not torch.equal(parameter, other):
            problems.append("gathered it is as ever")
    engine.destroy()
    return problems


USES: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p.sum(),
    lambda p: p.data.double(),
    lambda p: p[0],
    lambda p: p.tolist(),
    lambda p: p.detach().cpu().numpy(),
    lambda p: 1 - p,
    lambda p: p == p,
    lambda p: torch.cat([torch.zeros(1, 32), p]),
    lambda p: nn.functional.linear(torch.ones(1, 32), p),
    lambda p: torch.ones(64, 32).copy_(p),
    lambda p: torch._foreach_norm([p]),
    lambda p: copy.deepcopy(p),
    lambda p: torch.save(p, io.BytesIO()),
    lambda p: p.mul_(2.0),
    lambda p: p.data.zero_(),
    lambda p: p.__setitem__(0, 1.0),
    lambda p: nn.init.normal_(p),
]
"""Ways to read or write a parameter's values."""


def loading(stage: int) -> Any:
    """Load a model: an error outside of `gathered(write=True)`; inside, masters follow."""
    other, problems = GPT(seed=9), []
    for mode, assign in (("fp32", False), ("bf16", True), ("bf16", False)):
        model = GPT()
        engine = make(config(stage, mode), model)
        with pytest.raises(ModelError, match=r"engine.gathered\(write=True\)"):
            model.layers[0].load_state_dict(other.layers[0].state_dict(), assign=assign)
        held = dict(model.named_parameters())
        with engine.gathered(write=True):
            model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        for name, value in other.named_parameters():
            wide = value if mode == "fp32" or assign else value.bfloat16()
            expected = wide if mode == "fp32" else wide.bfloat16().to(wide.dtype)
            if not torch.equal(engine.parameter(name).master.to(wide.dtype), expected):
                problems.append(f"{mode}, assign {assign}: {name}")
        if any(parameter is not held[name] for name, parameter in model.named_parameters()):
            problems.append(f"{mode}, assign {assign}: a parameter was detached")
        engine.backward(engine(batch(0)))
        if not engine.step().updated:
            problems.append("step")
        engine.destroy()
    return problems


def an_engine_that_is_destroyed_is_gone(stage: int) -> Any:
    """Destroy an engine, whose memory is freed without the garbage collector; the module works no more."""
    gc.collect()
    gc.disable()
    try:
        engine = engine_of(stage, "bf16")
        step(engine)
        modules = list(engine.module.modules())
        seen = weakref.ref(engine), weakref.ref(engine.updater)
        engine.destroy()
        engine.destroy()
        for use, given in ((engine, data()), (engine.backward, torch.ones(1)), (engine.step, False)):
            with pytest.raises(UnsupportedError, match="after `destroy`"):
                use(given)
        del engine, use
        hooks = [
            hook for m in modules for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())
        ]
        # What was sharded is left with the word that it is gone.
        wrong = [hook for hook in hooks if not (isinstance(hook, LostParameters) and hook.names)]
        return any(each() is not None for each in seen) or wrong
    finally:
        gc.enable()


def autocast_of_the_user(stage: int) -> Any:
    """Use autocast around an engine: off inside with one warning, or that of mode autocast."""
    engine = engine_of(stage, "bf16")
    expected = engine(data())
    device = engine.mesh.device.type
    with torch.autocast(device, torch.float16), pytest.warns(UserWarning, match="and off inside"):
        assert torch.equal(engine(data()), expected)
    engine.zero_grad()
    runs = []
    for outer in (None, torch.bfloat16):
        engine = engine_of(stage, "autocast-bf16")
        with torch.autocast(device, torch.bfloat16, enabled=outer is not None):
            for _ in range(3):  # weights that autocast has cast must not outlive a step
                step(engine)
        runs.append(masters(engine))
    return diff(*runs)


CHECKS: list[Callable[[int], Any]] = [
    no_unit_stays_gathered,
    a_change_in_place_between_forward_and_backward_is_caught,
    reading_a_sharded_parameter,
    loading,
    an_engine_that_is_destroyed_is_gone,
    autocast_of_the_user,
]


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 3)])
@on_ranks()
def test_traps(world: int, stage: int) -> list[str]:
    """Run every check, and return the findings."""
    found = {check.__name__: check(stage) for check in CHECKS}
    return [f"{name}: {problem}" for name, problem in found.items() if problem]
