"""The same plan has the same bits on both backends.

`fully_shard`'s buffers travel through our collectives and torch's fused optimizers compute what ours do, so
losses, norms, weights and moments are compared bit for bit. Where a part of a parameter on a rank is no
multiple of torch's vectors, torch's own fused update differs from itself in the last place; see
`test_a_part_that_is_no_multiple_of_a_vector`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
    for stage in (0, 1, 3)
    for mode in ("fp32", "bf16", "autocast-bf16")
]
WAYS: dict[str, tuple[int, list[Case]]] = {
    "one rank": (1, [(3, "bf16", 2, False, {})]),
    "four ranks": (4, [(stage, "bf16", 1, False, {}) for stage in (0, 3)]),
    "replicas": (4, [(stage, "bf16", micro, False, REPLICAS) for stage, micro in ((3, 1), (1, 2))]),
    "wires": (2, [(3, "bf16", 2, False, {"precision": {"reduce": wire}}) for wire in WIRES]),
    "how long units stay": (2, [(3, "bf16", 2, False, {"sharding": {"keep_gathered": k}}) for k in KEEP]),
    "averages": (2, [(stage, "fp32", 2, False, way) for way, stage in zip(AVERAGES, (0, 3, 0), strict=True)]),
    "optimizers": (2, [(3, "bf16", 1, False, {"optimizer": optimizer}) for optimizer in OPTIMIZERS]),
    # Experts that get no token on one rank only, too: the four of them share twelve tokens.
    "experts with pinned routers": (2, [EXPERTS[number] for number in (0, 4, 8)]),
    "experts with pinned routers, the rest": (2, [EXPERTS[number] for number in (1, 2, 3, 5, 6, 7)]),
}
"""Name -> ranks, and cases beyond the cells."""


QUICK = ("one rank", "how long units stay", "experts with pinned routers")
MARKS = {name: pytest.mark.long for name in WAYS if name not in QUICK}
MARKS["experts with pinned routers, the rest"] = pytest.mark.slow  # each stage and each mode is in the others


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in WAYS])
def test_every_way_is_the_native_bits(name: str) -> None:
    ranks, cases = WAYS[name]
    for rank, differences in enumerate(run_ranks(compared, ranks, cases, timeout=240)):
        assert differences == [], f"rank {rank}"


@on_ranks(2)
def test_a_part_that_is_no_multiple_of_a_vector() -> None:
    """torch's fused AdamW rounds the last elements of a tensor otherwise than the first: parts of five and
    two rows differ from ours in the last place at most."""

    def rows(step: int, rank: int, micro: int) -> torch.Tensor:
        return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))

    native, fsdp2 = (
        train(make(config(3, "fp32", backend=backend), _Odd()), 3, data=rows)
        for backend in ("native", "fsdp2")
    )
    off = [((fsdp2.masters[n] - m).abs() / m.abs().clamp(min=1e-3)).max() for n, m in native.masters.items()]
    assert native.losses == pytest.approx(fsdp2.losses, rel=1e-6)
    assert max(off) < 1e-6


class _Odd(torch.nn.Module):
    """A model with dimensions that two ranks cannot share, down to one that leaves a rank nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(7, 5), torch.nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


# --- the loop -----------------------------------------------------------------------------------------


def loops(backend: str, stage: int, kinds: Sequence[str], replicate: int) -> list[list[float]]:
    """Return losses and norms of loops in which a careless engine loses an average."""
    found = []
    keys: dict[str, Any] = {"precision": {"storage": "fp32"}}
    keys |= {"sharding": {"replicate": replicate}} if replicate > 1 else {}
    for kind in kinds:
        engine = make(config(stage, "bf16", 2, backend=backend, **keys), GPT(layers=1))
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
    elif kind == "late boundary":
        engine.progress.boundary = False
        train_on(first, second, first)
        engine.progress.boundary = True
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
    elif kind == "failed":
        if step == 1:
            output = engine(first)
            output.register_hook(_interrupt)
            with pytest.raises(_Interrupted):
                engine.backward(output)
            with pytest.raises((TypeError, RuntimeError, AttributeError)):
                engine("not tokens")
        train_on(first, second)
    result = engine.step()
    engine.progress.boundary = None
    assert result.updated, kind
    # The norm to 14 digits, see `differs`.
    return [float(loss.detach()) for loss in losses] + [float(f"{result.grad_norm:.14g}")]


KINDS = ("no_sync", "late boundary", "two at once", "evaluated between", "failed")


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "stage", "kinds"),
    [
        (2, 3, KINDS),
        (4, 3, KINDS[:3]),
        *(pytest.param(2, stage, KINDS, marks=pytest.mark.slow) for stage in (0, 1)),
    ],
)
@on_ranks("world", timeout=240)
def test_no_average_is_lost(world: int, stage: int, kinds: Sequence[str]) -> bool:
    """Four ranks are two replicas of slices."""
    return loops("native", stage, kinds, world // 2) != loops("fsdp2", stage, kinds, world // 2)


def overflowing(backend: str, power: int, steps: int) -> list[Any]:
    """Train in fp16 with a scale that overflows first."""
    rest = {"precision": {"storage": "fp32"}, "fp16": {"initial_scale_power": power, "hysteresis": 1}}
    engine = make(config(3, "fp16", 1, backend=backend, **rest), GPT(layers=1))
    found: list[Any] = []
    for step in range(steps):
        loss = engine(batch(step, engine.mesh.rank("data")))
        engine.backward(loss)
        result = engine.step()
        found.append((result.updated, result.skipped, result.loss_scale, result.step, len(result.bad) > 0))
    assert engine.skipped_steps + engine.global_steps == steps
    return [*found, float(loss.detach())]


@pytest.mark.long
@pytest.mark.parametrize(("power", "steps"), [(22, 12), pytest.param(40, 30, marks=pytest.mark.slow)])
@on_ranks(2, timeout=120)
def test_the_loss_scale_and_skipped_steps(power: int, steps: int) -> None:
    native, fsdp2 = (overflowing(backend, power, steps) for backend in ("native", "fsdp2"))
    assert native == fsdp2
    assert any(skipped for _, skipped, *_ in fsdp2[:-1]) and any(updated for updated, *_ in fsdp2[:-1])
