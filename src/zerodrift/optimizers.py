"""Every optimizer as data: what configs call it, its moments, its arguments, and what it needs.

What an `optimizer` block may say, how many moments the bill counts and an updater allocates, how a checkpoint
names them, and which backends take an optimizer: all of it is read from here. The arithmetic is
`ARITHMETIC` of `optim/updates.py`, or `optim/muon.py` for what works on matrices; what an argument may be is
in `policy/arguments.py`.

Invariant: one record per algorithm, so records are compared with `is`; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Algorithm:
    """What one optimizer is, before any tensor."""

    name: str
    """As torch spells it."""
    types: tuple[str, ...]
    """What `optimizer.type` says for it, in any case."""
    arguments: tuple[str, ...]
    """What its block takes."""
    defaults: Mapping[str, Any]
    """DeepSpeed's, whose block it is: its AdamW does not decay unless told. The keys are torch's."""
    moments: tuple[str, ...]
    """torch's names of what is kept for every element."""
    moments_with: str = ""
    """The argument without which there are none: SGD's momentum. `""` where moments are always kept."""
    beta2: bool = False
    """Whether a second moment decays by a beta2, which bounds how it may be rounded."""
    matrices: bool = False
    """Whether an element's update depends on the matrix that it is in."""
    rest: Algorithm | None = None
    """For one that works on matrices: what updates everything else, with the same block."""
    torch: str = ""
    """The class of `torch.optim` that does the same; `""` where torch has none."""

    @property
    def kind(self) -> str:
        """What checkpoints call it."""
        return self.name.lower()

    def __str__(self) -> str:
        return self.kind

    def kept(self, groups: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """The moments that are kept for parameter groups with such arguments."""
        if self.moments_with and not any(group.get(self.moments_with) for group in groups):
            return ()
        return self.moments


_RATES = ("lr", "weight_decay", "maximize")
_ADAM_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

ADAMW = Algorithm(
    "AdamW",
    types=("AdamW",),
    arguments=(*_RATES, "betas", "eps"),
    defaults=_ADAM_DEFAULTS,
    moments=("exp_avg", "exp_avg_sq"),
    beta2=True,
    torch="AdamW",
)
"""Adam with decoupled weight decay."""

ADAM = Algorithm(
    "Adam",
    types=("Adam", "FusedAdam", "CPUAdam"),
    arguments=(*_RATES, "betas", "eps"),
    defaults=_ADAM_DEFAULTS,
    moments=("exp_avg", "exp_avg_sq"),
    beta2=True,
    torch="Adam",
)
"""Adam with weight decay as an L2 term in the gradient. In a block its types mean AdamW: see `meant`."""

SGD = Algorithm(
    "SGD",
    types=("SGD",),
    arguments=(*_RATES, "momentum", "dampening", "nesterov"),
    defaults={"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    moments=("momentum_buffer",),
    moments_with="momentum",
    torch="SGD",
)
"""Momentum, dampening, Nesterov; weight decay as an L2 term."""

LION = Algorithm(
    "Lion",
    types=("Lion",),
    arguments=(*_RATES, "betas"),
    defaults={"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    moments=("exp_avg",),
)
"""The sign of a blend of gradient and momentum, with decoupled weight decay."""

MUON = Algorithm(
    "Muon",
    types=("Muon",),
    arguments=(
        *("lr", "weight_decay", "muon_lr", "adam_lr", "momentum", "eps", "ns_eps"),
        *("nesterov", "ns_coefficients", "ns_steps", "ns_dtype", "ns_method", "adjust_lr_fn", "betas"),
    ),
    defaults={},
    moments=("momentum_buffer",),
    matrices=True,
    rest=ADAMW,
    torch="Muon",
)
"""Momentum, made orthogonal. Its defaults are torch's, in `optim/muon.py`."""

ALGORITHMS = (ADAMW, ADAM, SGD, LION, MUON)

ELEMENTWISE = tuple(algorithm for algorithm in ALGORITHMS if not algorithm.matrices)
"""Those whose update of an element depends on that element alone."""

TYPES: Mapping[str, str] = {
    **{name.lower(): name for algorithm in ALGORITHMS for name in algorithm.types},
    "deepspeedcpuadam": "CPUAdam",
}
"""Every accepted `optimizer.type` in lower case -> how plans write it."""

_OF_TYPE = {name: algorithm for algorithm in ALGORITHMS for name in algorithm.types}


def of_type(name: str) -> Algorithm:
    """The optimizer that a plan's `optimizer.type`, or a row's `optimizer`, names."""
    return _OF_TYPE[name]


def meant(name: str, params: Mapping[str, Any]) -> Algorithm:
    """The same with its block's arguments: DeepSpeed decouples Adam's decay unless `adam_w_mode` is off."""
    algorithm = of_type(name)
    return ADAMW if algorithm is ADAM and params.get("adam_w_mode", True) else algorithm


def with_moments(names: Iterable[str]) -> tuple[Algorithm, ...]:
    """The elementwise optimizers that keep moments of exactly these names."""
    wanted = set(names)
    return tuple(algorithm for algorithm in ELEMENTWISE if set(algorithm.moments) == wanted)


def either(names: Iterable[str]) -> str:
    """`AdamW, Adam or SGD`, for messages."""
    *others, last = names
    return f"{', '.join(others)} or {last}"
