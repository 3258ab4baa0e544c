"""Random configs and models: only the project's own errors, sound plans, values that survive JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.models import EMBEDDING, LINEAR, NORM
from zerodrift import Plan, ZerodriftError, build, cost, load, mesh_for, resolve
from zerodrift.dtypes import DType
from zerodrift.model.spec import BufferSpec, ModelSpec, OwningModule, ParameterSpec
from zerodrift.plan.check import find_violations
from zerodrift.plan.schedule import collectives

pytestmark = pytest.mark.long

DTYPE = st.sampled_from(["fp32", "bf16", "fp16", "float32", "bfloat16", "half"])
FLAG = st.sampled_from([True, False, "auto"])
NAMES = ["layers.0.attn.q.weight", "layers.1.attn.q.weight", "layers.1.mlp.gate.weight", "embed.weight"]
PATTERN = st.sampled_from(["*", "*.gate.*", "layers.*", "embed.weight", "layers.1.*", "*.weight", "none"])
COLUMN = {
    "storage": DTYPE,
    "gather": DTYPE,
    "compute": DTYPE,
    "grad": DTYPE,
    "accumulate": DTYPE,
    "master": st.sampled_from(["fp32", "split", "same"]),
    "state": st.sampled_from(["fp32", "bf16", "bf16-stochastic", "8bit"]),
    "export": DTYPE,
    "reduce": DTYPE
    | st.fixed_dictionaries(
        {}, optional={"wire": DTYPE, "sum": DTYPE, "when": st.sampled_from(["last", "every"])}
    ),
}
RULE = st.fixed_dictionaries(
    {"match": PATTERN},
    optional={
        **COLUMN,
        "class": st.sampled_from(["torch.nn.Linear", "models.RMSNorm"]),
        "pin": st.just("fp32"),
        "output": st.sampled_from(["keep", "input"]),
        "placement": st.sampled_from(["sliced", "matrices", "whole"]),
        "optimizer": st.sampled_from(["Muon", "AdamW"]),
    },
)
PRECISION = st.fixed_dictionaries(
    {},
    optional={
        **COLUMN,
        "mode": st.sampled_from(["auto", "fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16"]),
        "buffers": DTYPE | st.just("keep"),
        "allow_narrow": st.booleans(),
        "rules": st.lists(RULE, max_size=3),
    },
)
CONFIG = st.fixed_dictionaries(
    {},
    optional={
        "precision": PRECISION,
        "bf16": st.fixed_dictionaries(
            {}, optional={"enabled": FLAG, "bf16_master_weights_and_grads": st.booleans()}
        ),
        "fp16": st.fixed_dictionaries(
            {},
            optional={
                "enabled": FLAG,
                "loss_scale": st.sampled_from([0, 1, 1024.0]),
                "hysteresis": st.integers(1, 4),
            },
        ),
        "torch_autocast": st.fixed_dictionaries({}, optional={"enabled": st.booleans(), "dtype": DTYPE}),
        "gradient_accumulation_dtype": DTYPE,
        "data_types": st.fixed_dictionaries({}, optional={"grad_accum_dtype": DTYPE, "param_dtype": DTYPE}),
        "communication_data_type": DTYPE,
        "zero_optimization": st.fixed_dictionaries(
            {},
            optional={
                "stage": st.integers(0, 3),
                "fp32_pinned_parameters": st.lists(st.sampled_from(["gate", "embed", "nope"]), max_size=2),
                "mics_shard_size": st.sampled_from([-1, 1, 2]),
            },
        ),
        "sharding": st.fixed_dictionaries(
            {},
            optional={
                "replicate": st.integers(1, 3),
                "keep_gathered": st.sampled_from(["never", "micro-batch", "step"]),
                "units": st.lists(st.sampled_from(["layers.*", "layers.*.mlp", "zzz"]), max_size=2),
            },
        ),
        "pipeline": st.fixed_dictionaries({"stages": st.integers(1, 3)}),
        "backend": st.sampled_from(["native", "fsdp2"]),
        "gradient_clipping": st.sampled_from([0, 1.0, "auto"]),
        "train_batch_size": st.integers(1, 16),
        "train_micro_batch_size_per_gpu": st.integers(1, 4),
        "gradient_accumulation_steps": st.integers(1, 4),
        "optimizer": st.fixed_dictionaries(
            {"type": st.sampled_from(["AdamW", "SGD", "Lion", "Nope"])},
            optional={"params": st.just({"betas": [0.9, 0.95]}) | st.just({"lr": "auto"})},
        ),
    },
)
SHAPE = st.lists(st.integers(0, 40), max_size=3).map(tuple)
SOURCE = st.sampled_from([DType.FP32, DType.BF16, DType.FP16, DType.FP64, DType.FP8_E4M3])


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    parameters = []
    extra = draw(
        st.lists(st.from_regex(r"[a-c](\.[0-3])?(\.[d-f]){1,2}", fullmatch=True), unique=True, max_size=6)
    )
    for name in [*NAMES, *(e for e in extra if e not in NAMES)]:
        klass = draw(st.sampled_from([LINEAR, NORM, EMBEDDING, ""]))
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
        config = load(written)
        mesh = mesh_for(config, world)
        return build(resolve(config, mesh), model, mesh)
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


SIMPLE = st.fixed_dictionaries(
    {
        "precision": st.fixed_dictionaries(
            {"mode": st.sampled_from(["fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16"])},
            optional={
                "rules": st.lists(
                    st.fixed_dictionaries({"match": st.just("*.gate.*"), "pin": st.just("fp32")}), max_size=1
                )
            },
        ),
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
