"""The definition of the updates has torch's bits for torch's algorithms, and follows the other formulas.

`test_fused.py` compares the compiled path with the definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from zerodrift import optimizers
from zerodrift.dtypes import DType
from zerodrift.optim.schemes import Scheme, allocate
from zerodrift.optim.updates import Hyper, Root, UpdateStep, reference_update
from zerodrift.optimizers import Algorithm
from zerodrift.policy.decisions import Master, State

PLAIN = Scheme(DType.FP32, Master.SAME, State.FP32)


@dataclass(frozen=True)
class Case:
    """One optimizer of torch and its name here."""

    torch: type[torch.optim.Optimizer]
    algorithm: Algorithm
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([str(self.algorithm), *(f"{key}={value}" for key, value in self.numbers.items())])


ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
QUICK = {"betas": (0.4, 0.95), "eps": 1e-6, "weight_decay": 0.0, "maximize": True}
CASES = [
    Case(torch.optim.AdamW, optimizers.ADAMW, ADAM),
    Case(torch.optim.AdamW, optimizers.ADAMW, QUICK),
    Case(torch.optim.Adam, optimizers.ADAM, ADAM),
    Case(torch.optim.SGD, optimizers.SGD, {"weight_decay": 0.01}),
    Case(torch.optim.SGD, optimizers.SGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.05}),
    Case(torch.optim.SGD, optimizers.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
]


def gradients(numel: int, steps: int) -> list[Tensor]:
    """Return gradients over many orders of magnitude, with exact zeros."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(steps):
        spread = 10.0 ** torch.randn(numel, generator=generator)
        made.append(torch.randn(numel, generator=generator) * spread)
        made[-1][::5] = 0
    return made


def differences(case: Case, numel: int, root: Root, **kind: bool) -> dict[str, Tensor]:
    """Return the places that differ from torch after 12 steps with a changing learning rate, by name."""
    start = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    parameter = torch.nn.Parameter(start.clone())
    plain = case.torch([parameter], lr=1.0, **case.numbers, **kind)  # type: ignore[call-arg]
    count = len(case.algorithm.kept([case.numbers]))
    mine = allocate(PLAIN, start.clone(), count)
    for number, gradient in enumerate(gradients(numel, 12), 1):
        rate = 1e-2 / number
        plain.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        plain.step()
        hyper = Hyper(rate, number, **case.numbers)
        reference_update(mine, gradient, UpdateStep(case.algorithm, (hyper,), number, root=root))
    theirs = [parameter.detach()]
    theirs += [value for value in plain.state[parameter].values() if value is not None and value.dim() == 1]
    names = ["weight", "first", "second"]
    pairs = zip(names, theirs, [mine.storage, *mine.moments], strict=False)
    assert len(theirs) == 1 + count
    return {name: torch.nonzero(one != other).flatten() for name, one, other in pairs}


@pytest.mark.parametrize("kind", [{}, {"foreach": True}], ids=["default", "foreach"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch_bit_for_bit(case: Case, kind: dict[str, bool]) -> None:
    """Lengths are arbitrary: torch's element-wise kernels compute an element alike in any place."""
    found = differences(case, 256 * 5 + 37, Root.TORCH, **kind)
    assert all(where.numel() == 0 for where in found.values()), found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch_fused_bit_for_bit(case: Case) -> None:
    """The root is exact. The last elements of a tensor are left out: see [Note: roots]."""
    for rest in (0, 5):
        found = differences(case, 256 * 5 + rest, Root.EXACT, fused=True)
        assert all((where >= 256 * 5).all() for where in found.values()), found


def test_lion_is_its_formula() -> None:
    """The fp64 reference agrees to fp32 rounding as long as no direction is within rounding of zero."""
    numel, rate, decay, (beta1, beta2) = 512, 1e-2, 0.1, (0.9, 0.99)
    weight = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    mine = allocate(PLAIN, weight.clone(), 1)
    weight, mean = weight.double(), torch.zeros(numel, dtype=torch.float64)
    for number, gradient in enumerate(gradients(numel, 10), 1):
        hyper = Hyper(rate, number, (beta1, beta2), weight_decay=decay)
        reference_update(mine, gradient, UpdateStep(optimizers.LION, (hyper,), number))
        wide = gradient.double()
        weight = weight * (1 - rate * decay) - rate * (beta1 * mean + (1 - beta1) * wide).sign()
        mean = beta2 * mean + (1 - beta2) * wide
    torch.testing.assert_close(mine.storage.double(), weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.moments[0].double(), mean, rtol=1e-5, atol=1e-6)


def test_groups_are_as_if_alone() -> None:
    """Interleaved blocks of three groups have the bits of three slices of one group each."""
    blocks = 12
    hypers = (Hyper(1e-2), Hyper(1e-3, 7, (0.8, 0.9), 1e-5, 0.3), Hyper(1e-1, maximize=True))
    groups = torch.tensor([0, 0, 1, 2, 1, 1, 0, 2, 2, 2, 2, 0], dtype=torch.int32)
    start = torch.randn(256 * blocks, generator=torch.Generator().manual_seed(3))
    gradient = gradients(256 * blocks, 1)[0]
    step = UpdateStep(optimizers.ADAMW, hypers, 1)
    together = allocate(PLAIN, start.clone(), 2, groups=groups)
    reference_update(together, gradient, step)
    for number, hyper in enumerate(hypers):
        where = (groups == number).repeat_interleave(256)
        alone = allocate(PLAIN, start[where].clone(), 2)
        reference_update(alone, gradient[where].clone(), replace(step, hypers=(hyper,)))
        assert torch.equal(together.storage[where], alone.storage)
        assert torch.equal(together.moments[1][where], alone.moments[1])
