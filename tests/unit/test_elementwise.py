"""The table of optimizers that may step shards is right, and a declaration overrides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerodrift.deepspeed.ops.lion import FusedLion
from zerodrift.optim.elementwise import ELEMENTWISE_CLASSES, declare, is_elementwise
from zerodrift.optim.torch_optimizer import needs_closure

TORCH = ELEMENTWISE_CLASSES["torch.optim"]


def parameters(*shapes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


def step_in_parts(name: str, parts: list[slice], **options: Any) -> torch.Tensor:
    """Return 600 elements after five steps of this optimizer on these parts of them."""
    generator = torch.Generator().manual_seed(1)
    values, gradients = torch.randn(600, generator=generator), torch.randn(5, 600, generator=generator)
    pieces = [nn.Parameter(values[part].clone()) for part in parts]
    optimizer = getattr(torch.optim, name)(pieces, lr=1e-2, **options)
    for gradient in gradients:
        for piece, part in zip(pieces, parts, strict=True):
            piece.grad = gradient[part].clone()
        optimizer.step()
    return torch.cat([piece.detach() for piece in pieces])


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_classes_in_the_table_are_elementwise(name: str, foreach: bool) -> None:
    whole = step_in_parts(name, [slice(0, 600)], foreach=foreach)
    pieces = step_in_parts(name, [slice(0, 256), slice(256, 600)], foreach=foreach)
    assert torch.allclose(whole, pieces, rtol=1e-6, atol=1e-7)


def kind(name: str, module: str, *bases: type, **args: int) -> torch.optim.Optimizer:
    """Make an object of a class of another package, with options in the form of bitsandbytes."""
    made = type(name, bases or (torch.optim.SGD,), {"__module__": module})(parameters(4), lr=0.1)
    if args:
        made.args = SimpleNamespace(**{"optim_bits": 32, "percentile_clipping": 100, **args})
    return made


BITS = "bitsandbytes.optim.adamw"


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (torch.optim.RMSprop(parameters(4)), True),
        (kind("MuonOfMine", "mine"), False),
        (kind("AdamW", "galore_torch.adamw"), False),
        (kind("AdamW", "mine", torch.optim.AdamW), None),
        (kind("Lion", "lion_pytorch.lion_pytorch"), True),
        (FusedLion(parameters(4)), True),
        (kind("AdamW", BITS, optim_bits=32), True),
        (kind("AdamW", BITS, optim_bits=8), None),
        (kind("AdamW", BITS, percentile_clipping=5), None),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
)
def test_what_is_known(optimizer: torch.optim.Optimizer, expected: bool | None) -> None:
    assert is_elementwise(optimizer) is expected
    declare(optimizer, None)
    assert is_elementwise(optimizer) is expected
    for declared in (False, True):
        declare(optimizer, declared)
        assert is_elementwise(optimizer) is (declared if expected is None else expected)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def test_closures() -> None:
    assert needs_closure(torch.optim.LBFGS) and needs_closure(NeedsClosure)
    assert not any(needs_closure(getattr(torch.optim, name)) for name in TORCH)
