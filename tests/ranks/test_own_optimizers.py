"""A caller's own optimizer has plain torch's numbers at every stage, or an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.networks import GPT, batch
from tests.ranks.harness import on_ranks, run_ranks
from tests.unit.refusals import error_of
from zerodrift.api import initialize
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.errors import ModelError, UnsupportedError, ZerodriftError

STEPS = 4


def aliased() -> nn.Module:
    """Make a layer with a buffer that is its weight's memory."""
    layer = nn.Linear(4, 4)
    layer.register_buffer("alias", layer.weight.data)
    return layer


WHOLE = {"rules": [{"match": "*", "placement": "whole"}]}
WHOLE_MATRICES = {"rules": [{"match": "layers.*.weight", "placement": "whole"}]}


class Own(torch.optim.Optimizer):
    """Gradient descent along a direction that subclasses compute."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, p.grad, self.state[p]))

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        return g


class Signs(Own):
    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        direction = (0.9 * momentum + 0.1 * g).sign()
        momentum.lerp_(g, 0.01)
        return direction + 0.1 * p


class Assigns(Own):
    """An optimizer that assigns new memory to every parameter in every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad.sign()


class ReadsMarks(Own):
    """An optimizer with a larger step for parameters that carry a caller's mark."""

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        return g * getattr(p, "haste", 1.0)


class Lookahead(torch.optim.Optimizer):
    """A wrapper around another optimizer, with its groups."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 2) -> None:
        self.inner, self.every, self.count = inner, every, 0
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.detach().clone())
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"].lerp_(p, 0.5)
                    p.copy_(slow)


class TrustRatio(Own):
    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        return g * (p.norm() / (g.norm() + 1e-12))


class BlockOptimizer(Own):
    """An optimizer with BAdam's name."""


class Wraps(Own):
    """A wrapper around another optimizer, with groups of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(list(params))
        self.inner = Signs(self.param_groups[0]["params"])


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make one of the optimizers here, or of torch, over the parameters that it is for."""
    parameters = list(model.parameters())
    if kind == "Lookahead":
        return Lookahead(Signs(parameters))
    if kind == "Lookahead around Adagrad":
        return Lookahead(torch.optim.Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.1))
    if kind in ("Muon", "LBFGS"):
        matrices = [p for n, p in model.named_parameters() if n.startswith("layers.") and p.dim() == 2]
        return getattr(torch.optim, kind)(matrices, lr=0.02)
    if kind == "ReadsMarks":
        for number, parameter in enumerate(parameters):
            parameter.haste = 1.0 + number
    made: torch.optim.Optimizer = globals()[kind](parameters)
    return made


def settings(stage: int, **more: Any) -> dict[str, Any]:
    precision = {"mode": "fp32", **more.pop("precision", {})}
    return {"precision": precision, "zero_optimization": {"stage": stage}, "gradient_clipping": 0, **more}


def beside_torch(kind: str, elementwise: bool | None, written: dict[str, Any]) -> dict[str, float]:
    """Return each parameter's distance from the plain loop's, relative to its path."""
    model, other = GPT(tied=False), GPT(tied=False)
    begun = {name: p.detach().clone() for name, p in other.named_parameters()}
    optimizer, theirs = make(kind, model), make(kind, other)
    engine = initialize(model, optimizer, written, elementwise=elementwise, device="cpu", quiet=True)
    for number in range(STEPS):
        engine.backward(engine(batch(number)))
        engine.step()
        other(batch(number)).backward()
        theirs.step()
        theirs.zero_grad()
    with engine.gathered() as values:
        off = {
            n: float((values[n] - p).norm() / (p - begun[n]).norm().clamp_min(1e-9))
            for n, p in other.named_parameters()
            if not torch.equal(values[n], p.detach())
        }
    engine.destroy()
    return off


EQUAL: list[tuple[str, bool | None, dict[str, Any]]] = [
    *((kind, True, settings(3)) for kind in ("Signs", "Assigns", "Lookahead", "ReadsMarks")),
    ("Signs", True, settings(1)),
    ("Signs", None, settings(2, zero_allow_untested_optimizer=True)),
    ("TrustRatio", None, settings(0)),
    ("TrustRatio", False, settings(3, precision=WHOLE)),
    ("Muon", None, settings(3, precision=WHOLE_MATRICES)),
]
"""(optimizer, `elementwise`, config): declared by an argument or by the config, or at stage 0, which needs
no declaration, or with whole parameters."""


