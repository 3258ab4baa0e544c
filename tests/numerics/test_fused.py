"""The compiled path has the bits of the reference in every scheme, slicing and thread count."""

from __future__ import annotations

import copy
import itertools
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zerodrift import optimizers
from zerodrift.dtypes import DType
from zerodrift.kernels import block_keys, build, native, parameter_key
from zerodrift.kernels.native import contraction
from zerodrift.optim import fused
from zerodrift.optim.schemes import Scheme, SliceTensors, allocate
from zerodrift.optim.updates import Hyper, Root, UpdateStep, reference_update, room_for_statistics
from zerodrift.optimizers import ELEMENTWISE, Algorithm
from zerodrift.policy.decisions import Master, State

BLOCKS = 11
NUMEL = 256 * BLOCKS

MASTERS = [
    (DType.BF16, Master.FP32),
    (DType.FP16, Master.FP32),
    (DType.BF16, Master.SPLIT),
    (DType.FP32, Master.SAME),
    (DType.BF16, Master.SAME),
    (DType.FP16, Master.SAME),
]
GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]

compiled = pytest.mark.skipif(native.library() is None, reason="no compiled kernels on this machine")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(scheme: Scheme, moments: int = 2, blocks: int = BLOCKS, groups: bool = True) -> SliceTensors:
    numel = 256 * blocks
    return allocate(
        scheme,
        torch.empty(numel, dtype=scheme.storage.torch),
        moments,
        initial=torch.randn(numel, generator=generator()),
        groups=(torch.arange(blocks) // 4 % 3).int() if groups else None,
        keys=block_keys(parameter_key("weight"), 3, blocks),
    )


def gradient_of(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    spread = 10.0 ** torch.randn(numel, generator=generator(seed))
    gradient = torch.randn(numel, generator=generator(seed + 1000)) * spread
    gradient[::7] = 0
    return gradient.to(dtype)


def step_of(algorithm: Algorithm, number: int, root: Root = Root.EXACT) -> UpdateStep:
    hypers = (
        Hyper(1e-3, number, weight_decay=0.1, momentum=0.9, dampening=0.1),
        Hyper(1e-2, number, (0.3, 0.95), 1e-6, momentum=0.0, dampening=0.3),
        Hyper(3e-4, number, (0.95, 0.98), weight_decay=0.01, momentum=0.8, nesterov=True, maximize=True),
    )
    return UpdateStep(algorithm, hypers, number, 0.37, root)


def moments_of(algorithm: Algorithm) -> int:
    return 2 if algorithm in (optimizers.ADAM, optimizers.ADAMW) else 1


def assert_equal(one: SliceTensors, other: SliceTensors, what: str = "") -> None:
    """Compare bit for bit, with any NaN equal to any NaN."""
    pairs = {"storage": (one.storage, other.storage)}
    if one.master is not None and other.master is not None:
        pairs["master"] = (one.master, other.master)
    pairs |= {f"moment {i}": pair for i, pair in enumerate(zip(one.moments, other.moments, strict=True))}
    pairs |= {f"scales {i}": pair for i, pair in enumerate(zip(one.scales, other.scales, strict=True))}
    for name, (first, second) in pairs.items():
        assert first.dtype is second.dtype
        if first.is_floating_point():
            nan = first.isnan()
            assert torch.equal(nan, second.isnan()), (what, name)
            bits = torch.int32 if first.dtype is torch.float32 else torch.int16
            first, second = first.view(bits)[~nan], second.view(bits)[~nan]
        assert torch.equal(first, second), (what, name, torch.nonzero(first != second).flatten()[:8])


# --- work of a slice, for the kernels here and the programs in `tests/gpu` ------------------------------

Work = tuple[SliceTensors, list[Tensor], list[UpdateStep]]
"""A slice with the gradients of some steps."""


def usual(scheme: Scheme, algorithm: Algorithm, dtype: torch.dtype, root: Root = Root.EXACT) -> Work:
    steps = [step_of(algorithm, number, root) for number in (1, 2)]
    gradients = [gradient_of(NUMEL, number, dtype) for number in (1, 2)]
    return make(scheme, moments_of(algorithm)), gradients, steps


def without_moments(state: State) -> Work:
    """SGD without momentum and with `8bit` in its `state` column once read scales at address 0."""
    scheme = Scheme(DType.BF16, Master.SPLIT, state)
    step = UpdateStep(optimizers.SGD, (Hyper(1e-2, weight_decay=0.1),), 1, 0.5)
    return make(scheme, 0, groups=False), [gradient_of(NUMEL, 1)], [step]


def special(scheme: Scheme, algorithm: Algorithm) -> Work:
    """Return weights and gradients with NaNs, infinities, subnormals and both zeros in every place."""
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38, 65520.0, 1.0])
    weight, gradient = odd.repeat(odd.numel()), odd.repeat_interleave(odd.numel())
    storage, keys = torch.empty(weight.numel(), dtype=scheme.storage.torch), block_keys(1, 0, 1)
    of = allocate(scheme, storage, moments_of(algorithm), initial=weight, keys=keys)
    hypers = [Hyper(1e-2, number, weight_decay=0.1, momentum=0.9) for number in (1, 2)]
    steps = [UpdateStep(algorithm, (hyper,), number) for number, hyper in enumerate(hypers, 1)]
    return of, [gradient, gradient], steps


