"""The Triton programs against the CPU's kernels: the same bits in every scheme.

These tests run on an accelerator, and on a CPU in Triton's interpreter, which `TRITON_INTERPRET=1` chooses
before Triton is imported: `tests/numerics/test_triton.py` runs this file so. There, as on the stand-in, a
program takes a while, so the products are thinner and the tiles larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.device.programs import INTERPRETED, round_once
from tests.gpu import device as place
from tests.numerics import test_formats
from tests.numerics.networks import GPT
from tests.numerics.pieces import owned
from tests.numerics.runs import config
from tests.numerics.test_fused import (
    BLOCKS,
    GRADIENTS,
    LENGTHS,
    MASTERS,
    assert_equal,
    generator,
    gradient_of,
    of_length,
    special,
    usual,
    without_moments,
)
from tests.unit.test_squares import one_by_one
from zerodrift import optimizers
from zerodrift.api import make_plan
from zerodrift.dtypes import DType
from zerodrift.kernels import device, native, squares
from zerodrift.kernels.digests import BYTES, prints, reference_prints
from zerodrift.kernels.squares import block_square_sums, reference_square_sums
from zerodrift.optim import fused
from zerodrift.optim.fused import update_on_device
from zerodrift.optim.offload import make_updater
from zerodrift.optim.schemes import Scheme, SliceTensors, allocate
from zerodrift.optim.updates import Hyper, UpdateStep, room_for_statistics
from zerodrift.optimizers import ELEMENTWISE, Algorithm
from zerodrift.policy.decisions import Master, State

pytest.importorskip("triton")
IS_ON_CPU = INTERPRETED and not place.IS_STANDIN
CPU = torch.device("cpu")
DEVICE = CPU if IS_ON_CPU else place.DEVICE
pytestmark = [] if IS_ON_CPU else place.needs_accelerator


if INTERPRETED:
    round_once()


def schemes(states: Sequence[State]) -> list[tuple[Scheme, torch.dtype]]:
    """Return every scheme with gradients of every dtype; in the interpreter, of one dtype in turn."""
    found = [Scheme(*master, state) for master, state in itertools.product(MASTERS, states)]
    if INTERPRETED:
        return list(zip(found, itertools.cycle(GRADIENTS), strict=False))
    return list(itertools.product(found, GRADIENTS))


def moved(of: SliceTensors, where: torch.device) -> SliceTensors:
    """Copy a slice to a device."""

    def copied(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(copied, value))
        return value.to(where, copy=True) if isinstance(value, torch.Tensor) else value

    return SliceTensors(**{field.name: copied(getattr(of, field.name)) for field in fields(of)})


def check_steps(here: SliceTensors, gradients: list[torch.Tensor], steps: list[UpdateStep]) -> None:
    """Compare each step on the CPU and on the device."""
    there = moved(here, DEVICE)
    for gradient, step in zip(gradients, steps, strict=True):
        fused.update(here, gradient, step)
        update_on_device(there, gradient.to(DEVICE), step)
        assert_equal(here, moved(there, CPU), f"{here.scheme} {gradient.dtype} {step}")


@pytest.mark.cells(1)
@pytest.mark.parametrize("algorithm", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("state", State, ids=str)
def test_programs_equal_the_cpu_kernels(algorithm: Algorithm, state: State) -> None:
    for scheme, dtype in schemes([state]):
        check_steps(*usual(scheme, algorithm, dtype))


@pytest.mark.parametrize("algorithm", ELEMENTWISE, ids=str)
def test_statistics_equal_and_change_nothing(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerodrift.optim.fused.COUNTED_BLOCKS", 4)
    states = (State.EIGHT_BIT,) if INTERPRETED else (State.FP32, State.EIGHT_BIT)
    for each, _ in schemes(states)[:: 2 if INTERPRETED else 3]:
        here, gradients, steps = usual(each, algorithm, torch.float32)
        there, silent = moved(here, DEVICE), moved(here, DEVICE)
        mine, theirs = room_for_statistics(BLOCKS), room_for_statistics(BLOCKS, DEVICE)
        for gradient, step in zip(gradients, steps, strict=True):
            fused.update(here, gradient, step, mine)
            update_on_device(there, gradient.to(DEVICE), step, theirs)
            update_on_device(silent, gradient.to(DEVICE), step)
            assert torch.equal(mine, theirs.cpu()), each
            assert_equal(here, moved(there, CPU))
            assert_equal(here, moved(silent, CPU))


def test_special_values_and_sgd_without_a_moment() -> None:
    check_steps(*without_moments(State.FP32))
    for turn, (scheme, _) in enumerate(schemes(tuple(State))[::3]):
        for algorithm in ELEMENTWISE[turn % 2 :: 2] if INTERPRETED else ELEMENTWISE:
            check_steps(*special(scheme, algorithm))


@pytest.mark.parametrize("numel", [*LENGTHS, 256 * 4 + 1])
def test_any_length(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "TILE", 2)
    monkeypatch.setattr(device, "TILE_8BIT", 2)
    for state, dtype in itertools.product((State.FP32, State.EIGHT_BIT), GRADIENTS):
        check_steps(*of_length(numel, state, dtype))


def test_a_second_moment_under_the_normal_numbers() -> None:
    """No root or quotient takes a subnormal for zero: eps is smaller still."""
    scheme = Scheme(DType.FP32, Master.SAME, State.FP32)
    here = allocate(scheme, torch.zeros(512), 2)
    step = UpdateStep(optimizers.ADAMW, (Hyper(1e-3, 1, (0.9, 0.999), 0.0),), 1)
    gradient = torch.full((512,), 1e-18)
    check_steps(here, [gradient], [step])
    assert (here.storage != 0).all() and (here.moments[1] < 2.0**-126).all()


@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
def test_square_sums(dtype: torch.dtype) -> None:
    for numel in (1, 255, 256, 1000, 256 * 33):
        flat = gradient_of(numel, 1, dtype)
        out = torch.empty(-(-numel // 256), dtype=torch.float64, device=DEVICE)
        assert torch.equal(device.squares(flat.to(DEVICE), out).cpu(), reference_square_sums(flat))
    flat[300] = torch.inf
    flat[3000] = torch.nan
    sums = block_square_sums(flat.to(DEVICE)).cpu()
    assert sums.isfinite().sum() == 31 and sums[1] == torch.inf and sums[11].isnan()


@pytest.mark.parametrize("count", [1, 255, 3000])
def test_digits(count: int) -> None:
    """Sums of every size, zeros, subnormals and non-finite values are added to existing digits."""
    exponents = torch.randint(-1074, 1024, (count,), generator=generator(2))
    numbers = torch.ldexp(torch.rand(count, generator=generator(3), dtype=torch.float64), exponents)
    numbers[::7], numbers[3::50], numbers[5::90] = 0.0, torch.inf, torch.nan
    want = torch.arange(squares.DIGITS + 1)
    found = want.to(DEVICE, copy=True)
    squares.reference_digits(numbers, want)
    device.digits(numbers.to(DEVICE), found, squares.LOWEST)
    assert torch.equal(found.cpu(), want) and (count < 4 or want[-1] > squares.DIGITS)
    assert torch.equal(squares.digits(numbers.to(DEVICE)).cpu(), squares.digits(numbers))


@pytest.mark.parametrize("count", [BYTES // 4, 3 * BYTES // 4, 70 * BYTES // 4])
def test_prints(count: int) -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator(1), dtype=torch.int64).int()
    out = torch.empty(count * 4 // BYTES, dtype=torch.int64, device=DEVICE)
    assert torch.equal(device.prints(words.to(DEVICE), out).cpu(), reference_prints(words))
    assert torch.equal(prints(words.to(DEVICE)).cpu(), reference_prints(words))


def test_an_updater_runs_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, tables and statistics of a whole model agree, and nothing falls back to PyTorch."""
    rules = [{"match": "*norm*", "pin": "fp32"}]
    precision = {"state": "bf16-stochastic", "statistics": True, "rules": rules}
    plan = make_plan(config(3, "bf16", precision=precision), GPT(), world_size=2)
    values = {row.name: torch.randn(row.shape, generator=generator(3)) for row in plan.rows}
    here, there = (
        [
            replace(piece, storage=piece.storage.to(where), initial=piece.initial.to(where))
            for piece in owned(plan, values, 0)
        ]
        for where in (CPU, DEVICE)
    )
    one, other = make_updater(plan, here, None, {}), make_updater(plan, there, None, {})
    gradients = [
        {piece.number: gradient_of(piece.storage.numel(), number) for piece in here} for number in range(3)
    ]
    for each in gradients:
        one.update(each, 0.25)
    with monkeypatch.context() as patched:
        if IS_ON_CPU:
            patched.setattr("zerodrift.optim.fused.compiled_for", lambda where, step: None)
            patched.setattr(device, "works", lambda where: True)
        patched.setattr("zerodrift.optim.fused.reference_update", None)
        for each in gradients:
            other.update({number: flat.to(DEVICE) for number, flat in each.items()}, 0.25)
    for mine, theirs in zip(here, there, strict=True):
        assert torch.equal(mine.storage, theirs.storage.cpu())
        assert torch.equal(one.master(mine.number), other.master(mine.number).cpu())
        moments = other.states(mine.number)
        for name, moment in one.states(mine.number).items():
            assert torch.equal(moment, moments[name].cpu())
    assert one.statistics.keys() == other.statistics.keys()
    assert all(torch.equal(room, other.statistics[number].cpu()) for number, room in one.statistics.items())