def all_equal() -> dict[str, dict[str, float]]:
    return {f"{case}": off for case in EQUAL if (off := beside_torch(*case))}


def test_the_plain_loops_bits() -> None:
    assert run_ranks(all_equal, 2, timeout=120) == [{}, {}]


@on_ranks(2)
def test_dtensors_are_whole_to_whoever_looks_at_them() -> None:
    """Norms are added in another order; any other step would differ by the size of the path."""
    for kind in ("Signs", "TrustRatio"):
        off = beside_torch(kind, None, settings(3, backend="fsdp2"))
        assert max(off.values(), default=0.0) < 1e-4, (kind, off)


@on_ranks(2)
def test_what_an_optimizer_inside_another_keeps_is_saved(tmp_path: Path) -> list[str]:
    """Return the parameters that differ when an engine ends after two of four steps and another resumes."""
    ends = []
    for parts in ((4,), (2, 2)):
        done = 0
        for steps in parts:
            model = GPT(tied=False)
            optimizer = make("Lookahead around Adagrad", model)
            engine = initialize(model, optimizer, settings(3), elementwise=True, device="cpu", quiet=True)
            checkpoints = Checkpoints(engine, tmp_path, quiet=True)
            if done:
                checkpoints.load()
            for number in range(done, done + steps):
                engine.backward(engine(batch(number)))
                engine.step()
            done += steps
            if done == 2:
                checkpoints.save()
            with engine.gathered() as values:
                end = {name: value.clone() for name, value in values.items()}
            engine.destroy()
        ends.append(end)
    return [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]


WAYS_OUT = ("`elementwise=True`", "`zero_allow_untested_optimizer: true`", "stage 0", "placement: whole")
UNKNOWN = ("must be known to be elementwise", "got Signs, which zerodrift does not", *WAYS_OUT)
OF_A_TENSOR = ("got TrustRatio, and pieces of ", "placement: whole", "stage 0")
FSDP2 = settings(3, backend="fsdp2")
REFUSED: list[tuple[str, bool | None, dict[str, Any], tuple[str, ...]]] = [
    ("Signs", None, settings(1), UNKNOWN),
    ("Signs", None, settings(3, precision=WHOLE), UNKNOWN),
    *(("TrustRatio", False, settings(stage), OF_A_TENSOR) for stage in (1, 3)),
    ("Assigns", True, FSDP2, ("an assignment to `p.data` is lost; got Assigns",)),
    ("Wraps", True, settings(1), ("must share its parameter groups", "got Wraps around Signs")),
    ("Muon", None, settings(2), ("got Muon, and pieces of layers.0.", "placement: whole")),
    ("BlockOptimizer", True, settings(0), ("changes its set of trained parameters",)),
    ("LBFGS", None, settings(2), ("uses all parameters at once",)),
]


@on_ranks(2)
def test_what_cannot_be_stepped_is_refused_with_the_ways_out() -> None:
    for kind, elementwise, written, parts in REFUSED:
        told = error_of(UnsupportedError, beside_torch, kind, elementwise, written)
        assert all(part in told for part in parts), (kind, elementwise, written, told)


@on_ranks(2)
def test_between_steps_its_groups_hold_the_models_parameters() -> None:
    """The views have no memory then, with split masters: a script that read one ended its process."""
    model = nn.Linear(32, 16)
    optimizer, mode = Signs(model.parameters()), {"precision": {"mode": "bf16"}}
    engine = initialize(model, optimizer, settings(2) | mode, elementwise=True, device="cpu", quiet=True)
    engine.backward(engine(torch.ones(2, 32)).sum())
    held = optimizer.param_groups[0]["params"]
    assert [*map(id, held)] == [*map(id, engine.module.parameters())], "other parameters"
    with pytest.raises(ModelError, match="`weight`: its gradient must be read from the engine"):
        nn.utils.clip_grad_norm_(held, 1.0)
    engine.step()
    assert all(p.isfinite().all() for p in held), "no values"
    with pytest.raises(UnsupportedError, match=r"optimizer\.state`: must be read from the engine"):
        assert "momentum" not in optimizer.state[held[0]]
    with pytest.raises(UnsupportedError, match=r"optimizer\.state_dict`: must not be called"):
        optimizer.state_dict()
    engine.backward(engine(torch.ones(2, 32)).sum())
    raised = pytest.raises((TypeError, UnsupportedError), match="NoneType")
    with pytest.MonkeyPatch.context() as patch, raised:
        patch.setattr(optimizer, "direction", None)
        engine.step()
    assert (engine.micro_batches, engine.global_steps) == (0, 1), "the gradients of a failed update are left"
    held.pop()
    for change in (list, optimizer.param_groups.pop):
        change()
        with pytest.raises(UnsupportedError, match=r"param_groups\[0\]`: must be the group that the engine"):
            engine.step()


