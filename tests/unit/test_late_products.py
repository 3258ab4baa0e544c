"""Late gradients equal those of autograd, and products that a queue cannot form are left to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from zerodrift.engine.habits.pins import class_for
from zerodrift.errors import ModelError
from zerodrift.pipeline.deferred import defer_weight_grads
from zerodrift.pipeline.products import StridedView


class Through(nn.Module):
    """A product with a weight that came through a function of the caller's."""

    def __init__(self, way: Callable[[nn.Parameter], torch.Tensor], shape: tuple[int, ...] = (6, 8)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.way(self.weight)
        return F.linear(x, weight) if weight.dim() == 2 else torch.bmm(x.expand(len(weight), -1, -1), weight)


class Halved(torch.autograd.Function):
    """A view with a custom gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 2


def hooked_view(weight: nn.Parameter) -> torch.Tensor:
    view = weight.t()
    view.register_hook(lambda grad: grad * 3)
    return view.t()


def hooked_weight(weight: nn.Parameter) -> torch.Tensor:
    view = weight[1]
    view.register_hook(lambda grad: grad * 3)
    return view


LEFT = {
    "expanded": ((1, 8), lambda w: w.expand(6, 8)),
    "overlapping": ((20,), lambda w: w.as_strided((6, 8), (2, 1))),
    "own function": ((6, 8), Halved.apply),
    "hook on a view": ((6, 8), hooked_view),
    "hook on the weight": ((2, 6, 8), hooked_weight),
    "masked": ((6, 8), lambda w: w * (torch.arange(8) % 2)),
    "rounded": ((6, 8), lambda w: w.bfloat16().float()),
}
LATE = {
    "whole": ((6, 8), lambda w: w),
    "part of a stack": ((2, 6, 8), lambda w: w[1]),
    "sliced": ((9, 8), lambda w: w[2:8]),
    "strided": ((6, 16), lambda w: w[:, ::2]),
    "moved": ((8, 2, 6), lambda w: w.permute(1, 2, 0)[0]),
}


def gradients(module: Through, x: torch.Tensor) -> torch.Tensor:
    out = module(x)
    return (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()


def penalty(module: Through, x: torch.Tensor) -> torch.Tensor:
    """Return a loss with the gradients of the input and of the weight."""
    out = module(x).tanh().square().sum()
    grads = torch.autograd.grad(out, (x, module.weight), create_graph=True)
    return out + sum(grad.square().sum() for grad in grads)


def numbers() -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


KINDS = {"plain": nn.Parameter, "pinned": class_for("weight", "auto")}


@pytest.mark.parametrize("case", [*LEFT, *LATE])
@pytest.mark.filterwarnings("ignore:.*is pinned to")  # the case that rounds it
@pytest.mark.parametrize(("read", "kind"), [*((gradients, kind) for kind in KINDS), (penalty, "plain")])
def test_a_weight_has_plain_torchs_gradient_late_or_at_once(case: str, read: Any, kind: str) -> None:
    """The gradient is that of the loss, or part of a forward; parameters of another class have theirs too."""
    shape, way = {**LEFT, **LATE}[case]
    plain, module = Through(way, shape), Through(way, shape)
    x, late_x = numbers().requires_grad_(), numbers().requires_grad_()
    read(plain, x).backward()
    module.weight.__class__ = KINDS[kind]
    queue = defer_weight_grads(module)
    read(module, late_x).backward()
    assert read is penalty or kind != "plain" or len(queue) == (case in LATE)
    queue.drain()
    assert read is penalty or torch.equal(late_x.grad, x.grad)
    near = 1e-5 if read is penalty else 1e-6
    found, expected = (late_x.grad, module.weight.grad), (x.grad, plain.weight.grad)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def mask(parameter: nn.Parameter) -> Any:
    return parameter.register_hook(lambda grad: grad * (torch.arange(grad.numel()).view_as(grad) % 2))


def clip(parameter: nn.Parameter) -> Any:
    def after(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.clamp_(-0.01, 0.01)

    return parameter.register_post_accumulate_grad_hook(after)


@pytest.mark.parametrize("when", ["before the queue", "before the forward", "before the backward"])
@pytest.mark.parametrize("put", [mask, clip])
def test_a_hook_on_a_weight_holds_whenever_it_was_put_on(put: Any, when: str) -> None:
    x = numbers()
    plain, late = nn.Linear(8, 6), nn.Linear(8, 6)
    late.load_state_dict(plain.state_dict())
    put(plain.weight)
    plain(x).square().sum().backward()
    handle = put(late.weight) if when == "before the queue" else None
    queue = defer_weight_grads(late)
    handle = put(late.weight) if when == "before the forward" else handle
    loss = late(x).square().sum()
    handle = put(late.weight) if when == "before the backward" else handle
    loss.backward()
    assert len(queue) == 0 and late.weight.grad is not None
    torch.testing.assert_close(late.weight.grad, plain.weight.grad, rtol=1e-6, atol=1e-6)
    handle.remove()
    late(x).sum().backward()
    assert len(queue) == 1, "without the hook it is late again"


def test_a_gradient_that_is_asked_for_is_handed_out_and_nothing_is_put() -> None:
    x = torch.randn(5, 8, requires_grad=True)
    module = nn.Linear(8, 6)
    queue = defer_weight_grads(module)
    assert queue and len(queue) == 0, "a queue is true, also an empty one"
    (of_x,) = torch.autograd.grad(module(x).sum(), x)
    torch.testing.assert_close(of_x, module.weight.detach().sum(0).expand(5, 8))
    (of_weight,) = torch.autograd.grad(module(x).sum(), module.weight)
    torch.testing.assert_close(of_weight, x.detach().sum(0).expand(6, 8))
    assert len(queue) == 0 and module.weight.grad is None
    module(x).sum().backward(inputs=[module.weight])
    assert len(queue) == 1


@pytest.mark.parametrize("way", ["input", "a view of it", "what a caller holds"])
def test_what_a_late_gradient_is_formed_from_must_not_change(way: str) -> None:
    module = nn.Linear(8, 6)
    queue = defer_weight_grads(module)
    buffer = torch.randn(5, 8)
    if way == "what a caller holds":
        queue.put(module.weight, lambda dtype: buffer.new_zeros(6, 8), (buffer,))
    else:
        module(buffer).sum().backward()
    (buffer[1:] if way == "a view of it" else buffer).mul_(2)
    with pytest.raises(ModelError, match="`weight`: the inputs of its late gradient must not be wri"):
        queue.drain()
    module(buffer).sum().backward()
    queue.drain()
    buffer.zero_()  # nothing waits for it


WRONG = {
    "shape that would be broadcast": (torch.ones(1, 8), r"\[6, 8\].*got \[1, 8\]"),
    "dtype": (torch.ones(6, 8, dtype=torch.bfloat16), r"float32.*got .*bfloat16"),
    "nothing": (None, "got NoneType"),
}


@pytest.mark.parametrize("there", [False, True], ids=["first", "added"])
@pytest.mark.parametrize(("value", "told"), WRONG.values(), ids=WRONG)
def test_a_put_gradient_that_does_not_fit_names_the_parameter(value: Any, told: str, there: bool) -> None:
    module = nn.Sequential(nn.Linear(8, 6))
    queue = defer_weight_grads(module)
    module[0].weight.grad = torch.zeros(6, 8) if there else None
    queue.put(module[0].weight, lambda dtype: value)
    with pytest.raises(ModelError, match=rf"`0\.weight`: must get a late gradient .*{told}"):
        queue.drain()


def test_one_tensor_that_is_put_several_times_is_added_as_often() -> None:
    module = nn.Linear(2, 2)
    queue, value = defer_weight_grads(module), torch.ones(2, 2)
    for _ in range(3):
        queue.put(module.weight, lambda dtype: value)
    queue.put(module.weight, lambda dtype: value[:1], place=StridedView((1, 2), (2, 1), 0))
    queue.drain()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[4, 4], [3, 3]] and value.tolist() == [[1, 1], [1, 1]]
