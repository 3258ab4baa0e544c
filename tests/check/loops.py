"""Loops that write by hand what costs precision: each is run as it should not be, and as it should.

A table holds what a script does; a dtype or a cast decides whether it is a bug. All of them train `Dense` for
four steps in this process, observed by `zerodrift.observe`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import zerodrift
from tests.check.tiny import VOCABULARY, WIDTH, Dense, batch, loss_of, rank

Tensors = list[torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def nothing(*_: Any) -> None:
    """Do nothing: the default of a loop's variations."""


def observed(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **how: Any
) -> zerodrift.Observation:
    with zerodrift.observe() as seen:
        train(model, optimizer, **how)
    return seen


def observed_steps(step: Callable[[torch.Tensor, torch.Tensor], Any]) -> zerodrift.Observation:
    """Observe four steps of a script's own."""
    with zerodrift.observe() as seen:
        for number in range(4):
            step(*batch(rank(), number))
    return seen


def made(
    make: Callable[..., nn.Module],
    *arguments: Any,
    by: Callable[[nn.Module], Any] = lambda model: None,
    **how: Any,
) -> zerodrift.Observation:
    """Make a model, train it by an optimizer that `by` makes, by default AdamW, and observe it."""
    torch.manual_seed(0)
    model = make(*arguments)
    return observed(model, by(model), **how)


def observed_as_made(make: Callable[[], tuple[nn.Module, Callable[[], Any]]]) -> zerodrift.Observation:
    """Observe the making of a model, too, and of what averages its gradients."""
    with zerodrift.observe() as seen:
        model, before = make()
        train(model, before=before)
    return seen


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss: Loss = loss_of,
    before: Callable[[], Any] = nothing,
    after: Callable[[], Any] = nothing,
) -> None:
    """Train four steps, with `before` and `after` around the step of an optimizer, by default AdamW."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(4):
        tokens, targets = batch(rank(), number)
        loss(model(tokens), targets).backward()
        before()
        optimizer.step()
        after()
        optimizer.zero_grad()
        model.zero_grad()


def dense(dtype: torch.dtype = FP32) -> Dense:
    torch.manual_seed(0)
    return Dense().to(dtype)


# --- masters -----------------------------------------------------------------------------------------


def copies(model: nn.Module) -> Tensors:
    return [parameter.detach().float().clone() for parameter in model.parameters()]


def give(model: nn.Module, masters: Tensors) -> None:
    """Give masters the gradients of the model."""
    gradients = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    if len(masters) == 1:
        masters[0].grad = torch.cat([gradient.flatten() for gradient in gradients])
        return
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient


def flat(model: nn.Module) -> Tensors:
    return [parameters_to_vector(model.parameters()).detach().float()]


@torch.no_grad()
def one_by_one(model: nn.Module, masters: Tensors) -> None:
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.copy_(master)


def set_data(model: nn.Module, masters: Tensors) -> None:
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.data = master.to(parameter.dtype)


def load(model: nn.Module, masters: Tensors) -> None:
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(dict(zip(names, (master.bfloat16() for master in masters), strict=True)))


def into_flat(model: nn.Module, masters: Tensors) -> None:
    vector_to_parameters(masters[0].bfloat16(), model.parameters())


@torch.no_grad()
def at_once(model: nn.Module, masters: Tensors) -> None:
    torch._foreach_copy_(list(model.parameters()), masters)


MASTERS: dict[str, tuple[Callable[[nn.Module], Tensors], Callable[[nn.Module, Tensors], None]]] = {
    "copy_": (copies, one_by_one),
    "data": (copies, set_data),
    "foreach": (copies, at_once),
    "load_state_dict": (copies, load),
    "flat, vector": (flat, into_flat),
}
"""How masters are made, and how they are written into the parameters."""


def by_masters(
    model: nn.Module, made: Tensors, after: Callable[[], Any] = nothing, rate: float = 1e-6
) -> zerodrift.Observation:
    """Update masters, at a rate so small that no bit of bf16 changes in four steps, unless one is given."""
    return observed(model, torch.optim.AdamW(made, lr=rate), before=lambda: give(model, made), after=after)


def masters(kind: str, rate: float = 1e-6, writes: bool = True) -> zerodrift.Observation:
    make, write = MASTERS[kind]
    model = dense(BF16)
    made = make(model)
    return by_masters(model, made, (lambda: write(model, made)) if writes else nothing, rate)


class Rule(torch.optim.SGD):
    """An optimizer that applies a rule to each parameter in turn."""

    def update(self, parameter: Any, state: dict[str, Any], rate: float) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.update(parameter, self.state[parameter], self.param_groups[0]["lr"])


class WithMasters(Rule):
    """Keeps a master of each parameter in its state, or updates the parameters themselves."""

    keeps = True

    def update(self, parameter: Any, state: dict[str, Any], rate: float) -> None:
        if "sum" not in state:
            state["master"] = parameter.detach().to(FP32 if self.keeps else parameter.dtype, copy=True)
            state["sum"] = torch.zeros_like(state["master"])
        gradient = parameter.grad.to(state["sum"].dtype) + 0.01 * state["master"]
        state["sum"].mul_(0.9).add_(gradient)
        state["master"].add_(state["sum"], alpha=-rate)
        parameter.copy_(state["master"])


class WithoutMasters(WithMasters):
    keeps = False


class Halves(Rule):
    """Keeps the lower half of each fp32 weight, of which the parameter is the upper half."""

    def update(self, parameter: Any, state: dict[str, Any], rate: float) -> None:
        low = state.setdefault("low", torch.zeros_like(parameter, dtype=torch.int16))
        whole = (parameter.view(torch.int16).int() << 16) | (low.int() & 0xFFFF)
        whole = (whole.view(torch.float32) - rate * parameter.grad.float()).view(torch.int32)
        low.copy_((whole & 0xFFFF).to(torch.int16))
        parameter.copy_((whole >> 16).to(torch.int16).view(BF16))


class Compensated(Rule):
    """Adds what the rounding of an update to bf16 lost to the next update, as Kahan's summation does."""

    def update(self, parameter: Any, state: dict[str, Any], rate: float) -> None:
        rest = state.setdefault("rest", torch.zeros_like(parameter))
        rest.add_(parameter.grad + 0.01 * parameter, alpha=-rate)
        before = parameter.clone()
        parameter.add_(rest)
        rest.add_(before.sub_(parameter))


