"""Declared against observed: a watched step agrees with the plan, and planted differences are found."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT, WIDTH, batch
from tests.numerics.runs import config, diff, make, masters
from tests.numerics.test_pipelines import COUNT, LAYERS, data, pipeline
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.backends.adapters import ReduceScatter
from zerodrift.dtypes import DType
from zerodrift.engine.engine import Engine
from zerodrift.errors import PrecisionError
from zerodrift.inspect.check import compare
from zerodrift.inspect.trace.engine import observe
from zerodrift.inspect.trace.records import EngineRecord, merged
from zerodrift.plan import Plan
from zerodrift.policy.decisions import Reduction


def advance(engine: Engine) -> None:
    for micro in range(2):
        engine.backward(engine(batch(0, engine.mesh.rank("data"), micro)))
        engine.step()


def step(engine: Engine) -> EngineRecord:
    """Watch a step of two micro-batches on every rank."""
    with observe(engine) as seen:
        advance(engine)
    return merged(engine.comm.all_gather_object(seen))


def require_columns(stage: int, mode: str, rest: dict[str, Any], line: str, missing: set[str]) -> None:
    """Watch a step: no finding, the columns of the line, and these columns not seen of some parameter."""
    engine = make(config(stage, mode, micro_batches=2, **rest), GPT(tied=False))
    seen = step(engine)
    assert compare.findings(engine.plan, seen) == []
    told = compare.line(engine.plan, seen)
    assert line in told, told
    assert unseen(engine.plan, seen) == missing


def unseen(plan: Plan, seen: EngineRecord) -> set[str]:
    """Return the columns in which some parameter has no observed dtype."""
    cells = ((row.name, column) for row in plan.rows for column in compare.declared(row.columns))
    return {column for name, column in cells if not seen.seen(name, column)}


CASES = [
    (0, "bf16", {}, "storage=bfloat16 gather=- compute=bfloat16 logits=- grad=bfloat16 accumulate=float32 "
     "reduce=float32 master=split state=float32", {"gather"}),
    (3, "bf16", {"precision": {"reduce": "bf16", "state": "bf16-stochastic", "master": "fp32"}},
     "storage=bfloat16 gather=bfloat16 compute=bfloat16 logits=- grad=bfloat16 accumulate=float32 "
     "reduce=bfloat16>float32 master=float32 state=bfloat16", set()),
    (2, "fp16", {}, "storage=float16 gather=- compute=float16 logits=- grad=float16 accumulate=float32 "
     "reduce=float32 master=float32 state=float32", {"gather"}),
    (3, "fp32", {}, "storage=float32 gather=float32 compute=float32 logits=- grad=float32 "
     "accumulate=float32 reduce=float32 master=same state=float32", set()),
    (1, "autocast-bf16", {}, "storage=float32 gather=- compute=bfloat16,float32 logits=- "
     "grad=bfloat16,float32 accumulate=float32 reduce=bfloat16>float32,float32 master=same state=float32",
     {"gather"}),
]  # fmt: skip


ON_FSDP2 = [
    (0, "bf16", {}, "gather=- compute=bfloat16 logits=- grad=bfloat16 accumulate=float32 reduce=float32",
     {"gather"}),
    (1, "bf16", {"precision": {"accumulate": "bf16", "allow_narrow": True, "reduce": "bf16"}},
     "gather=bfloat16 compute=bfloat16 logits=- grad=bfloat16 accumulate=bfloat16 reduce=bfloat16>float32",
     set()),
    (2, "fp16", {}, "gather=float16 compute=float16 logits=- grad=float16 accumulate=float32 reduce=float32",
     set()),
    (3, "bf16", {"precision": {"reduce": "bf16"}},
     "gather=bfloat16 compute=bfloat16 logits=- grad=bfloat16 accumulate=float32 reduce=bfloat16>float32",
     set()),
    (3, "fp32", {}, "gather=float32 compute=float32 logits=- grad=float32 accumulate=float32 reduce=float32",
     set()),
    (3, "autocast-bf16", {}, "gather=bfloat16,float32 compute=bfloat16,float32 logits=- "
     "grad=bfloat16,float32 accumulate=float32 reduce=bfloat16>float32,float32", set()),
]  # fmt: skip
"""Lines without storage, master and state, which are float32."""


@pytest.mark.parametrize(
    ("backend", "case"),
    [("native", case) for case in CASES] + [("fsdp2", case) for case in ON_FSDP2],
    ids=lambda v: v if isinstance(v, str) else f"{v[0]}-{v[1]}",
)
@on_ranks(2)
def test_every_column_is_seen_and_is_as_declared(backend: str, case: tuple[Any, ...]) -> None:
    stage, mode, rest, line, missing = case
    if backend == "fsdp2":
        line = f"storage=float32 {line} master=same state=float32"
    line = f"precision: backend={backend} {line}"
    require_columns(stage, mode, {"backend": backend, **rest}, line, missing)


@on_ranks(4)
def test_copies_of_a_sharded_model_are_seen_on_both_axes() -> None:
    rest = {"backend": "fsdp2", "sharding": {"replicate": 2}, "precision": {"reduce": "bf16"}}
    require_columns(3, "bf16", rest, "reduce=bfloat16>float32", set())


BACKENDS = pytest.mark.parametrize("backend", ["native", "fsdp2"])


@BACKENDS
@on_ranks(2)
def test_a_pin_is_seen_in_every_column(backend: str) -> None:
    rules = [{"match": "layers.*.mlp.router.weight", "pin": "fp32"}]
    model = GPT(moe=True)
    model.layers[1].requires_grad_(backend == "native")
    engine = make(config(3, "bf16", 2, backend=backend, precision={"rules": rules}), model)
    seen = step(engine)
    compare.require_declared(engine.plan, seen)
    if backend == "fsdp2":
        frozen = "layers.1.mlp.experts.0.up.weight"
        assert seen.seen(frozen, "gather") and not seen.seen(frozen, "grad") | seen.seen(frozen, "state")
    found = [sorted(seen.seen("layers.0.mlp.router.weight", column)) for column in compare.COLUMNS]
    assert found == [["float32"]] * 6 + [["same"], ["float32"]]


# --- planted: each is found, by name --------------------------------------------------------------------


UP = "layers.0.mlp.up"
PIN = {"rules": [{"match": f"{UP}.*", "pin": "fp32", "output": "input"}]}


class Recast(torch.autograd.Function):
    """An identity of a weight whose backward has another dtype."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = dtype
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype) * 1.01, None  # a widening cast alone loses and gains nothing


