"""A trace and a real step have the same dtypes at the operations of every parameter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

from torch import nn

from tests.models.architectures import ARCHITECTURES, since, tokens
from tests.models.test_precision import build
from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks
from zerodrift.dtypes import DType
from zerodrift.inspect.check.compare import computes
from zerodrift.inspect.trace.dry_run import trace
from zerodrift.inspect.trace.engine import observe
from zerodrift.model.inputs import Inputs

MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: architecture.model for name, architecture in ARCHITECTURES.items()},
    **{name: (lambda name=name: build(name)) for name in ("gemma3_text", "mamba2", "olmo2")},
}
PINS: dict[str, list[str]] = {
    "gpt-oss": ["*.router.*", "*norm*"],
    "qwen3-moe": ["*.mlp.gate.*", "lm_head.weight"],
    "deepseek-v3": ["*.mlp.gate.weight"],
    "llama": ["*layernorm.weight", "*.q_proj.weight"],
    "mamba2": ["*.A_log", "*.D"],
}


def both(names: list[str], mode: str, pinned: bool, backend: str) -> dict[str, tuple[Any, Any]]:
    """Return, for each model, the observation of a step and the trace of the same plan."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        model = MODELS[name]()
        rules = [{"match": glob, "pin": "fp32"} for glob in PINS.get(name, ())] if pinned else []
        twin = copy.deepcopy(model).train()
        engine = make(config(3, mode, precision={"rules": rules}, backend=backend), model)
        ids = tokens(0)
        with observe(engine) as seen:
            engine.backward(engine(input_ids=ids, labels=ids)["loss"])
            engine.step()
        traced = computes(trace(engine.plan, twin, Inputs((), {"input_ids": ids, "labels": ids})))
        rows = [row.name for row in engine.plan.rows]
        observed = {name: sorted(seen.seen(name, "compute")) for name in rows}
        names_of = {name: [str(DType(word).torch) for word in traced.get(name, ())] for name in rows}
        found[name] = (
            observed,
            {key: sorted(w.removeprefix("torch.") for w in v) for key, v in names_of.items()},
        )
        engine.destroy()
    return found


FEW = ["llama", "qwen3-moe", "gemma3_text"]
CASES = [
    (list(PINS), "bf16", True, "native"),
    (FEW, "autocast-bf16", False, "native"),
    *(pytest.param(list(MODELS), mode, True, "native", marks=pytest.mark.slow) for mode in ("fp32", "fp16")),
    pytest.param(FEW, "bf16", True, "fsdp2", marks=pytest.mark.slow),
]


@since("5.20")  # older ones loop over experts by what they were given
@pytest.mark.parametrize(("names", "mode", "pinned", "backend"), CASES)
def test_every_parameter_computes_in_what_a_real_step_shows(
    names: list[str], mode: str, pinned: bool, backend: str
) -> None:
    (found,) = run_ranks(both, 1, names, mode, pinned, backend, timeout=240.0)
    for name, (observed, told) in found.items():
        assert told == observed, name
        assert all(observed.values()), name
