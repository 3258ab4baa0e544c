"""Real architectures whose weight gradients all wait for the end of the step: the gradients of eager ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.numerics.runs import config, gradients, make
from tests.ranks.harness import on_ranks

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

from tests.models.architectures import ARCHITECTURES, labelled, rules, some
from zerodrift.engine.engine import Engine
from zerodrift.pipeline.deferred import defer_weight_grads

MICRO_BATCHES = 2
EAGER = {"gpt-oss": ("bias", "sinks")}
"""Words in the names of matrices whose gradient comes in the backward: biases of experts are no products."""


def backwards(engine: Engine) -> dict[str, torch.Tensor]:
    for micro in range(MICRO_BATCHES):
        engine.backward(engine(**labelled(micro, engine.mesh.rank())).loss)
    return gradients(engine)


@pytest.mark.parametrize("name", some("llama", "gpt-oss"))
@on_ranks(2)
def test_deferred_gradients_are_the_eager_ones(name: str) -> None:
    written = config(3, "fp32", MICRO_BATCHES, precision={"rules": rules(name)})
    engine = make(written, ARCHITECTURES[name].model())
    expected = backwards(engine)
    engine.destroy()
    engine = make(written, ARCHITECTURES[name].model())
    queue, queued = defer_weight_grads(engine), Counter[int]()
    put = queue.put

    def counted(parameter: torch.Tensor, *rest: Any) -> None:
        queued[id(parameter)] += 1
        put(parameter, *rest)

    queue.put = counted  # type: ignore[method-assign]
    seen = backwards(engine)
    for key, value in expected.items():
        assert float((seen[key] - value).norm()) < 2e-6 * float(value.norm()) + 1e-12, key
    matrices = {n: p for n, p in engine.module.named_parameters() if len(engine.plan.row(n).shape) > 1}
    at_once = [n for n, parameter in matrices.items() if queued[id(parameter)] < MICRO_BATCHES]
    # An embedding is looked up, not multiplied with.
    assert all(any(word in key for word in (*EAGER.get(name, ()), "embed")) for key in at_once), at_once