class Stochastic(Rule):
    """Rounds each update to bf16 at random."""

    def update(self, parameter: Any, state: dict[str, Any], rate: float) -> None:
        bits = (parameter.float() - rate * parameter.grad.float()).view(torch.int32)
        noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
        parameter.copy_(((bits + noise) & -65536).view(torch.float32))


class Averaging(Rule):
    """Adds a moment to the parameters, and the decay of the parameters to the moment afterwards."""

    def update(self, parameter: Any, state: dict[str, Any], rate: float) -> None:
        moment = state.setdefault("moment", torch.zeros_like(parameter))
        moment.mul_(0.9).add_(parameter.grad)
        parameter.add_(moment, alpha=-rate)
        moment.add_(parameter, alpha=0.1)


class ByHand:
    """A function that updates each parameter, in the place of a torch optimizer."""

    def __init__(self, model: nn.Module, update: Callable[[nn.Parameter], Any]) -> None:
        self._model, self._update = model, update

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._model.parameters():
            self._update(parameter)

    def zero_grad(self) -> None:
        self._model.zero_grad()


UPDATES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add_": lambda p: p.add_(p.grad, alpha=-1e-2),
    "data": lambda p: setattr(p, "data", p.data - 1e-2 * p.grad),
    "copy_": lambda p: p.copy_(p.float() - 1e-2 * p.grad.float()),
}
"""How a script updates a parameter without an optimizer."""


def adapted() -> zerodrift.Observation:
    """Train an adapter in fp32 of a model that is frozen in bf16."""
    model = dense(BF16).requires_grad_(False)
    model.head = nn.Linear(WIDTH, VOCABULARY)
    model.head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    return observed(model, torch.optim.AdamW(model.head.parameters(), lr=1e-2))


def post_hook() -> zerodrift.Observation:
    model = dense(BF16)
    made = copies(model)
    optimizer = torch.optim.AdamW(made, lr=1e-6)
    optimizer.register_step_post_hook(lambda *_: at_once(model, made))
    return observed(model, optimizer, before=lambda: give(model, made))


