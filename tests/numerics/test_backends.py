"""The same plan has the same bits on both backends.

`fully_shard`'s buffers travel through our collectives and torch's fused optimizers compute what ours do, so
losses, norms, weights and moments are compared bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import Run, config, make, train
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.policy.decisions import Mode
from zerodrift.policy.support import table

PINNED = {"rules": [{"match": "*.router.*", "pin": "fp32"}]}


def both(
    stage: int, mode: str, micro: int = 1, moe: bool = False, steps: int = 2, **rest: Any
) -> dict[str, Run]:
    """Run on each backend with the defaults of `fully_shard`: fp32 storage and the order of ranks."""
    precision = {"storage": "fp32", **rest.pop("precision", {})}
    runs = {}
    for backend, order in (("native", {"order": "rank"}), ("fsdp2", {})):
        given = {**precision, "reduce": {**order, **precision.get("reduce", {})}}
        written = config(stage, mode, micro, backend=backend, precision=given, **rest)
        engine = make(written, GPT(moe=moe, layers=1))
        runs[backend] = train(engine, steps, micro)
        engine.destroy()
    return runs


Case = tuple[int, str, int, bool, dict[str, Any]]
"""(stage, mode, micro-batches, whether with experts, other keys of the config)."""


def compared(cases: list[Case]) -> list[str]:
    found = []
    for stage, mode, micro, moe, rest in cases:
        runs = both(stage, mode, micro, moe, **rest)
        found += [f"{stage} {mode} {rest}: {what}" for what in differs(runs["native"], runs["fsdp2"])]
    return found


def differs(native: Run, fsdp2: Run) -> list[str]:
    """List the differences in bits; norms may differ in the last place of fp64.

    The norm is an exact sum of the square sums of blocks; where `fully_shard` cuts a block, its two parts
    are rounded by themselves.
    """
    assert fsdp2.norms == pytest.approx(native.norms, rel=1e-15, nan_ok=True)
    return native.differs(dataclasses.replace(fsdp2, norms=native.norms))


# --- every cell of the support table ------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.cells(1)
@pytest.mark.parametrize("mode", [str(mode) for mode in Mode])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2, timeout=240)
def test_every_supported_cell_is_the_native_bits(stage: int, mode: str) -> list[str]:
    """Every other cell is refused in `unit/test_support.py`."""
    found = []
    for cell in table():
        if (cell.backend, cell.mode, cell.stage) != ("fsdp2", mode, stage) or cell.status == "no":
            continue
        assert not cell.pipeline
        precision: dict[str, Any] = {"allow_narrow": cell.status == "narrow"}
        if cell.accumulate != "default":
            precision["accumulate"] = cell.accumulate
        runs = both(stage, mode, 2, steps=1, precision=precision)
        assert all(torch.isfinite(torch.tensor(runs["fsdp2"].losses)))
        found += [f"{cell}: {what}" for what in differs(runs["native"], runs["fsdp2"])]
    return found


# --- parity beyond the cells --------------------------------------------------------------------------


REPLICAS = {"sharding": {"replicate": 2}}
LAST, EVERY = {"when": "last"}, {"when": "every"}
WIRES = ({"wire": "bf16", **EVERY}, {"wire": "bf16", "sum": "bf16", **LAST}, {"wire": "fp32", **LAST})
AVERAGES = (
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 2.0},
    {"gradient_allreduce_op": "sum"},
)
OPTIMIZERS = (
    {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.1}},
    {"type": "SGD", "params": {"lr": 0.1}},
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}},
)
KEEP = ("micro-batch", "step")
EXPERTS: list[Case] = [
    (stage, mode, 2, True, {"precision": PINNED})
    for stage, mode in ((0, "fp32"), (1, "bf16"), (3, "autocast-bf16"))
]
WAYS: dict[str, tuple[int, list[Case]]] = {
    "one rank": (1, [(3, "bf16", 2, False, {})]),
    "replicas": (4, [(stage, "bf16", micro, False, REPLICAS) for stage, micro in ((3, 1), (1, 2))]),
    "wires": (2, [(3, "bf16", 2, False, {"precision": {"reduce": wire}}) for wire in WIRES]),
    "how long units stay": (2, [(3, "bf16", 2, False, {"sharding": {"keep_gathered": k}}) for k in KEEP]),
    "averages": (2, [(stage, "fp32", 2, False, way) for way, stage in zip(AVERAGES, (0, 3, 0), strict=True)]),
    "optimizers": (2, [(3, "bf16", 1, False, {"optimizer": optimizer}) for optimizer in OPTIMIZERS]),
    # Experts that get no token on one rank only, too: the four of them share twelve tokens.
    "experts with pinned routers": (2, EXPERTS),
}
"""Name -> ranks, and cases beyond the cells."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "one rank")) for name in WAYS]
)
def test_every_way_is_the_native_bits(name: str) -> None:
    ranks, cases = WAYS[name]
    for rank, differences in enumerate(run_ranks(compared, ranks, cases, timeout=240)):
        assert differences == [], f"rank {rank}"


# --- the loop -----------------------------------------------------------------------------------------


def loops(backend: str) -> list[list[float]]:
    """Return losses and norms of loops in which a careless engine loses an average."""
    found = []
    for kind in KINDS:
        model = GPT(layers=1)
        part = torch.optim.SGD(model.layers.parameters(), 0.1) if kind == "a part" else None
        written = config(3, "bf16", 2, backend=backend, precision={"storage": "fp32"})
        engine = make(written, model, optimizer=part)
        found.append([number for step in range(2) for number in _loop(kind, engine, step)])
        engine.destroy()
    return found


class _Interrupted(Exception):  # noqa: N818 (raised on purpose)
    pass


def _interrupt(gradient: torch.Tensor) -> None:
    raise _Interrupted


def _loop(kind: str, engine: Any, step: int) -> list[float]:
    rank = engine.mesh.rank("data")
    first, second = batch(step, rank, 0), batch(step, rank, 1)
    losses: list[torch.Tensor] = []

    def train_on(*several: torch.Tensor) -> None:
        for tokens in several:
            losses.append(engine(tokens))
            engine.backward(losses[-1])

    if kind == "no_sync":
        with engine.no_sync():  # the last one is not synchronised either: `step` must do it
            train_on(first, second)
    elif kind == "two at once":
        losses += [engine(first), engine(second)]
        for loss in losses:
            engine.backward(loss)
    elif kind == "evaluated between":
        train_on(first)
        with torch.no_grad():
            losses.append(engine.eval()(second))
        engine.train()
        train_on(second)
        with torch.no_grad():
            losses.append(engine(first))  # leaves the root gathered, of values that are about to change
    else:
        if kind == "failed" and step == 1:
            output = engine(first)
            output.register_hook(_interrupt)
            with pytest.raises(_Interrupted):
                engine.backward(output)
            with pytest.raises((TypeError, RuntimeError, AttributeError)):
                engine("not tokens")
        train_on(first, second)
    result = engine.step()
    assert result.updated, kind
    # The norm to 14 digits, see `differs`.
    return [float(loss.detach()) for loss in losses] + [float(f"{result.grad_norm:.14g}")]


KINDS = ("no_sync", "two at once", "evaluated between", "failed", "a part")


@pytest.mark.long
@on_ranks(2, timeout=240)
def test_no_average_is_lost() -> bool:
    return loops("native") != loops("fsdp2")
