"""Each of DeepSpeed's names in an `optimizer` block becomes an update of ours, with its own defaults."""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

import pytest
import torch
from torch import nn

from zerodrift import optimizers
from zerodrift.deepspeed.initialization import optimizer_over
from zerodrift.deepspeed.tools.optimizers import FusedLion
from zerodrift.errors import UnsupportedError
from zerodrift.optim.flat import algorithm_of, arguments
from zerodrift.optim.updates import Root
from zerodrift.optimizers import Algorithm
from zerodrift.policy.decisions import ComponentSpec

ADAMW, ADAM = optimizers.ADAMW, optimizers.ADAM


def recipe(kind: str, **params: Any) -> ComponentSpec:
    return ComponentSpec(type=kind, params=json.dumps(params))


@pytest.mark.parametrize(
    ("kind", "params", "algorithm", "decay"),
    [
        # DeepSpeed decouples the decay of Adam unless `adam_w_mode` is off.
        ("Adam", {"weight_decay": 0.2}, ADAMW, 0.2),
        ("Adam", {"adam_w_mode": False}, ADAM, 0.0),
        ("AdamW", {}, ADAMW, 0.0),
        ("AdamW", {"torch_adam": True}, ADAMW, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, ADAM, 0.0),
        ("FusedAdam", {"adam_w_mode": False, "weight_decay": 0.3}, ADAM, 0.3),
        ("CPUAdam", {"adam_w_mode": False, "fp32_optimizer_states": True}, ADAM, 0.0),
        ("SGD", {"momentum": 0.9, "nesterov": True}, optimizers.SGD, 0.0),
        ("Lion", {"betas": [0.95, 0.98]}, optimizers.LION, 0.0),
    ],
)
def test_a_block_is_one_of_our_updates(
    kind: str, params: dict[str, Any], algorithm: Algorithm, decay: float
) -> None:
    found, numbers = arguments(recipe(kind, **params))
    assert found is algorithm and numbers["weight_decay"] == decay
    assert all(numbers[key] == params[key] for key in ("momentum", "nesterov", "betas") if key in params)
    assert not {"adam_w_mode", "fp32_optimizer_states"} & numbers.keys()
    # The drop-in passes `model_parameters` in groups; types are read in any case, as in a config.
    made = optimizer_over(kind.lower(), dict(params), [{"params": [nn.Parameter(torch.zeros(2))]}])
    known = algorithm_of(made)
    if algorithm is optimizers.LION:  # which torch does not have
        assert isinstance(made, FusedLion)
    else:
        assert known is not None and known[0] is algorithm
    assert made.param_groups[0]["weight_decay"] == decay


def test_groups_have_updates_of_single_elements_alone() -> None:
    weights = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(UnsupportedError, match=r"`optimizer.params.maximize`: must be left out where"):
        optimizer_over("AdamW", {"maximize": True}, weights)
    with pytest.raises(UnsupportedError, match=r"must be AdamW, Adam, SGD or Lion if"):
        optimizer_over("Muon", {}, weights)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("AdamW", "adam.cpu_adam:DeepSpeedCPUAdam"), ("Lion", "lion.cpu_lion:DeepSpeedCPULion")],
)
def test_what_a_block_leaves_out_is_deepspeeds(kind: str, place: str) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed, which is not installed")
    module, _, name = place.partition(":")
    made = getattr(importlib.import_module(f"deepspeed.ops.{module}"), name)
    theirs = {key: value.default for key, value in inspect.signature(made).parameters.items()}
    _, ours = arguments(recipe(kind))
    assert ours == {key: theirs[key] for key in ours}


def test_which_of_torchs_objects_are_ours() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optim = torch.optim
    assert algorithm_of(optim.AdamW([weight])) == (ADAMW, Root.TORCH)
    assert algorithm_of(optim.AdamW([weight], fused=True)) == (ADAMW, Root.EXACT)
    assert algorithm_of(optim.Adam([weight])) == (ADAM, Root.TORCH)
    assert algorithm_of(optim.Adam([weight], decoupled_weight_decay=True)) == (ADAMW, Root.TORCH)
    assert algorithm_of(optim.SGD([weight], lr=1.0)) == (optimizers.SGD, Root.TORCH)
    for other in (
        optim.NAdam([weight]),
        optim.AdamW([weight], amsgrad=True),
        optim.AdamW([weight], lr=torch.tensor(1e-3), foreach=False, capturable=False),
    ):
        assert algorithm_of(other) is None
