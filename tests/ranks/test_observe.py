"""Declared against observed: a watched step, and its record of collectives, are as the plan says."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, diff, make, masters
from tests.numerics.test_frozen import adapted
from tests.numerics.test_pipelines import COUNT, LAYERS, data, pipeline
from tests.ranks.harness import on_ranks
from zerodrift.backends.adapters import ReduceScatter
from zerodrift.comm.collectives import Recorded
from zerodrift.dtypes import DType
from zerodrift.engine.engine import Engine
from zerodrift.errors import PrecisionError
from zerodrift.inspect.check import compare
from zerodrift.inspect.trace.engine import observe
from zerodrift.inspect.trace.records import EngineRecord, merged
from zerodrift.plan import Plan
from zerodrift.plan.schedule import collectives
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


def unseen(plan: Plan, seen: EngineRecord) -> set[str]:
    """Return the columns in which some parameter has no observed dtype."""
    cells = ((row.name, column) for row in plan.rows for column in compare.declared(row.columns))
    return {column for name, column in cells if not seen.seen(name, column)}


NATIVE_CASES = [
    (0, "bf16", {}, "storage=bfloat16 gather=- compute=bfloat16 logits=- grad=bfloat16 accumulate=float32 "
     "reduce=float32 master=split state=float32", {"gather"}),
    (3, "bf16", {"precision": {"reduce": "bf16", "state": "bf16-stochastic", "master": "fp32"}},
     "storage=bfloat16 gather=bfloat16 compute=bfloat16 logits=- grad=bfloat16 accumulate=float32 "
     "reduce=bfloat16>float32 master=float32 state=bfloat16", set()),
    (2, "fp16", {}, "storage=float16 gather=- compute=float16 logits=- grad=float16 accumulate=float32 "
     "reduce=float32 master=float32 state=float32", {"gather"}),
    (1, "autocast-bf16", {}, "storage=float32 gather=- compute=bfloat16,float32 logits=- "
     "grad=bfloat16,float32 accumulate=float32 reduce=bfloat16>float32,float32 master=same state=float32",
     {"gather"}),
]  # fmt: skip
FSDP2_CASES = [
    (0, "fp32", {}, "storage=float32 gather=- compute=float32 logits=- grad=float32 accumulate=float32 "
     "reduce=float32 master=same state=float32", {"gather"}),
    (1, "bf16", {"precision": {"accumulate": "bf16", "allow_narrow": True, "reduce": "bf16"}},
     "storage=float32 gather=bfloat16 compute=bfloat16 logits=- grad=bfloat16 accumulate=bfloat16 "
     "reduce=bfloat16>float32 master=same state=float32", set()),
    (2, "fp16", {}, "storage=float32 gather=float16 compute=float16 logits=- grad=float16 "
     "accumulate=float32 reduce=float32 master=same state=float32", set()),
    (3, "autocast-bf16", {}, "storage=float32 gather=bfloat16,float32 compute=bfloat16,float32 logits=- "
     "grad=bfloat16,float32 accumulate=float32 reduce=bfloat16>float32,float32 master=same state=float32",
     set()),
]  # fmt: skip
CASES = {"native": NATIVE_CASES, "fsdp2": FSDP2_CASES}
"""(stage, mode, keys of the config, line, columns that cannot be seen), by backend."""
BACKENDS = pytest.mark.parametrize("backend", CASES)


@BACKENDS
@on_ranks(2)
def test_every_column_is_seen_and_is_as_declared(backend: str) -> None:
    for stage, mode, rest, line, missing in CASES[backend]:
        engine = make(config(stage, mode, 2, backend=backend, **rest), GPT(tied=False))
        seen = step(engine)
        assert compare.findings(engine.plan, seen) == []
        told = compare.line(engine.plan, seen)
        assert told == f"precision: backend={backend} {line}", told
        assert unseen(engine.plan, seen) == missing
        engine.destroy()


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


UP = "layers.0.mlp.up"
PIN = {"rules": [{"match": f"{UP}.*", "pin": "fp32", "output": "input"}]}


def forward_in(dtype: torch.dtype, copied: bool = False) -> Any:
    """Return a forward of a linear module in a dtype, with its parameters or with copies."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        held = [p.clone() if copied else p for p in (self.weight, self.bias)]
        return torch.nn.functional.linear(x.to(dtype), *(p.to(dtype) for p in held)).to(x.dtype)

    return forward


