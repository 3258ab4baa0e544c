"""A trace and a real step have the same dtypes at the operations of every parameter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
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

WIDTH = 16


class Odd(nn.Module):
    """A module with pinned and other parameters, which it uses outside of the usual forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, 97, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        shares = nn.functional.linear(hidden, self.router.weight / self.router.weight.norm()).softmax(-1)
        hidden = hidden * shares.sum(-1, keepdim=True).to(hidden.dtype) * self.scale
        hidden = (self.norm(hidden) * self.gain.float()).to(hidden.dtype)
        logits = self.head(hidden).float()
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: architecture.model for name, architecture in ARCHITECTURES.items()},
    **{name: (lambda name=name: build(name)) for name in ("gemma3_text", "mamba2", "olmo2")},
    "odd": Odd,
}
PINS: dict[str, list[str]] = {
    "gpt-oss": ["*.router.*", "*norm*"],
    "qwen3-moe": ["*.mlp.gate.*", "lm_head.weight"],
    "deepseek-v3": ["*.mlp.gate.weight"],
    "llama": ["*layernorm.weight", "*.q_proj.weight"],
    "odd": ["router.*", "attention.out_proj.*", "gain", "scale"],
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


FEW = ["llama", "qwen3-moe", "gemma3_text", "odd"]
CASES = [
    (list(PINS), "bf16", True, "native"),
    (FEW, "autocast-bf16", False, "native"),
    *(pytest.param(list(MODELS), mode, True, "native", marks=pytest.mark.slow) for mode in ("fp32", "fp16")),
    pytest.param(FEW[:-1], "bf16", True, "fsdp2", marks=pytest.mark.slow),
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
