"""A caller's optimizer over tensors of our own: its class, options and attributes, without its constructor.

What a class asks of its caller at construction is not known, so nothing is constructed: attributes and groups
are copied, parameters and state exchanged. Hooks stay away, for what they do is done outside.

Invariant: a step of a stand-in, `undisturbed` and under `Watched`, changes nothing that the caller's
optimizer holds and no stream of random numbers, and sends nothing.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import types
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST = 1 << 16
"""Elements of a tensor that is copied for the sake of a rehearsal: more would be a model or its state."""

NO_LESS = 1e-5
"""A learning rate below it, as at the beginning of a warm-up, would hide what an update is."""

INSTEAD = 1e-2

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class CannotTellError(Exception):
    """A stand-in could not be made, or would not do what the optimizer does."""


class CommunicatesError(Exception):
    """A step wanted to send something."""


def hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a caller's functions run around each step."""
    return any(vars(optimizer).get(key) for key in _HOOKS)


def stand_in(
    optimizer: torch.optim.Optimizer, groups: Mapping[int, Sequence[nn.Parameter]]
) -> torch.optim.Optimizer:
    """The same optimizer with these groups only, over these parameters. A group that is left out is told to
    whoever has kept it as one of those that stay."""
    _refuse_other_step(optimizer)
    memo: dict[int, Any] = {}
    with _OnlySmall():
        copies = {number: _group(optimizer, number, groups[number], memo) for number in groups}
        some = next(iter(copies))
        for number, group in enumerate(optimizer.param_groups):
            taken = number if number in copies else some
            memo[id(group)] = copies[taken]
            memo[id(group["params"])] = copies[taken]["params"]
            for index, parameter in enumerate(group["params"]):
                memo[id(parameter)] = groups[taken][index % len(groups[taken])] if groups[taken] else None
        for each in nested(optimizer):
            memo[id(each)] = _bare(each)
        for each in nested(optimizer):
            _fill(each, memo[id(each)], groups, optimizer, list(copies.values()), memo)
    made: torch.optim.Optimizer = memo[id(optimizer)]
    return made


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    made = object.__new__(type(optimizer))
    assert isinstance(made, torch.optim.Optimizer)
    return made


def nested(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """It and the optimizers that it wraps, as Lookahead does, each once."""
    found: list[torch.optim.Optimizer] = []
    waiting = [optimizer]
    while waiting:
        each = waiting.pop()
        if any(each is other for other in found):
            continue
        found.append(each)
        for value in vars(each).values():
            held = value if isinstance(value, list | tuple) else [value]
            waiting += [inner for inner in held if isinstance(inner, torch.optim.Optimizer)]
    return found


def _group(
    optimizer: torch.optim.Optimizer, number: int, parameters: Sequence[nn.Parameter], memo: dict[int, Any]
) -> dict[str, Any]:
    group = optimizer.param_groups[number]
    made = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
    made["params"] = list(parameters)
    if "param_names" in made:
        made["param_names"] = [f"{number}.{index}" for index in range(len(parameters))]
    rate = made.get("lr")
    if isinstance(rate, torch.Tensor):
        rate.fill_(max(float(rate), INSTEAD) if abs(float(rate)) < NO_LESS else float(rate))
    elif isinstance(rate, float | int) and abs(rate) < NO_LESS:
        made["lr"] = INSTEAD
    return made


def _fill(
    original: torch.optim.Optimizer,
    made: torch.optim.Optimizer,
    groups: Mapping[int, Sequence[nn.Parameter]],
    outer: torch.optim.Optimizer,
    outer_groups: list[dict[str, Any]],
    memo: dict[int, Any],
) -> None:
    """Attributes of one of the nested, every tensor and group in them exchanged."""
    state: defaultdict[Any, Any] = defaultdict(dict)
    for number, parameters in groups.items():
        sources = outer.param_groups[number]["params"]
        first: Mapping[str, Any] = original.state.get(sources[0], {}) if sources else {}
        for parameter in parameters if first else ():
            state[parameter] = {key: _begun(value, parameter) for key, value in first.items()}
    own = original.param_groups
    if any(id(group) not in memo for group in own):
        raise CannotTellError(f"the {type(original).__name__} in it has parameter groups of its own")
    if original is outer or [id(group) for group in own] == [id(group) for group in outer.param_groups]:
        held = outer_groups
    else:
        held = list({id(memo[id(group)]): memo[id(group)] for group in own}.values())
    memo.setdefault(id(own), held)
    memo.setdefault(id(original.state), state)
    for key, value in vars(original).items():
        if key in _HOOKS:
            setattr(made, key, OrderedDict())
        elif key != "step":
            try:
                copied = copy.deepcopy(value, memo)
            except CannotTellError as error:
                raise CannotTellError(f"its `{key}` {error}") from None
            except Exception as error:
                raise CannotTellError(f"its `{key}` cannot be copied: {line(error)}") from None
            made.__dict__[key] = copied


def _begun(value: Any, parameter: nn.Parameter) -> Any:
    """What an optimizer has made before any step, of the size of another parameter."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return copy.deepcopy(value)
    some = value.detach().reshape(-1)[: parameter.numel()].to(parameter.device, copy=True)
    again = -(-parameter.numel() // max(some.numel(), 1))
    return some.repeat(again)[: parameter.numel()].view(parameter.shape)


def _refuse_other_step(optimizer: torch.optim.Optimizer) -> None:
    """One of the object's own would step the object itself. A schedule's only counts, and is left away."""
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        raise CannotTellError("its `step` was replaced on the object")


def step(optimizer: torch.optim.Optimizer) -> None:
    """Its class's step, without what torch has wrapped around that: hooks of the whole process."""
    function = type(optimizer).step
    if getattr(function, "hooked", False):
        function = getattr(function, "__wrapped__", function)
    types.MethodType(function, optimizer)()


class _OnlySmall(TorchFunctionMode):
    """Copies of large tensors are refused."""

    def __torch_function__(
        self, func: Any, kinds: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        copies = getattr(func, "__name__", "") in ("__deepcopy__", "clone")
        if copies and isinstance(args[0], torch.Tensor) and args[0].numel() > LARGEST:
            raise CannotTellError(f"holds a tensor of {args[0].numel():,} elements")
        return func(*args, **(kwargs or {}))


class Watched(TorchDispatchMode):
    """Every element draws the same number; other random numbers come from torch's stream. Nothing is sent."""

    def __init__(self, sizes: Collection[int]) -> None:
        super().__init__()
        self._sizes = sizes
        self.random = False
        """Whether there were any."""

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "c10d" in func.namespace:
            raise CommunicatesError(str(func))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.random = True
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        before = torch.get_rng_state()
        drawn = func(*args, **kwargs)
        if isinstance(drawn, torch.Tensor) and drawn.numel() in self._sizes:
            torch.set_rng_state(before)
            drawn.fill_(0.5 if drawn.is_floating_point() else 1)
        return drawn


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Streams of random numbers afterwards as before, no warnings, and nothing is compiled."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy is not None else None
    on = [device] if device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=on))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(array)


def begin_again() -> None:
    """The same random numbers as last time."""
    torch.default_generator.manual_seed(1)
    random.seed(1)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(1)


def line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