FORWARDS = {
    "compute": forward_in(torch.bfloat16),
    "compute of a copy": forward_in(torch.bfloat16, copied=True),
    "wider compute": forward_in(torch.float32),
}


def plant(engine: Any, what: str) -> None:
    if what in FORWARDS:
        module = engine.module.get_submodule(UP)
        module.forward = types.MethodType(FORWARDS[what], module)


def planted(what: str) -> tuple[Engine, EngineRecord]:
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
    return engine, step(engine)


def planted_on_fsdp2(what: str) -> tuple[Engine, EngineRecord]:
    pins = PIN if what == "compute" else {}
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
    return engine, seen


PLANTED = {
    "native": ("compute", "compute of a copy", "state", "wider compute"),
    "fsdp2": ("compute", "accumulate", "reduce", "state", "wider compute"),
}


@BACKENDS
@on_ranks(2)
def test_what_is_not_as_declared_is_found_unless_it_is_wider(backend: str) -> None:
    for what in PLANTED[backend]:
        engine, seen = planted(what) if backend == "native" else planted_on_fsdp2(what)
        found = {(each.where, each.must.split("`")[1]) for each in compare.findings(engine.plan, seen)}
        planned = what.partition(" ")[0]
        if planned == "wider":
            assert not found, (what, found)
            compare.require_declared(engine.plan, seen)
            continue
        assert (f"{UP}.weight", planned) in found and {column for _, column in found} == {planned}, found
        told = f"the run and its plan differ: [\\s\\S]*`{planned}` must be "
        with pytest.raises(PrecisionError, match=told):
            compare.require_declared(engine.plan, seen)
        if backend == "fsdp2":
            assert {name.rpartition(".mlp.")[0] for name, _ in found if ".mlp." in name} == {"layers.0"}
        engine.destroy()


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


@on_ranks(4)
def test_a_pipeline_is_seen_on_every_stage() -> None:
    rules = {"rules": [{"match": "layers.1.mlp.router.weight", "pin": "fp32"}]}
    written = config(3, "bf16", COUNT, precision=rules, sharding={"keep_gathered": "micro-batch"})
    engine = pipeline(written, "zbv", "queue", GPT(LAYERS, moe=True))
    with observe(engine) as seen:
        engine.train_batch(data(0, engine.mesh.rank("data")))
    whole = merged(engine.comm.all_gather_object(seen))
    assert compare.findings(engine.plan, whole) == []
    assert unseen(engine.plan, whole) <= {"grad"}, "each column of every parameter, wherever it is"
    told = compare.line(engine.plan, whole)
    assert told == (
        "precision: backend=native storage=bfloat16,float32 gather=bfloat16,float32 "
        "compute=bfloat16,float32 logits=- grad=bfloat16 accumulate=float32 reduce=float32 "
        "master=split,same state=float32"
    ), told
    assert not whole.seen("layers.0.attention.qkv.weight", "grad"), "formed in the dtype that it is added in"


def recomputed_inside(reentrant: bool) -> GPT:
    """Return a GPT with activation checkpointing inside every block, around its MLP."""
    model = GPT()
    for layer in model.layers:
        layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=reentrant)
    return model


def difference(written: dict[str, Any], model: nn.Module) -> str:
    """Return the first difference between a step's record and the plan's list on this rank; empty if there
    is none."""
    engine = make(written, model)
    expected = [Recorded(c.op, c.dtype, c.numel, c.axis, c.sum) for c in collectives(engine.plan)]
    found = ""
    for step in range(2):
        with engine.comm.record() as log:
            for number in range(written["gradient_accumulation_steps"]):
                engine.backward(engine(batch(step, engine.mesh.rank("data"), number)))
                engine.step()
        for place, (got, want) in enumerate(itertools.zip_longest(log, expected)):
            if got != want:
                found = found or f"step {step}, {place} of {len(expected)}: got {got}, planned {want}"
    engine.destroy()
    return found