def test_a_known_class_with_hooks_takes_its_own_steps_and_calls_them() -> None:
    model, called = nn.Linear(4, 4), []
    model.heat = nn.Parameter(torch.tensor(2.0))  # its state looks like a count
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    engine = initialize(model, optimizer, settings(0), device="cpu", quiet=True)
    engine.backward(engine(torch.ones(2, 4)).sum() * 0.0 + model.heat)
    engine.step()
    engine.destroy()
    assert called == [1] and float(model.heat.detach()) == pytest.approx(2.0 - 0.1 / 1.5**0.5)
    other = initialize(nn.Linear(4, 4), None, settings(0) | BLOCK, device="cpu", quiet=True)
    with pytest.raises(UnsupportedError, match=r"register_step_post_hook`: must not be called"):
        other.optimizer.register_step_post_hook(print)
    other.destroy()


BLOCK: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
STEPLR, PLATEAU = torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.ReduceLROnPlateau
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, "`model`: must be a torch.nn.Module; got NoneType"),
    "a class of models": ({"model": nn.Linear}, "`model`: must be a torch.nn.Module; got the class Linear"),
    "a class of optimizers": (
        {"optimizer": Signs},
        "`optimizer`: must be a torch.optim.Optimizer; got the cl",
    ),
    "a misspelt device": ({"device": "gpu"}, "`device`: must be a device of torch.* got 'gpu'"),
    "no schedule": ({"schedule": 3}, "`schedule`: must be a schedule of torch.* got int"),
    "a function of nothing": (
        {"schedule": lambda _: None},
        "`schedule`: .* a function that returns NoneType",
    ),
    "a schedule of another": (
        {"schedule": STEPLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 1)},
        "`schedule`: must be over the engine's optimizer",
    ),
    "a buffer of a parameter": (
        {"model": aliased()},
        "`alias`: must have its own memory.* over the memory of `weight`",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_another_kind_is_refused_by_its_name(name: str) -> None:
    given, said = ARGUMENTS[name]
    with pytest.raises(ZerodriftError, match=said):
        initialize(**{"model": nn.Linear(4, 4), "config": BLOCK, "device": "cpu", "quiet": True} | given)


def test_a_call_of_an_engine_with_another_kind_of_value_is_refused(tmp_path: Path) -> None:
    engine = initialize(nn.Linear(4, 4), config=BLOCK, schedule=PLATEAU, device="cpu", quiet=True)
    checkpoints: Any = Checkpoints(engine, tmp_path, quiet=True)
    checkpoints.save()
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="outside of `torch"):
        initialize(nn.Linear(4, 4), config=BLOCK)
    with engine.gathered("weight") as shown:
        assert list(shown) == ["weight"]
    calls: dict[str, Callable[[], Any]] = {
        "`loss`: must be a tensor; got NoneType": lambda: engine.backward(None),
        "`None`: must be a parameter of the model": lambda: engine.parameter(None),
        "`parts`: must be 'all' or 'weights'": lambda: checkpoints.load(parts="optimizer"),
        "`allow`: must be several names.* got None": lambda: checkpoints.load(allow=None),
    }
    for said, call in calls.items():
        with pytest.raises(ZerodriftError, match=said):
            call()
    engine.backward(engine(torch.ones(2, 4)).sum())
    with pytest.raises(UnsupportedError, match=r"arguments`: must be .* ReduceLROnPlateau.step.*'metrics'"):
        engine.step()
    assert engine.step(schedule_arguments={"metrics": 1.0}).updated
    engine.optimizer.param_groups[0]["lr"] = None
    with pytest.raises(UnsupportedError, match=r"param_groups`: must each have a number as `lr`; got \[None"):
        engine.step()
    with pytest.raises(AttributeError, match="grad"):
        engine.parameter("weight").grad = torch.ones(4, 4)
    engine.destroy()
