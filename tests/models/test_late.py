"""Real architectures whose weight gradients all wait for the end of the step: the gradients of eager ones."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

from tests.models.architectures import ARCHITECTURES, some, tokens
from zerodrift.engine.engine import Engine
from zerodrift.pipeline.deferred import defer_weight_grads

MICRO_BATCHES = 2
EAGER = {
    "llama": (),
    # Its biases of stacked experts are no products: they come at once, beside deferred weights.
    "gpt-oss": ("bias", "sinks"),
    "qwen3-moe": (),
    "deepseek-v3": (),
}
"""Words in the names of matrices whose gradient comes with the backward."""


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    for micro in range(MICRO_BATCHES):
        ids = tokens(micro, engine.mesh.rank())
        engine.backward(engine(input_ids=ids, labels=ids).loss)
    return {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}


def late_against_eager(name: str, stage: int) -> tuple[list[str], list[str]]:
    """Parameters whose gradient is another one, and matrices that did not come late."""
    architecture = ARCHITECTURES[name]
    rules = [{"match": architecture.routers, "pin": "fp32"}] if architecture.routers else []
    found = []
    for late in (False, True):
        engine = make(config(stage, "fp32", MICRO_BATCHES, precision={"rules": rules}), architecture.model())
        queue = defer_weight_grads(engine) if late else None
        queued: list[torch.Tensor] = []
        if queue is not None:
            put = queue.put
            queue.put = lambda *given, put=put, queued=queued: (queued.append(given[0]), put(*given))[1]  # type: ignore
        found.append(gradients(engine))
        if queue is not None:
            parameters = dict(engine.module.named_parameters())
            at_once = {
                row.name
                for row in engine.plan.rows
                if len(row.shape) > 1 and sum(each is parameters[row.name] for each in queued) < MICRO_BATCHES
            }
        engine.destroy()
    expected, seen = found
    wrong = [
        name
        for name, value in expected.items()
        if float((seen[name] - value).norm()) > 2e-6 * float(value.norm()) + 1e-12
    ]
    return wrong, sorted(at_once)


@pytest.mark.parametrize("name", some("llama", "gpt-oss"))
def test_deferred_gradients_are_the_eager_ones(name: str) -> None:
    for stage in (0, 3):
        for wrong, at_once in run_ranks(late_against_eager, 2, name, stage):
            assert wrong == []
            left = [matrix for matrix in at_once if not any(word in matrix for word in EAGER[name])]
            # An embedding is looked up, not multiplied with.
            assert all("embed" in matrix for matrix in left), left
