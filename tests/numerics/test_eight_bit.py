"""8-bit moments in an engine: what is written is held, and training works.

That stages have the same bits: `test_stages.py`; numbers of ranks: `test_order.py`; slices: `test_fused.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.numerics.networks import batch
from tests.numerics.runs import config, make, train
from tests.ranks.harness import on_ranks
from zerodrift.optim.rounding import Code, encode
from zerodrift.plan.bill import cost


@on_ranks(1)
def test_a_written_moment_is_the_nearest_that_can_be_held() -> None:
    engine = make(config(0, "bf16", precision={"state": "8bit"}))
    train(engine, 1)
    state = engine.parameter("layers.0.mlp.up.weight").state
    for key, code in (("exp_avg", Code.SIGNED), ("exp_avg_sq", Code.UNSIGNED)):
        wish = torch.randn(64 * 32, generator=torch.Generator().manual_seed(1))
        wish = wish if code is Code.SIGNED else wish.square()
        state[key] = wish.view(64, 32)
        held = state[key].flatten()
        _, scales = encode(code, wish)
        assert torch.equal(held.view(-1, 256).abs().amax(1), scales)
        assert 0 < (held - wish).abs().max() < 0.1 * wish.abs().max()
        state[key] = held.view(64, 32)
        assert torch.equal(state[key].flatten(), held), "settled values are kept"


@pytest.mark.long
@on_ranks(1, timeout=120)
def test_it_learns_as_fp32_moments_do() -> None:
    losses, sizes = [], []
    for state in ("fp32", "8bit"):
        engine = make(config(3, "bf16", precision={"state": state}))
        run = train(engine, 200, data=lambda step, rank, micro: batch(step % 8, rank))
        bill = cost(engine.plan)
        losses.append(sum(run.losses[-20:]) / 20)
        sizes.append(bill.rest.state / (bill.parameters + bill.padding))
        engine.destroy()
    assert losses[0] < 2.5, f"nothing was learned: {losses}"
    assert losses[1] == pytest.approx(losses[0], abs=0.1)
    assert sizes == [8, 2 * (1 + 4 / 256)]
