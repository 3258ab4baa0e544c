"""Random configs and models: only the project's own errors, sound plans, values that survive JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.models import EMBEDDING, LINEAR, NORM
from zerodrift import Plan, ZerodriftError, cost, make_plan
from zerodrift.dtypes import DType
from zerodrift.model.spec import BufferSpec, ModelSpec, OwningModule, ParameterSpec
from zerodrift.plan.check import find_violations
from zerodrift.plan.schedule import collectives

pytestmark = pytest.mark.long


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def some(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A block in which any keys are left out."""
    return st.fixed_dictionaries({}, optional=keys)


DTYPE = one_of("fp32", "bf16", "fp16", "float32", "bfloat16", "half")
MODE = one_of("fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16")
FLAG = one_of(True, False, "auto")
NAMES = ["layers.0.attn.q.weight", "layers.1.attn.q.weight", "layers.1.mlp.gate.weight", "embed.weight"]
COLUMN = {
    **dict.fromkeys(("storage", "gather", "compute", "grad", "accumulate", "export"), DTYPE),
    "master": one_of("fp32", "split", "same"),
    "state": one_of("fp32", "bf16", "bf16-stochastic", "8bit"),
    "reduce": DTYPE | some(wire=DTYPE, sum=DTYPE, when=one_of("last", "every")),
}
RULE = st.fixed_dictionaries(
    {"match": one_of("*", "*.gate.*", "layers.*", "embed.weight", "layers.1.*", "*.weight", "none")},
    optional={
        **COLUMN,
        "class": one_of("torch.nn.Linear", "models.RMSNorm"),
        "pin": st.just("fp32"),
        "output": one_of("keep", "input"),
        "placement": one_of("sliced", "matrices", "whole"),
        "optimizer": one_of("Muon", "AdamW"),
    },
)
OPTIMIZER = st.fixed_dictionaries(
    {"type": one_of("AdamW", "SGD", "Lion", "Nope")},
    optional={"params": st.just({"betas": [0.9, 0.95]}) | st.just({"lr": "auto"})},
)
CONFIG = some(
    precision=some(
        **COLUMN,
        mode=MODE | st.just("auto"),
        buffers=DTYPE | st.just("keep"),
        allow_narrow=st.booleans(),
        rules=st.lists(RULE, max_size=3),
    ),
    bf16=some(enabled=FLAG, bf16_master_weights_and_grads=st.booleans()),
    fp16=some(enabled=FLAG, loss_scale=one_of(0, 1, 1024.0), hysteresis=st.integers(1, 4)),
    torch_autocast=some(enabled=st.booleans(), dtype=DTYPE),
    gradient_accumulation_dtype=DTYPE,
    data_types=some(grad_accum_dtype=DTYPE, param_dtype=DTYPE),
    communication_data_type=DTYPE,
    zero_optimization=some(
        stage=st.integers(0, 3),
        fp32_pinned_parameters=st.lists(one_of("gate", "embed", "nope"), max_size=2),
        mics_shard_size=one_of(-1, 1, 2),
    ),
    sharding=some(
        replicate=st.integers(1, 3),
        keep_gathered=one_of("never", "micro-batch", "step"),
        units=st.lists(one_of("layers.*", "layers.*.mlp", "zzz"), max_size=2),
    ),
    pipeline=st.fixed_dictionaries({"stages": st.integers(1, 3)}),
    backend=one_of("native", "fsdp2"),
    gradient_clipping=one_of(0, 1.0, "auto"),
    train_batch_size=st.integers(1, 16),
    train_micro_batch_size_per_gpu=st.integers(1, 4),
    gradient_accumulation_steps=st.integers(1, 4),
    optimizer=OPTIMIZER,
)
SHAPE = st.lists(st.integers(0, 40), max_size=3).map(tuple)
SOURCE = one_of(DType.FP32, DType.BF16, DType.FP16, DType.FP64, DType.FP8_E4M3)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    parameters = []
    names = st.from_regex(r"[a-c](\.[0-3])?(\.[d-f]){1,2}", fullmatch=True)
    extra = draw(st.lists(names, unique=True, max_size=6))
    for name in [*NAMES, *(e for e in extra if e not in NAMES)]:
        klass = draw(one_of(LINEAR, NORM, EMBEDDING, ""))
        names = (name, f"tied.{name}") if draw(st.booleans()) and name in NAMES else (name,)
        owners = tuple(OwningModule(n.rpartition(".")[0], klass) for n in names)
        trained = draw(st.booleans())
        source = draw(SOURCE if trained else SOURCE | st.just(DType.INT8))
        parameters.append(ParameterSpec(names, draw(SHAPE), source, owners, trained))
    checkpoint = draw(st.dictionaries(st.sampled_from(NAMES), SOURCE, max_size=2))
    buffers = (BufferSpec("inv_freq", (4,), DType.FP32),) if draw(st.booleans()) else ()
    return ModelSpec("drawn", tuple(parameters), buffers, tuple(checkpoint.items()))


def attempt(written: dict[str, Any], model: ModelSpec, world: int) -> Plan | str:
    try:
        return make_plan(written, model, world)
    except ZerodriftError as error:
        assert str(error)
        return str(error)


def for_any(written: st.SearchStrategy[Any], check: Callable[..., None], examples: int) -> None:
    """Check a number of configs, each with a model and a number of ranks."""
    chosen = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    chosen(given(written=written, model=models(), world=st.integers(1, 6))(check))()


@pytest.mark.parametrize("examples", [150, pytest.param(400, marks=pytest.mark.slow)])
def test_a_plan_or_one_of_our_own_errors(examples: int) -> None:
    for_any(CONFIG, a_plan_or_one_of_our_own_errors, examples)


def a_plan_or_one_of_our_own_errors(written: dict[str, Any], model: ModelSpec, world: int) -> None:
    made = attempt(written, model, world)
    assert made == attempt(written, model, world)
    if isinstance(made, str):
        return
    assert find_violations(made) == []
    back = Plan.from_json(json.loads(json.dumps(made.to_json())))
    assert back == made and back.digest == made.digest
    bill = cost(made, 2)
    assert bill.peak.total >= bill.rest.total >= 0
    for stage in range(made.mesh.pipeline):
        for call in collectives(made, stage, 2):
            assert call.segment == -1 or call.numel >= 0


PINS = st.lists(st.just({"match": "*.gate.*", "pin": "fp32"}), max_size=1)
SIMPLE = st.fixed_dictionaries(
    {
        "precision": st.fixed_dictionaries({"mode": MODE}, optional={"rules": PINS}),
        "zero_optimization": st.fixed_dictionaries({"stage": st.integers(0, 3)}),
    }
)


@pytest.mark.parametrize("examples", [100, pytest.param(200, marks=pytest.mark.slow)])
def test_sensible_configs_always_plan(examples: int) -> None:
    for_any(SIMPLE, always_a_plan, examples)


def always_a_plan(written: dict[str, Any], model: ModelSpec, world: int) -> None:
    made = attempt(written, model, world)
    assert isinstance(made, Plan), made
    for row in made.rows:
        assert made.segments[row.segment].padded >= row.offset + row.numel