def in_one_buffer(dtype: torch.dtype) -> zerodrift.Observation:
    """Update a buffer of which the parameters are views, by gradients that are cast."""
    model = dense()
    buffer = nn.Parameter(flat(model)[0])
    vector_to_parameters(buffer.detach(), model.parameters())

    def before() -> None:
        give(model, [buffer])
        assert buffer.grad is not None
        buffer.grad = buffer.grad.to(dtype).float()

    return observed(model, torch.optim.AdamW([buffer], lr=1e-3), before=before)


def untied() -> zerodrift.Observation:
    """Train a head that was tied until a cast."""
    model = dense()
    model.head.weight = nn.Parameter(model.embed.weight.detach().to(BF16).float())
    return observed(model)


def second_model() -> zerodrift.Observation:
    """Train with a second model as the masters, whose loss is computed too."""
    model = dense(BF16)
    other = copy.deepcopy(model).float()
    made: Tensors = list(other.parameters())
    return by_masters(model, made, lambda: (at_once(model, made), other(batch(0, 0)[0])))


# --- averages ----------------------------------------------------------------------------------------

Update = Callable[[Tensors, Tensors], Any]


def renew(averages: Tensors, weights: Tensors) -> None:
    averages[:] = [a * 0.999 + w * 0.001 for a, w in zip(averages, weights, strict=True)]


def pairwise(update: Callable[[torch.Tensor, torch.Tensor], Any]) -> Update:
    return lambda averages, weights: [update(a, w) for a, w in zip(averages, weights, strict=True)]


AVERAGES: dict[str, Update] = {
    "mul_ and add_": pairwise(lambda a, w: a.mul_(0.9999).add_(w, alpha=1e-4)),
    "add_ and mul_": pairwise(lambda a, w: a.add_(w, alpha=1e-4).mul_(0.9999)),
    "lerp_": pairwise(lambda a, w: a.lerp_(w, 1e-3)),
    "made anew": renew,
    "data": pairwise(lambda a, w: setattr(a, "data", 0.999 * a.data + 0.001 * w.data)),
    "mean of a stack": pairwise(lambda a, w: a.copy_(torch.stack([a, a, a, w]).mean(0))),
}
"""How averages follow weights."""


def average(kind: str, dtype: torch.dtype) -> zerodrift.Observation:
    model = dense()
    averages = [parameter.detach().to(dtype, copy=True) for parameter in model.parameters()]

    @torch.no_grad()
    def follow() -> None:
        AVERAGES[kind](averages, [parameter.detach().to(dtype) for parameter in model.parameters()])

    return observed(model, after=follow)


def averaged_model(dtype: torch.dtype) -> zerodrift.Observation:
    """Average a model that is updated by masters of its own."""
    model = dense(dtype)
    made, kept = copies(model), torch.optim.swa_utils.AveragedModel(model)
    return by_masters(model, made, lambda: (at_once(model, made), kept.update_parameters(model)), rate=1e-3)


# --- losses ------------------------------------------------------------------------------------------


def picked(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, targets[..., None])


LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda x, t: functional.cross_entropy(x.flatten(0, -2), t.flatten()),
    "log_softmax": lambda x, t: -picked(x.log_softmax(-1), t).float().mean(),
    "log of softmax": lambda x, t: -picked(x.softmax(-1), t).float().clamp(1e-9).log().mean(),
    "logsumexp": lambda x, t: (x.logsumexp(-1) - picked(x, t)[..., 0]).float().mean(),
    "squares": lambda x, t: functional.mse_loss(x[..., 0], (t / 64).to(x.dtype)),
}
"""Losses of logits in the dtype that they are given in."""


class WithLoss(Dense):
    """Computes its own loss in a dtype, as models of `transformers` do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return functional.cross_entropy(logits.to(self.dtype).flatten(0, -2), tokens.flatten())


class NarrowHead(Dense):
    """A head in 16 bits on a model in fp32."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.block(self.embed(tokens)).to(BF16)
        return functional.linear(x, self.head.weight.to(BF16))