LENGTHS = (1, 7, 255, 256, 257, 1000)


def of_length(numel: int, state: State, dtype: torch.dtype) -> Work:
    """Return a slice and a gradient whose addresses are multiples of nothing."""
    scheme, storage = Scheme(DType.BF16, Master.SPLIT, state), torch.randn(numel + 1, generator=generator())
    of = allocate(scheme, storage.bfloat16()[1:], 2, keys=block_keys(9, 0, -(-numel // 256)))
    return of, [gradient_of(numel + 3, 1, dtype)[3:]], [step_of(optimizers.ADAMW, 1)]


def require_reference(one: SliceTensors, gradients: list[Tensor], steps: list[UpdateStep]) -> None:
    """Compare each step of the compiled path with the definition."""
    other = copy.deepcopy(one)
    for gradient, step in zip(gradients, steps, strict=True):
        reference_update(one, gradient, step)
        fused.update(other, gradient, step)
        assert_equal(one, other, f"{one.scheme} {gradient.dtype} {step.algorithm} step {step.number}")


# --- the compiled path ----------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("algorithm", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("state", State, ids=str)
def test_compiled_equals_reference(algorithm: Algorithm, state: State) -> None:
    for (storage, master), dtype in itertools.product(MASTERS, GRADIENTS):
        root = Root.TORCH if (storage, dtype) == (DType.BF16, torch.bfloat16) else Root.EXACT
        require_reference(*usual(Scheme(storage, master, state), algorithm, dtype, root))
    for storage, master in MASTERS:
        require_reference(*special(Scheme(storage, master, state), algorithm))


@compiled
@pytest.mark.parametrize("state", State, ids=str)
def test_any_length_and_alignment_and_no_moments(state: State) -> None:
    require_reference(*without_moments(state))
    for numel, dtype in itertools.product((0, *LENGTHS), GRADIENTS):
        require_reference(*of_length(numel, state, dtype))


@compiled
@pytest.mark.parametrize("algorithm", ELEMENTWISE, ids=str)
def test_statistics_equal_the_reference_and_change_nothing(algorithm: Algorithm) -> None:
    for storage, master in MASTERS:
        one, gradients, steps = usual(
            Scheme(storage, master, State.BF16_STOCHASTIC), algorithm, torch.float32
        )
        other, silent = copy.deepcopy(one), copy.deepcopy(one)
        mine, theirs = room_for_statistics(BLOCKS), room_for_statistics(BLOCKS)
        for gradient, step in zip(gradients, steps, strict=True):
            reference_update(one, gradient, step, theirs)
            fused.update(other, gradient, step, mine)
            fused.update(silent, gradient, step)
            assert torch.equal(mine, theirs)
            assert_equal(one, other)
            assert_equal(other, silent)


LEVELS = build.VARIANTS.get(platform.machine(), ())


@compiled
@pytest.mark.parametrize(
    "level", [None, *(pytest.param(of, marks=pytest.mark.slow, id=of.name) for of in LEVELS)]
)
def test_codes_around_the_bounds_of_decades_and_binades(
    level: build.Variant | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup may take a neighbour near a bound: each has 50 numbers on both sides here. The code is that of
    this processor, and of every level of processors that wheels have a library for."""
    if level is not None:
        compiler = build.find_compiler()
        if compiler is None or not level.needs <= native._features():
            pytest.skip("no C++ compiler, or another processor")
        same = replace(level, contraction=contraction())
        monkeypatch.setitem(build.VARIANTS, platform.machine(), (same,))
        made = native.Library(next(build.compile_variants(compiler, tmp_path)), "")
        monkeypatch.setattr(native, "library", lambda: made)
    edges = torch.tensor([10.0**-k for k in range(8)] + [2.0**-k for k in range(40)])
    near = (edges.view(torch.int32)[:, None] + torch.arange(-50, 51, dtype=torch.int32)).view(torch.float32)
    near = torch.cat([near.flatten(), torch.tensor([0.0, 1e-20, 1e-42])]).clamp(max=1.0)
    values = torch.ones(-(-near.numel() // 255), 256)  # every block has a 1, so its scale is 1
    padded = torch.nn.functional.pad(near, (0, values.shape[0] * 255 - near.numel()))
    values[:, 1:] = padded.view(-1, 255)
    first = values.flatten() * (1 - 2 * (torch.arange(values.numel()) % 2))
    keys = block_keys(3, 0, values.shape[0])
    scheme = Scheme(DType.FP32, Master.SAME, State.EIGHT_BIT)
    # A first moment that is the gradient, and a second one that is its square.
    for algorithm, gradient in ((optimizers.SGD, first), (optimizers.ADAMW, values.flatten().sqrt())):
        one = allocate(scheme, torch.zeros(values.numel()), moments_of(algorithm), keys=keys)
        for number in range(1, 9):
            step = UpdateStep(algorithm, (Hyper(1e-3, 1, (0.9, 0.0), momentum=0.9),), number)
            require_reference(one, [gradient], [step])
            assert one.moments[-1].unique().numel() > 30 and (one.scales[-1] == 1).all()


@compiled
def test_8bit_blocks_without_an_ordinary_scale() -> None:
    """Blocks hold zeros, moments below the least scale and beyond the largest, infinities and NaNs."""
    sizes = torch.tensor([0.0, 1e-40, 1e-25, 1e-14, 1.0, 1e18, 1e30, 3e37, 1.0, 1.0])
    gradient = torch.randn(sizes.numel(), 256, generator=generator()) * sizes[:, None]
    gradient[-2:, 5] = torch.tensor([torch.inf, torch.nan])
    keys, scheme = block_keys(4, 0, sizes.numel()), Scheme(DType.FP32, Master.SAME, State.EIGHT_BIT)
    for algorithm in ELEMENTWISE:
        one = allocate(scheme, torch.zeros(gradient.numel()), moments_of(algorithm), keys=keys)
        steps = [UpdateStep(algorithm, (Hyper(1e-3, number, momentum=0.9),), number) for number in (1, 2, 3)]
        require_reference(one, [gradient.flatten()] * 3, steps)
        assert one.moments[0].view(-1, 256)[4].unique().numel() > 30


@compiled
@pytest.mark.cells(1)
@pytest.mark.parametrize("shift", [0, 8, 1])
@pytest.mark.parametrize(("storage", "master"), MASTERS[:3], ids=str)
def test_large_slices_equal_the_reference(storage: DType, master: Master, shift: int) -> None:
    """From a million elements on, a weight beside an fp32 master is stored past the caches, if its address
    is a multiple of 16 bytes: a shift of 8 elements is, one of a single element is not."""
    scheme, numel = Scheme(storage, master, State.FP32), (1 << 20) + 700
    weights, gradient = torch.randn(numel, generator=generator()), gradient_of(numel, 1)
    before, made = torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        for path in (reference_update, fused.update):
            held = torch.zeros(numel + shift, dtype=storage.torch)[shift:]
            mine = allocate(scheme, held, 2, initial=weights.clone())
            path(mine, gradient, UpdateStep(optimizers.ADAMW, (Hyper(1e-2, 1),), 1, 0.37))
            made.append(mine)
    finally:
        torch.set_num_threads(before)
    assert_equal(made[0], made[1])
    assert not torch.equal(made[1].storage, weights.to(storage.torch))


@pytest.mark.parametrize("state", [State.BF16_STOCHASTIC, State.EIGHT_BIT], ids=str)
@pytest.mark.parametrize("path", [reference_update, fused.update])
def test_slices_do_not_change_bits(path: Callable[..., None], state: State) -> None:
    scheme = Scheme(DType.BF16, Master.SPLIT, state)
    whole = make(scheme)
    spans = [(0, 1), (1, 6), (6, BLOCKS)]  # as ranks would hold them
    pieces = [fused._blocks(copy.deepcopy(whole), *span) for span in spans]
    for number in (1, 2, 3):
        gradient, step = gradient_of(NUMEL, number), step_of(optimizers.ADAMW, number)
        path(whole, gradient, step)
        for piece, (start, end) in zip(pieces, spans, strict=True):
            path(piece, gradient[256 * start : 256 * end], step)
    for piece, span in zip(pieces, spans, strict=True):
        assert_equal(fused._blocks(whole, *span), piece)
