"""Declared against observed on backend fsdp2: what `fully_shard` does is what the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks
from tests.ranks.test_observe import PIN, UP, is_found, judged, plant, watched
from zerodrift.backends.fsdp_collectives import ReduceScatter
from zerodrift.dtypes import DType
from zerodrift.inspect.trace.libraries.engine import observe
from zerodrift.policy.nouns import Reduction

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


@pytest.mark.parametrize(
    ("stage", "mode", "rest", "line", "unseen"), ON_FSDP2, ids=lambda v: v if isinstance(v, str) else None
)
def test_fsdp2_is_seen_in_every_column(
    stage: int, mode: str, rest: dict[str, Any], line: str, unseen: set[str]
) -> None:
    rest = {**rest, "backend": "fsdp2"}
    for told, found, missing in run_ranks(watched, 2, stage, mode, rest):
        assert found == []
        assert told == f"precision: backend=fsdp2 storage=float32 {line} master=same state=float32"
        assert missing == unseen


def test_copies_of_a_sharded_model_are_seen_on_both_axes() -> None:
    rest = {"backend": "fsdp2", "sharding": {"replicate": 2}, "precision": {"reduce": "bf16"}}
    for told, found, missing in run_ranks(watched, 4, 3, "bf16", rest):
        assert found == [] and missing == set()
        assert "reduce=bfloat16>float32" in told


# --- planted: each is found, by name --------------------------------------------------------------------


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


FSDP2 = ["compute", "grad", "accumulate", "reduce", "state", "wider compute", "wider grad"]


@pytest.mark.parametrize("what", FSDP2)
def test_what_is_not_as_declared_is_found_on_fsdp2_unless_it_is_wider(what: str) -> None:
    for found, told in run_ranks(planted_on_fsdp2, 2, what):
        is_found(what, found, told)
        assert {name.rpartition(".mlp.")[0] for name, _ in found if ".mlp." in name} <= {"layers.0"}