def head(model: nn.Module | None = None, scale: float = 1.0, autocast: bool = False) -> zerodrift.Observation:
    model = dense() if model is None else model
    with torch.no_grad():
        model.get_submodule("head").weight.mul_(scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if autocast:
        model.forward = torch.autocast("cpu", BF16)(model.forward)
    return observed(model, optimizer)


def rollout(dtype: torch.dtype) -> zerodrift.Observation:
    """Take log-probabilities of a copy of the model before the first step."""
    model, tokens, targets = dense(), *batch(0, 0)

    def clipped(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return -(picked(logits.log_softmax(-1), targets) - old).exp().clamp(0.8, 1.2).mean()

    with zerodrift.observe() as seen:
        with torch.no_grad():
            old = picked(copy.deepcopy(model)(tokens).to(dtype).log_softmax(-1), targets).float()
        train(model, loss=clipped)
    return seen


# --- whole numbers and statistics -----------------------------------------------------------------------

In = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
SINES = torch.ones(16).div(64)

POSITIONS: dict[str, In] = {
    "arange": lambda x, dtype: torch.arange(500, dtype=dtype)[-8:, None] * SINES.to(dtype),
    "linspace": lambda x, dtype: torch.linspace(0, 499, 500, dtype=dtype)[-8:, None] * SINES.to(dtype),
    "cast": lambda x, dtype: torch.arange(500)[-8:, None].to(dtype) * SINES,
    "by way of fp32": lambda x, dtype: torch.arange(500)[-8:, None].float().to(dtype) * SINES,
}
"""Angles of positions that are whole numbers up to 499."""

PARTS: dict[str, In] = {
    "parts": lambda x, dtype: torch.arange(0, 1, 0.01, dtype=dtype)[-8:, None] * SINES.to(dtype),
    "small": lambda x, dtype: torch.arange(200)[-8:, None].to(dtype) * SINES,
}
"""The same of numbers that are not whole, or that 16 bits hold."""

STATISTICS: dict[str, In] = {
    "root mean square": lambda x, dtype: x * x.to(dtype).square().mean(-1, keepdim=True).rsqrt(),
    "variance": lambda x, dtype: x * torch.var_mean(x.to(dtype), -1, keepdim=True)[0] ** -0.5,
    "deviation": lambda x, dtype: x / x.to(dtype).std(-1, keepdim=True),
    "running sum": lambda x, dtype: x + x.to(dtype).repeat(1, 9, 1).cumsum(1)[:, :8] / 64,
}
"""Function of activations or of their positions that a model computes in a dtype."""


class Counting(Dense):
    """Computes something by hand in front of the norm."""

    def __init__(self, made: In, dtype: torch.dtype) -> None:
        super().__init__()
        self.made, self.dtype = made, dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(self.block(x + self.made(x, self.dtype).float()))


def given(autocast: bool) -> zerodrift.Observation:
    """Train on whole numbers, with weights of norms and directions, and a bias that a norm takes away."""
    torch.manual_seed(0)
    first = nn.utils.parametrizations.weight_norm(nn.Linear(1, 4))
    model = nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 1))
    numbers, optimizer = torch.arange(500.0)[:, None], torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(*_: torch.Tensor) -> None:
        with torch.autocast("cpu", BF16, enabled=autocast):
            out = model(numbers)
        (out.float() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return observed_steps(step)


# --- loss scales ----------------------------------------------------------------------------------------


def scaled(
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
    before: Callable[[Any, torch.optim.Optimizer, nn.Module], Any] = nothing,
    steps: bool = True,
    power: int = 10,
) -> zerodrift.Observation:
    """Train under autocast to fp16; `before` is called before the step, which a `GradScaler` takes."""
    model, scaler = dense(), torch.amp.GradScaler("cpu", init_scale=2.0**power)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=power == 60)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.autocast("cpu", FP16):
            logits = model(tokens)
        loss = scale(loss_of(logits, targets))
        (scaler.scale(loss) if steps else loss).backward()
        before(scaler, optimizer, model)
        scaler.step(optimizer) if steps else optimizer.step()
        scaler.update() if steps else None
        optimizer.zero_grad()

    return observed_steps(step)


