"""Frozen parameters that rest in a narrow format: nothing but the format rounds them."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.networks import GPT
from tests.numerics.runs import Run, config, make, require_alike, train
from tests.ranks.harness import on_ranks
from zerodrift.dtypes import ADMITTED, SHORT, DType
from zerodrift.kernels import narrow

FORMATS = {next((word for word in SHORT if SHORT[word] is d), str(d)): d for d in ADMITTED["frozen"]}


def adapted(decoded: DType | None = None) -> GPT:
    """A GPT with frozen linear layers, which hold what a format leaves of them if one is named."""
    torch.manual_seed(0)
    model = GPT(moe=True)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "head":
            module.weight.requires_grad_(False)
            if decoded is not None:
                module.weight.copy_(narrow.round_trip(decoded, module.weight))
    return model


def run(stage: int, mode: str, frozen: str | None, decoded: DType | None = None) -> Run:
    written = config(stage, mode, 2, precision={"frozen": frozen})
    return train(make(written, adapted(decoded)), 3, 2)


@pytest.mark.cells(1)
@pytest.mark.parametrize("frozen", FORMATS)
@pytest.mark.parametrize("mode", ["bf16", "autocast-bf16", "fp32"])
@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks("world", timeout=200)
def test_a_run_has_the_bits_of_one_on_decoded_values_at_every_stage(
    world: int, mode: str, frozen: str
) -> None:
    for stage in range(4):
        plain = run(stage, mode, None, FORMATS[frozen])
        require_alike(run(stage, mode, frozen), plain)
    assert run(0, mode, None).losses != plain.losses
