"""Muon with AdamW has torch's own bits for every master scheme and slicing; `test_stages.py` has its runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT
from tests.numerics.pieces import Values, flat, gathered, owned
from tests.numerics.runs import config
from tests.numerics.test_products import stacked
from zerodrift.api import make_plan
from zerodrift.optim import learning_rates, muon
from zerodrift.optim.muon import MuonHyper
from zerodrift.optim.offload import make_updater
from zerodrift.plan.table import Plan

PARAMS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adam_lr": 3e-3, "betas": [0.9, 0.95]}


def network() -> GPT:
    """Return a GPT with stacked experts and an untied head."""
    return stacked(layers=2, tied=False)


def config_of(stage: int, mode: str, **rest: Any) -> dict[str, Any]:
    return config(stage, mode, 1, optimizer={"type": "Muon", "params": PARAMS}, **rest)


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the definition -----------------------------------------------------------------------------------


@pytest.mark.cells(2)
@pytest.mark.parametrize("shape", [(24, 48), (48, 24), (1, 16)])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_one_matrix_is_torchs_bit_for_bit(shape: tuple[int, int], adjust: str | None, nesterov: bool) -> None:
    """torch and zerodrift have the same defaults."""
    generator = torch.Generator().manual_seed(2)
    theirs = nn.Parameter(torch.randn(shape, generator=generator))
    mine, moment = theirs.detach().clone()[None], torch.zeros(1, *shape)
    plain = torch.optim.Muon([theirs], adjust_lr_fn=adjust, nesterov=nesterov)
    numbers = MuonHyper(nesterov=nesterov, adjust_lr_fn=adjust or "original")  # type: ignore[arg-type]
    for _ in range(5):
        gradient = torch.randn(shape, generator=generator)
        theirs.grad = gradient.clone()
        plain.step()
        muon.advance(numbers, mine, muon.direction(numbers, moment, gradient[None]))
        assert torch.equal(mine[0], theirs.detach())
    assert torch.equal(moment[0], plain.state[theirs]["momentum_buffer"])


@pytest.mark.parametrize(("dtype", "within"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_newton_schulz_against_the_polynomial_on_singular_values(dtype: Any, within: float) -> None:
    """The fp64 reference passes each singular value through the quintic and keeps the vectors."""
    matrix = torch.randn(20, 30, generator=torch.Generator().manual_seed(3))
    numbers = MuonHyper(ns_dtype=dtype)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / matrix.double().norm()
    a, b, c = numbers.ns_coefficients
    for _ in range(numbers.ns_steps):
        values = a * values + b * values**3 + c * values**5
    expected = left @ torch.diag(values) @ right
    found = muon.orthogonal(matrix, numbers).double()
    assert (found - expected).abs().max() < within
    assert values.min() > 0.3 and values.max() < 1.3


# --- the updater, rank by rank, without ranks ---------------------------------------------------------


def initial(plan: Plan) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {row.name: torch.randn(row.shape, generator=generator) for row in plan.rows}


def gradients(plan: Plan, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {row.name: torch.randn(row.shape, generator=generator) * 1e-2 for row in plan.rows}


def updated(
    world: int, mode: str, steps: int = 4, **precision: Any
) -> tuple[Plan, Values, Mapping[str, Values]]:
    """Return masters and moments after some updates on `world` ranks, run one after the other."""
    rest = {"precision": precision} if precision else {}
    plan = make_plan(config_of(3, mode, **rest), network(), world)
    masters, states = [], []
    for rank in range(world):
        pieces = owned(plan, initial(plan), rank)
        updater = make_updater(plan, pieces, None, {})
        for step in range(steps):
            values = gradients(plan, step)
            updater.update({p.number: flat(plan, p.number, values, rank) for p in pieces}, 0.5)
        masters.append({piece.number: updater.master(piece.number) for piece in pieces})
        states.append({piece.number: updater.states(piece.number) for piece in pieces})
    keys = dict.fromkeys(key for held in states[0].values() for key in held)
    by_key = {}
    for key in keys:
        parts = [
            {n: held.get(key, torch.zeros_like(masters[0][n])) for n, held in part.items()} for part in states
        ]
        by_key[key] = gathered(plan, parts)
    return plan, gathered(plan, masters), by_key


def plain(plan: Plan, steps: int = 4) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return values and Muon's moments of `torch.optim.Muon` and fused `AdamW` over fp32 parameters."""
    values, matrices, rest = initial(plan), {}, {}
    for row in plan.rows:
        if row.columns.options()["optimizer"] == "Muon":
            stack = values[row.name].view(-1, *row.shape[-2:])
            matrices[row.name] = [nn.Parameter(matrix.clone()) for matrix in stack]
        else:
            rest[row.name] = nn.Parameter(values[row.name].clone())
    both = (
        torch.optim.Muon([p for held in matrices.values() for p in held], lr=PARAMS["lr"], weight_decay=0.1),
        torch.optim.AdamW(
            rest.values(), lr=PARAMS["adam_lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True
        ),
    )
    for step in range(steps):
        for name, gradient in gradients(plan, step).items():
            if name in rest:
                rest[name].grad = gradient * 0.5
            else:
                shape = (-1, *gradient.shape[-2:])
                for parameter, part in zip(matrices[name], gradient.view(shape), strict=True):
                    parameter.grad = part * 0.5
        for optimizer in both:
            optimizer.step()
    state = both[0].state
    found = {name: parameter.detach() for name, parameter in rest.items()}
    moments = {}
    for name, held in matrices.items():
        shape = values[name].shape
        found[name] = torch.stack([parameter.detach() for parameter in held]).view(shape)
        moments[name] = torch.stack([state[parameter]["momentum_buffer"] for parameter in held]).view(shape)
    return found, moments


@pytest.mark.cells(1)
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize(
    ("mode", "precision"),
    [("fp32", {}), ("bf16", {"master": "split"}), ("bf16", {"master": "fp32"}), ("fp16", {})],
    ids=["same", "split", "fp32", "fp16"],
)
def test_masters_are_torchs_bits_in_every_scheme(world: int, mode: str, precision: dict[str, Any]) -> None:
    """The last elements, which AdamW's fused loop rounds otherwise, are left out: see [Note: roots]."""
    plan, masters, states = updated(world, mode, **precision)
    theirs, moments = plain(plan)
    assert plan.mesh.shard == world
    for row in plan.rows:
        head = row.numel // 16 * 16 if row.columns.options()["optimizer"] == "AdamW" else row.numel
        mine, expected = masters[row.name].reshape(-1), theirs[row.name].reshape(-1)
        assert torch.equal(mine[:head], expected[:head]), row.name
    for name, moment in moments.items():
        assert torch.equal(states["momentum_buffer"][name], moment), name


# --- the config's block -------------------------------------------------------------------------------


def test_deepspeeds_keys_reach_the_groups() -> None:
    """`lr` and `weight_decay` reach both groups; `muon_lr` and `adam_lr` override `lr`."""

    def groups(**params: Any) -> list[dict[str, Any]]:
        plan = make_plan({"optimizer": {"type": "Muon", "params": params}}, network())
        updater = make_updater(plan, owned(plan, initial(plan), 0), None, {})
        assert learning_rates(updater) == tuple(group["lr"] for group in updater.groups.param_groups)
        return updater.groups.param_groups

    first, second = groups(
        lr=0.5, adam_lr=0.25, weight_decay=0.125, momentum=0.75, eps=1e-6, betas=[0.5, 0.6]
    )
    assert (first["lr"], first["weight_decay"], first["momentum"]) == (0.5, 0.125, 0.75)
    assert (second["lr"], second["weight_decay"], second["eps"]) == (0.25, 0.125, 1e-6)
    assert list(second["betas"]) == [0.5, 0.6] and first["ns_eps"] == 1e-7
    first, second = groups(muon_lr=0.5)
    assert (first["lr"], second["lr"]) == (0.5, 1e-3)
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.01), "torch's defaults of each"