RUNNING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a mean": lambda mean, x: 0.9 * mean + 0.1 * x,
    "a sum": lambda total, x: total + x,
}
"""Assignments of a script to a value that it keeps from one step to the next."""

REPLACED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a copy": lambda last, x: last.copy_(x),
    "a maximum": lambda most, x: torch.maximum(most, x) * 1,
}
"""Assignments that add nothing to the value of the last step."""


def running(kind: str, dtype: torch.dtype) -> zerodrift.Observation:
    """Keep a running value of the logits, which is another tensor in every step."""
    model = dense()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = [torch.zeros(VOCABULARY, dtype=dtype)]

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        logits = model(tokens)
        loss_of(logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept[0] = {**RUNNING, **REPLACED}[kind](kept[0], logits.detach().mean((0, 1)).to(dtype))

    return observed_steps(step)


def norm_by_hand(model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.clone().norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((1e3 / (norm + 1e-6)).clamp(max=1.0))


def clip(model: nn.Module) -> None:
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)


def unscaled(scaler: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    scaler.unscale_(optimizer)
    clip(model)


# --- optimizers ------------------------------------------------------------------------------------------


def numbers(key: str, dtype: torch.dtype) -> zerodrift.Observation:
    """Keep the rate of a group, or a counter of its state, in a tensor of this dtype."""
    model = dense()
    rate = torch.tensor(1e-3, dtype=dtype) if key == "lr" else 1e-3
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)

    def after() -> None:
        for state in optimizer.state.values() if key == "step" else ():
            state["step"] = state["step"].to(dtype)

    return observed(model, optimizer, after=after)


class Around(torch.optim.Optimizer):
    """Has an optimizer of the same parameters, whose step its own takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1e-3})
        self.inner = torch.optim.AdamW(list(model.parameters())[2:], lr=1e-3)
        self.rest = torch.optim.SGD(list(model.parameters())[:2], lr=1e-3)

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.rest.step()


def closures() -> zerodrift.Observation:
    """The first forward runs in the first step."""
    model = dense()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=2)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = loss_of(model(tokens), targets)
            value.backward()
            return value

        optimizer.step(closure)

    return observed_steps(step)


# --- values that rest --------------------------------------------------------------------------------


def parked(dtype: torch.dtype) -> zerodrift.Observation:
    """Offload states between steps."""
    model, copies = dense(), list[dict[str, torch.Tensor]]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def before() -> None:
        for state, held in zip(optimizer.state.values(), copies, strict=True):
            state.update({key: value.float() for key, value in held.items()})

    def after() -> None:
        states = optimizer.state.values()
        copies[:] = [{key: state[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")} for state in states]

    return observed(model, optimizer, before=before, after=after)


def rounded_weights(write: Callable[[torch.Tensor], Any]) -> zerodrift.Observation:
    model = dense()
    after = torch.no_grad()(lambda: [write(parameter) for parameter in model.parameters()])
    return observed(model, after=after)


def rounded_gradients(round_: Callable[[torch.Tensor], torch.Tensor]) -> zerodrift.Observation:
    model = dense()

    def before() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = round_(parameter.grad)

    return observed(model, before=before)


def gradients_in_a_hook(round_: Callable[[torch.Tensor], torch.Tensor]) -> zerodrift.Observation:
    model = dense()
    for parameter in model.parameters():
        parameter.register_hook(round_)
    return observed(model)


def gradients_between_modules(
    round_: Callable[[torch.Tensor], torch.Tensor], when: str = "backward_hook"
) -> zerodrift.Observation:
    model = dense()
    hook = getattr(model.down, f"register_full_{when}")
    hook(lambda module, gradients, *_: tuple(map(round_, gradients)))
    return observed(model)


def added(dtype: torch.dtype) -> zerodrift.Observation:
    """Add the gradients of four micro-batches, one row each, in tensors of the script's own."""
    model = dense()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        sums = [torch.zeros_like(parameter, dtype=dtype) for parameter in model.parameters()]
        for micro in range(4):
            loss_of(model(tokens[micro : micro + 1]), targets[micro : micro + 1]).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                total.add_(parameter.grad.to(dtype))
            model.zero_grad()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total.float() / 4
        optimizer.step()
        optimizer.zero_grad()

    return observed_steps(step)
