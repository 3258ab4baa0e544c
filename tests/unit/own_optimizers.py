"""Optimizers as people write them: elementwise ones in unusual ways, and ones that look further."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NOISE = torch.Generator().manual_seed(3)
"""As a module of somebody's has one."""


class Own(torch.optim.Optimizer):
    """Gradient descent by a direction; what each class here does is its direction."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, p.grad, self.state[p], group))

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g


# --- elementwise --------------------------------------------------------------------------------------


class Signs(Own):
    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        direction = (0.9 * momentum + 0.1 * g).sign()
        momentum.lerp_(g, 0.01)
        return direction + 0.1 * p


class Demands(Signs):
    """More at construction than a copy could know."""

    def __init__(self, params: Any, lr: float, schedule: Callable[[int], float], *, owner: str) -> None:
        super().__init__(params, lr)
        self.schedule, self.owner = schedule, owner


class Noisy(Own):
    """Noise on every element, from torch's stream and from one of its module's."""

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        own = torch.empty_like(p).normal_(generator=NOISE)
        return g + 0.1 * torch.randn_like(p) + own * g * random.random() * 0


class StochasticRounding(Own):
    """The low bits of every element by chance."""

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        bits = torch.randint(0, 1 << 16, g.shape, dtype=torch.int32)
        return ((g.view(torch.int32) + bits) & -65536).view(torch.float32)


class Assigns(Own):
    """New memory for every parameter, every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad.sign()


class ReadsMarks(Own):
    """Goes further where a caller has said so on the parameter."""

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g * getattr(p, "haste", 1.0)


class Foreach(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            grads = [p.grad for p in group["params"]]
            if grads:
                torch._foreach_add_(group["params"], grads, alpha=-group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Around another, whose groups it has."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 2) -> None:
        self.inner, self.every, self.count = inner, every, 0
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.detach().clone())
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"].lerp_(p, 0.5)
                    p.copy_(slow)


class Blocks256(Own):
    """Scaled by the largest of 256 neighbours, as 8-bit moments are: slices end between such blocks."""

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        flat = nn.functional.pad(g.reshape(-1), (0, -g.numel() % 256)).view(-1, 256)
        scale = flat.abs().amax(1, keepdim=True).clamp_min(1e-12)
        return ((flat / scale * 127).round() / 127 * scale).view(-1)[: g.numel()].view_as(g)


ELEMENTWISE = (Signs, Noisy, StochasticRounding, Assigns, Foreach, Blocks256)


# --- that look at a tensor ----------------------------------------------------------------------------


class TrustRatio(Own):
    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g * (p.norm() / (g.norm() + 1e-12))


class Normalised(Own):
    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g / (g.norm() + 1e-12)


class Clipped(Own):
    """Only where a norm is large."""

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g / torch.clamp(g.square().mean().sqrt(), min=1.0)


class Centred(Own):
    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return (g - g.mean()).sign()


class Factored(Own):
    """A second moment in rows and columns, of matrices of a size."""

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if p.dim() < 2 or min(p.shape) < 128:
            return g
        square = g.square() + 1e-30
        rows, columns = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
        return g * (rows * columns / rows.mean()).rsqrt()


class Orthogonal(Own):
    """Raises on anything but a matrix."""

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        left, _, right = torch.linalg.svd(g, full_matrices=False)
        return left @ right


class Preconditioned(Own):
    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        for dim, length in enumerate(g.shape):
            if length <= 64 and g.dim() > 1:
                flat = g.movedim(dim, 0).reshape(length, -1)
                held = state.setdefault(f"P{dim}", torch.eye(length) * 1e-3)
                held.add_(flat @ flat.T)
                g = torch.linalg.solve(held, flat).view(g.movedim(dim, 0).shape).movedim(0, dim)
        return g


class DecaysMatrices(Own):
    """Decay by the number of dimensions, which a flat piece does not have."""

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g + (0.1 * p if p.dim() > 1 else 0.0)


class ByChannel(Own):
    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g if g.dim() < 2 else g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True)


class SmallIsWide(Own):
    """Rounds large tensors and not small ones, as 8-bit optimizers do; pieces may be small."""

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g if g.numel() < 4096 else (g * 16).round() / 16


class DrawsOncePerTensor(Own):
    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g * torch.rand(()).item()


TENSOR = (
    TrustRatio,
    Normalised,
    Clipped,
    Centred,
    Factored,
    Preconditioned,
    DecaysMatrices,
    ByChannel,
    SmallIsWide,
)


# --- that look at several -----------------------------------------------------------------------------


class ClipsAll(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm() if held else torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / max(norm.item(), 1.0))


class GuessesRate(Own):
    """A rate for all from what all have seen, as Prodigy has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            rate = group.setdefault("d", 1e-6)
            for p in group["params"]:
                first = self.state[p].setdefault("first", p.detach().clone())
                rate = max(rate, float((p.grad * (first - p)).sum() / p.grad.abs().sum()), 1.1 * rate)
            group["d"] = rate
            for p in group["params"]:
                p.sub_(rate * p.grad.sign())


GROUP = (ClipsAll, GuessesRate, DrawsOncePerTensor)