def frozen_block() -> GPT:
    model = GPT(layers=3)
    model.layers[1].requires_grad_(False)
    return model


Case = tuple[dict[str, Any], Callable[[], nn.Module]]
"""(config, model)."""
PINS = {"precision": {"rules": [{"match": "*norm*", "pin": "fp32"}]}}
NESTED = {"units": ["layers.*", "layers.*.mlp"]}


def plain() -> dict[str, Case]:
    """Return cells that hold every two values of stage, micro-batches and mode."""
    cells = [
        *((0, 1, "bf16"), (0, 3, "autocast-bf16"), (1, 3, "fp32"), (1, 1, "autocast-bf16")),
        *((2, 1, "fp32"), (2, 3, "bf16"), (3, 1, "autocast-bf16"), (3, 3, "fp32"), (3, 3, "bf16")),
    ]
    return {str(cell): (config(cell[0], cell[2], cell[1]), GPT) for cell in cells}


def shaped() -> dict[str, Case]:
    """Return pins (two segments per unit), nested, frozen and recomputed units, every way to keep and gather
    ahead."""
    cases: dict[str, Case] = {}
    for stage in (0, 3):
        cases[f"pins, stage {stage}"] = config(stage, "bf16", 2, **PINS), GPT
        cases[f"nested, stage {stage}"] = config(stage, "bf16", 2, sharding=NESTED), GPT
        cases[f"frozen block, stage {stage}"] = config(stage, "bf16", 2), frozen_block
    for reentrant in (False, True):
        cases[f"recomputed, reentrant {reentrant}"] = config(3, "bf16", 2), partial(GPT, recompute=reentrant)
        recomputing = partial(recomputed_inside, reentrant)
        cases[f"recomputed inside, reentrant {reentrant}"] = config(3, "bf16", 2), recomputing
    for room in (1, 1 << 15):
        near_and_far = config(3, "bf16", 2, sharding={"prefetch": room, **NESTED})
        cases[f"{room} bytes"] = near_and_far, partial(GPT, 4)
    for keep in ("never", "micro-batch", "step"):
        sharding = {"keep_gathered": keep, **NESTED}
        cases[f"keep {keep}, pinned and nested"] = config(3, "bf16", 2, **PINS, sharding=sharding), GPT
    return cases


def copied() -> dict[str, Case]:
    """Return two replicas of two shards, and a second copy of the blocks on pairs of ranks."""
    replicas, pairs = {"sharding": {"replicate": 2}}, {"sharding": {"secondary": 2}}
    nested = {"sharding": {**NESTED, "secondary": 2}}
    return {
        "replicas, stage 0": (config(0, "bf16", 1, **replicas), GPT),
        "replicas, stage 2": (config(2, "bf16", 1, **replicas), GPT),
        "replicas, stage 3": (config(3, "bf16", 2, **replicas), GPT),
        "gathered in fp8": (config(3, "bf16", precision={"gather": "fp8"}, **pairs), GPT),
        "frozen in nf4": (config(3, "bf16", 2, precision={"frozen": "nf4"}, **pairs), adapted),
        "nested, recomputed": (config(3, "bf16", 2, **nested), partial(GPT, recompute=False)),
        "a frozen block": (config(3, "autocast-bf16", 2, **pairs), frozen_block),
    }


@pytest.mark.parametrize(("cases", "world"), [(plain, 1), (plain, 2), (shaped, 2), (copied, 4)])
@on_ranks()
def test_the_record_is_the_plans_list(cases: Callable[[], dict[str, Case]], world: int) -> dict[str, str]:
    found = {name: difference(written, build()) for name, (written, build) in cases().items()}
    return {name: text for name, text in found.items() if text}