def computing(dtype: torch.dtype, factor: float | None = None) -> Any:
    """Return a forward of a linear module in a dtype, with its parameters or with copies."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        held = [p if factor is None else p * factor for p in (self.weight, self.bias)]
        return torch.nn.functional.linear(x.to(dtype), *(p.to(dtype) for p in held)).to(x.dtype)

    return forward


def leaving(dtype: torch.dtype) -> Any:
    return lambda self, x: torch.nn.functional.linear(x, Recast.apply(self.weight, dtype), self.bias)


FORWARDS = {
    "compute": computing(torch.bfloat16),
    "compute of a copy": computing(torch.bfloat16, 1),
    "wider compute": computing(torch.float32),
    "wider grad": leaving(torch.float32),
    "grad": leaving(torch.bfloat16),
}


def plant(engine: Any, what: str) -> None:
    if what in FORWARDS:
        module = engine.module.get_submodule(UP)
        module.forward = types.MethodType(FORWARDS[what], module)


def judged(engine: Engine, seen: EngineRecord) -> tuple[list[tuple[str, str]], str]:
    found, told = compare.findings(engine.plan, seen), ""
    try:
        compare.require_declared(engine.plan, seen)
    except PrecisionError as error:
        told = str(error)
    engine.destroy()
    return [(each.name, each.column) for each in found], told


def planted(what: str) -> tuple[list[tuple[str, str]], str]:
    engine = make(config(3, "bf16", 2, precision=PIN if what.startswith("compute") else {}), GPT(tied=False))
    row = engine.plan.row(f"{UP}.weight")
    assert row is not None and engine.updater is not None
    plant(engine, what)
    if what == "state":
        held = engine.updater._slices[row.segment]  # type: ignore[attr-defined]
        rounded = tuple(moment.bfloat16() for moment in held.moments)
        engine.updater.resting = lambda number: (  # type: ignore[method-assign]
            None if held.master is None else held.master.dtype,
            tuple(moment.dtype for moment in (rounded if number == row.segment else held.moments)),
        )
    return judged(engine, step(engine))


def planted_on_fsdp2(what: str) -> tuple[list[tuple[str, str]], str]:
    pins = PIN if what in ("compute", "grad") else {}
    engine: Any = make(config(3, "bf16", backend="fsdp2", precision=pins), GPT(tied=False))
    member = engine.executor.members[f"{UP}.weight"]
    group = next(unit for unit in engine.executor.units if member in unit.members)
    plant(engine, what)
    if what == "accumulate":

        def name_narrow() -> None:
            for member in group.trained:
                member.full.grad_dtype = torch.bfloat16

        group.set_gradient_dtypes = name_narrow
    elif what == "reduce":
        narrow = Reduction(DType.BF16, DType.BF16, "every")
        group.modules[0].set_custom_reduce_scatter(ReduceScatter(group.collectives, narrow, 1.0))
    with observe(engine) as seen:
        engine.backward(engine(batch(0, engine.mesh.rank("data"))))
        engine.step()
        if what == "state":
            moments = engine.optimizer.state[member.sharded]
            moments["exp_avg"] = moments["exp_avg"].bfloat16()
    return judged(engine, seen)


NATIVE = ("compute", "compute of a copy", "state", "wider compute", "wider grad")
FSDP2 = ("compute", "grad", "accumulate", "reduce", "state", "wider compute", "wider grad")
PLANTED = [(planted, what) for what in NATIVE] + [(planted_on_fsdp2, what) for what in FSDP2]


@pytest.mark.parametrize(("plants", "what"), PLANTED)
def test_what_is_not_as_declared_is_found_unless_it_is_wider(plants: Any, what: str) -> None:
    planned = what.partition(" ")[0]
    for found, told in run_ranks(plants, 2, what):
        if planned == "wider":
            assert found == [] and told == ""
            continue
        assert (f"{UP}.weight", planned) in found
        assert {column for _, column in found} == {planned}, found
        assert f"`{planned}` must be " in told and "the run and its plan differ: " in told
        if plants is planted_on_fsdp2:
            assert {name.rpartition(".mlp.")[0] for name, _ in found if ".mlp." in name} == {"layers.0"}


class WideNorm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, weight, bias = self.normalized_shape, self.weight.float(), self.bias.float()
        return torch.nn.functional.layer_norm(x.float(), shape, weight, bias).to(x.dtype)


@on_ranks(2)
def test_a_gather_computes_with_no_parameter() -> None:
    """A gather writes a unit's values where the first of its parameters begins."""
    network = GPT(tied=False)
    network.layers[0].norm1 = WideNorm(WIDTH)
    seen = step(make(config(3, "bf16", 2), network)).seen("layers.0.norm1.weight", "compute")
    assert seen == {"float32"}, seen


