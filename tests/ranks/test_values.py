"""Values in contexts that fail, in copies, and in one engine after another.

Reads and writes beside a plain loop are in `tests/habits/values.py`.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.habits import networks
from tests.habits.networks import square
from tests.numerics.runs import config, diff, finish, make, masters
from tests.ranks.harness import on_ranks
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError, RankError, UnsupportedError, ZerodriftError


class Net(networks.Net):
    """A network that returns a loss."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(out=1, blocks=2)

    def forward(self, x: Tensor) -> Tensor:
        return square(super().forward(x))


def engine_of(stage: int, mode: str, model: nn.Module | None = None, **more: Any) -> Engine:
    return make(config(stage, mode, **more), Net() if model is None else model)


def data(seed: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def step(engine: Engine) -> Any:
    engine.backward(engine(data(engine.mesh.rank())))
    return engine.step()


def weights(engine: Engine) -> dict[str, Tensor]:
    return finish(engine).weights


Cell = tuple[int, str]
"""(stage, mode)."""


def halves(some: Sequence[Cell], every: Iterable[Cell]) -> Any:
    """Return cells for `make test` that hold every stage and every mode; the others are slow."""
    others = [cell for cell in every if cell not in some]
    cases = [pytest.param(some, id="some"), pytest.param(others, id="others", marks=pytest.mark.slow)]
    return pytest.mark.parametrize("cells", cases)


@halves([(0, "fp32"), (1, "fp16")], itertools.product((0, 1), ("fp32", "fp16")))
@on_ranks(2)
def test_a_write_on_one_rank_is_an_error_on_all(cells: list[Cell]) -> None:
    for stage, mode in cells:
        engine = engine_of(stage, mode)
        step(engine)
        if engine.mesh.rank() == 1:
            engine.module.head.weight.data.add_(1.0)
        engine.backward(engine(data()))
        with pytest.raises((RankError, ModelError), match=r"engine.gathered"):
            engine.step()
        engine.destroy()


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


# --- contexts -----------------------------------------------------------------------------------------------


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
        at = f"{kind} {mode} stage {stage}"
        if diff(before, masters(engine)):
            wrong.append(f"{at}: masters")
        if any(parameter is not held[name] for name, parameter in engine.module.named_parameters()):
            wrong.append(f"{at}: parameters")
        with engine.gathered() as values:
            shown = {name: before[name].to(value.dtype).float() for name, value in values.items()}
            if diff(shown, {name: value.float() for name, value in values.items()}):
                wrong.append(f"{at}: what is shown")
    # An inner one that fails costs the outer one nothing.
    with engine.gathered(write=True) as values:
        values["head.bias"].fill_(2.0)
        with pytest.raises(ValueError), engine.gathered(write=True) as inner:
            inner["head.bias"].fill_(5.0)
            raise ValueError
        with pytest.raises(UnsupportedError, match="must not be called inside"):
            engine.step()
    if engine.parameter("head.bias").master.item() != 2.0:
        wrong.append("the outer one's")
    if not (step(engine).updated or mode == "fp16"):
        wrong.append("the next step")
    engine.destroy()
    return wrong


@halves([(0, "fp32"), (3, "bf16"), (1, "fp16")], itertools.product((0, 1, 3), ("fp32", "bf16", "fp16")))
@on_ranks(2, timeout=240)
def test_a_context_that_fails_leaves_what_was_there(cells: list[Cell]) -> list[str]:
    return [wrong for cell in cells for wrong in failing_writes(*cell)]


# --- copies, and one engine after another -------------------------------------------------------------------


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
        "a part": lambda: copy.deepcopy(engine.module.blocks[0]) and copy.deepcopy(engine.module),
    }
    for name, way in ways.items():
        if away:
            with pytest.raises(ModelError, match=r"inside `engine.gathered"):
                way()
        with engine.gathered():
            then = weights(engine)
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
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def loaded(state: dict[str, Tensor]) -> nn.Module:
    model = Net()
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(True)


def again(stage: int, mode: str) -> list[str]:
    """Make one engine after another over one model; two at once are refused."""
    model, wrong = Net(), []
    engine = engine_of(stage, mode, model)
    step(engine)
    with pytest.raises(ModelError, match="`model`: must not have another engine"):
        engine_of(stage, mode, model)
    step(engine)
    full = weights(engine)
    with engine.gathered():
        engine.destroy()
    if diff(full, {name: p.detach() for name, p in model.named_parameters()}):
        wrong.append(f"stage {stage} {mode}: what is left")
    if not is_plain(model):
        wrong.append(f"stage {stage} {mode}: it is a plain model")
    model.zero_grad()
    second = engine_of(stage, mode, model)
    if diff(full, weights(second)):
        wrong.append(f"stage {stage} {mode}: what is taken over")
    step(second)
    away = not all(segment.is_full for segment in second.executor.segments)
    second.destroy()
    if away:
        for act in (
            lambda: model(data()),
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


@pytest.mark.parametrize(
    "cell",
    [
        (0, "fp32"),
        (3, "bf16"),
        *(pytest.param(c, marks=pytest.mark.slow) for c in ((2, "bf16"), (3, "fp32"))),
    ],
)
@on_ranks(2, timeout=240)
def test_copies_are_plain_and_one_engine_follows_another(cell: Cell) -> list[str]:
    return [*copies(*cell), *again(*cell)]
