"""Table of optimizers: names in configs, moments, arguments and requirements.

`ARITHMETIC` of `optim/updates.py` and `optim/muon.py` hold their arithmetic, and `policy/arguments.py` the
ranges of their arguments.

Invariant: one record per algorithm, so records are compared with `is`; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Algorithm:
    """Description of one optimizer, without tensors."""

    name: str
    """Name in torch's spelling."""
    types: tuple[str, ...]
    """Values of `optimizer.type`, compared without case."""
    arguments: tuple[str, ...]
    """Arguments of its config block."""
    defaults: Mapping[str, Any]
    """Defaults of DeepSpeed under torch's names. Its AdamW has no weight decay by default."""
    moments: tuple[str, ...]
    """Names of the moments in torch."""
    moments_with: str = ""
    """Argument that turns moments on, such as SGD's momentum. `""` if moments are always kept."""
    beta2: bool = False
    """True if a second moment decays by beta2, which limits its rounding."""
    matrices: bool = False
    """True if an element's update depends on its whole matrix."""
    rest: Algorithm | None = None
    """Optimizer of parameters that are no matrices, for an optimizer of matrices."""
    torch: str = ""
    """Equal class of `torch.optim`, or `""`."""

    @property
    def kind(self) -> str:
        """Name in checkpoints."""
        return self.name.lower()

    def __str__(self) -> str:
        return self.kind

    def kept(self, groups: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return the moments that parameter groups with these arguments keep."""
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
"""Adam with weight decay as an L2 term in the gradient. Config blocks may mean AdamW: see `algorithm_for`."""

SGD = Algorithm(
    "SGD",
    types=("SGD",),
    arguments=(*_RATES, "momentum", "dampening", "nesterov"),
    defaults={"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    moments=("momentum_buffer",),
    moments_with="momentum",
    torch="SGD",
)
"""SGD with momentum, dampening, Nesterov, and weight decay as an L2 term."""

LION = Algorithm(
    "Lion",
    types=("Lion",),
    arguments=(*_RATES, "betas"),
    defaults={"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    moments=("exp_avg",),
)
"""Lion: the sign of a blend of gradient and momentum, with decoupled weight decay."""

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
"""Muon: orthogonalized momentum. Its defaults are torch's, in `optim/muon.py`."""

ALGORITHMS = (ADAMW, ADAM, SGD, LION, MUON)

ELEMENTWISE = tuple(algorithm for algorithm in ALGORITHMS if not algorithm.matrices)
"""Optimizers whose update of an element depends on that element alone."""

TYPES: Mapping[str, str] = {
    **{name.lower(): name for algorithm in ALGORITHMS for name in algorithm.types},
    "deepspeedcpuadam": "CPUAdam",
}
"""Accepted `optimizer.type` in lower case -> its spelling in plans."""

TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SparseAdam",
)  # fmt: skip
TORCH_SCHEDULES = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR",
    "MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR",
)  # fmt: skip
"""Classes that only torch has, and that a config of a DeepSpeed script may name."""

_OF_TYPE = {name: algorithm for algorithm in ALGORITHMS for name in algorithm.types}


def of_type(name: str) -> Algorithm:
    """Return the optimizer that a plan's `optimizer.type` or a row's `optimizer` names."""
    return _OF_TYPE[name]


def algorithm_for(name: str, params: Mapping[str, Any]) -> Algorithm:
    """Return the optimizer of a config block. Adam means AdamW unless `adam_w_mode` is off (DeepSpeed)."""
    algorithm = of_type(name)
    return ADAMW if algorithm is ADAM and params.get("adam_w_mode", True) else algorithm


def with_moments(names: Iterable[str]) -> tuple[Algorithm, ...]:
    """Return the elementwise optimizers with exactly these moments."""
    wanted = set(names)
    return tuple(algorithm for algorithm in ELEMENTWISE if set(algorithm.moments) == wanted)


def either(names: Iterable[str]) -> str:
    """Join names for messages: `AdamW, Adam or SGD`."""
    *others, last = names
    return f"{', '.join(others)} or {last}"