@BACKENDS
@on_ranks(2)
def test_looking_changes_nothing(backend: str) -> None:
    """A watched run has the same bits, and nothing of the observer is left behind."""
    runs = []
    for watch in (False, True):
        engine = make(config(3, "bf16", 2, backend=backend), GPT(layers=1))
        (step if watch else advance)(engine)
        assert "update" not in vars(engine.updater) and "step" not in vars(engine.updater)
        runs.append(masters(engine))
        engine.destroy()
    assert diff(*runs) == []


# --- a pipeline -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "weights", "keep"),
    [
        pytest.param("1f1b", None, "step", marks=pytest.mark.slow),
        ("zbv", "queue", "micro-batch"),
        pytest.param("zbv", "autograd", "step", marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_a_pipeline_is_seen_on_every_stage(schedule: str, weights: str | None, keep: str) -> None:
    rules = {"rules": [{"match": "layers.1.mlp.router.weight", "pin": "fp32"}]}
    written = config(3, "bf16", COUNT, precision=rules, sharding={"keep_gathered": keep})
    engine = pipeline(written, schedule, weights, GPT(LAYERS, moe=True))
    with observe(engine) as seen:
        engine.train_batch(data(0, engine.mesh.rank("data")))
    whole = merged(engine.comm.all_gather_object(seen))
    assert compare.findings(engine.plan, whole) == []
    assert unseen(engine.plan, whole) <= {"grad"}, "each column of every parameter, wherever it is"
    grad = "bfloat16" if weights == "queue" else "bfloat16,float32"  # late ones, the router's too, are not
    told = compare.line(engine.plan, whole)
    assert told == (
        "precision: backend=native storage=bfloat16,float32 gather=bfloat16,float32 "
        f"compute=bfloat16,float32 logits=- grad={grad} accumulate=float32 reduce=float32 "
        "master=split,same state=float32"
    ), told
    if weights == "queue":  # it is formed in the dtype that it is added in
        assert not whole.seen("layers.0.attention.qkv.weight", "grad")