@pytest.mark.parametrize(("count", "order"), [(3, "rank"), (5, "tree"), (8, "rank"), (33, "tree")])
def test_sums_of_many_parts_in_a_known_order(count: int, order: str) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    for kind, total in [(0, 0), (1, 0), (2, 0), (1, 1), (2, 2)]:
        values = torch.randn(count, 700, generator=generator(count))
        exponents = torch.randint(-6, 7, values.shape, generator=generator(kind))
        parts = torch.ldexp(values, exponents).to(dtypes[kind])
        out = torch.empty(700, dtype=dtypes[total], device=DEVICE)
        device.sums(parts.to(DEVICE), out, tree=order == "tree")
        assert torch.equal(out.cpu(), one_by_one(parts, dtypes[total], order)), (kind, total)


@pytest.mark.parametrize("dtype", test_formats.FLAT, ids=str)
def test_narrow_formats_equal_the_definition(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(device, "NARROW_SPAN", 1 << 15)
    if IS_ON_CPU:
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(device, "works", lambda where: True)
    for turn, kind in enumerate(GRADIENTS):
        for number, values in enumerate(test_formats.batches(dtype, kind)):
            if not values.numel() or (INTERPRETED and number % len(GRADIENTS) != turn):
                continue
            test_formats.require_definition(dtype, values, number, [kind], DEVICE)
