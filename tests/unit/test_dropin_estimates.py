"""DeepSpeed's estimates of memory follow its formulas, and its own functions if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import itertools

import pytest
from torch import nn

from zerodrift.deepspeed.runtime.zero import stage3
from zerodrift.deepspeed.tools import estimates


def tied() -> nn.Module:
    """Return a model of 10,000 parameters in a tied embedding, and 100 x 100 + 100 in a layer."""
    model = nn.Sequential(nn.Embedding(100, 100), nn.Linear(100, 100), nn.Linear(100, 100, bias=False))
    model[2].weight = model[0].weight
    return model


def test_tied_weights_count_once() -> None:
    assert estimates._count(tied()) == (20_100, 10_100)


def test_stage_2_by_hand() -> None:
    needs = estimates.estimate_zero2_model_states_mem_needs
    assert needs(1000, 4, 2, cpu_offload=True) == (48_000, 2000)
    assert needs(1000, 4, 2, cpu_offload=False) == (24_000, 2000 + 2250)


def test_stage_3_by_hand() -> None:
    needs = estimates.estimate_zero3_model_states_mem_needs
    assert needs(1000, 100, 4, 2) == (13_500, 400, 400)
    assert needs(1000, 100, 4, 2, cpu_offload_params=False) == (12_000, 400 + 250, 400)
    assert needs(1000, 100, 4, 2, cpu_offload=False, zero_init=False) == (24_000, 400 + 2250, 400)


def test_a_table_names_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    stage3.estimate_zero3_model_states_mem_needs_all_live(tied(), num_gpus_per_node=2)
    told = capsys.readouterr().out
    assert "HW: Setup with 1 node, 2 GPUs per node.\nSW: Model with 0M total params, 0M largest" in told
    assert told.count("zero_init=") == 6 and told.rstrip().endswith("has the bytes of a config.")


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("stage", "module"), [(2, "stage_1_and_2"), (3, "stage3")])
def test_tables_are_deepspeeds(stage: int, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = importlib.import_module(f"deepspeed.runtime.zero.{module}")
    start = f"estimate_zero{stage}_model_states_mem_needs"
    layer = (123_456_789,) if stage == 3 else ()
    for gpus, nodes, buffers in itertools.product((1, 8), (1, 3), (1.0, 1.5)):
        for name, first in ((f"{start}_all_live", (tied(),)), (f"{start}_all_cold", (2_851_000_000, *layer))):
            capsys.readouterr()
            getattr(theirs, name)(*first, gpus, nodes, additional_buffer_factor=buffers)
            # from Python 3.11 on its enum is printed with its name, which its pages do not show
            expected = capsys.readouterr().out.replace("OffloadDeviceEnum.cpu", "cpu ")
            getattr(estimates, name)(*first, gpus, nodes, additional_buffer_factor=buffers)
            assert capsys.readouterr().out.startswith(expected)
