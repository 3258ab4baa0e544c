"""Gradients read and written before a step are what it uses, also where replicas have yet to be summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks

Found = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def gradients(stage: int, replicate: int, extra: dict[str, Any]) -> Found:
    """What is read, what is read after every other gradient was doubled, and the masters after a step."""
    blocks = {**extra, "sharding": {"replicate": replicate}, "gradient_clipping": 0.0}
    blocks["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    torch.manual_seed(0)
    engine = make(config(stage, "fp32", 1, **blocks), GPT(layers=1))
    engine.backward(engine(batch(0, engine.mesh.rank())))
    names = [row.name for row in engine.plan.rows]
    read = {name: engine.parameter(name).gradient for name in names}
    for name in names[::2]:
        engine.parameter(name).gradient = 2 * read[name]
    again = {name: engine.parameter(name).gradient for name in names}
    engine.step()
    masters = {name: engine.parameter(name).master for name in names}
    engine.destroy()
    return read, again, masters


PREDIVIDED = {"gradient_predivide_factor": 2.0}


@pytest.mark.parametrize("extra", [{}, PREDIVIDED], ids=["", "predivided"])
@pytest.mark.parametrize("stage", [0, 3])
def test_replicas_read_as_slices_do(stage: int, extra: dict[str, Any]) -> None:
    """Two ranks: a sum of two is the same bits in any order."""
    sliced, replicas = (run_ranks(gradients, 2, stage, count, extra)[0] for count in (1, 2))
    for one, other in zip(sliced, replicas, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)
    read, again, _ = replicas
    doubled = list(read)[::2]
    assert all(torch.equal(again[name], read[name] * (2 if name in doubled else 1)) for name in read)
    assert any(read[name].any() for name in read)


def test_both_at_once() -> None:
    sliced, both = (run_ranks(gradients, 4, 3, count, {})[0] for count in (1, 2))
    for one, other in zip(sliced, both, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-7, msg=name)
