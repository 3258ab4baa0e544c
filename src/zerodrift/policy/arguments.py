"""The arguments of the `optimizer` and `scheduler` blocks: the names of each type, and the values they
accept.

Wrong arguments are refused when the config is resolved, before any process starts. Optimizers and schedules
set their own defaults.

Invariant: arguments that pass `check_arguments` build without an error; nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerodrift.config.plain_tree import join, shown
from zerodrift.errors import Problems, did_you_mean
from zerodrift.optimizers import SGD, TYPES, of_type

MOST = 3.4e38
"""Largest number; updates are computed in fp32."""


@dataclass(frozen=True, slots=True)
class Argument:
    words: str
    fits: Callable[[Any], bool]
    integer: bool = False
    """Whether the argument is a whole number, which configs also write as `2e3`."""
    do: str = ""


def _number(value: Any, least: float = 0.0) -> bool:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool)
    return fine and math.isfinite(value) and least <= value <= MOST


def _numbers(value: Any, fits: Callable[[Any], bool] = _number) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(fits, value))


def _is_fraction(value: Any) -> bool:
    return _number(value) and value < 1


def _count(words: str, least: int, most: int = 2**31 - 1) -> Argument:
    return Argument(
        words, lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v <= most, True
    )


def _word(*words: str) -> Argument:
    return Argument(" or ".join(words), lambda value: isinstance(value, str) and value in words)


def _only(value: bool) -> Argument:
    return Argument(
        f"{value} or left out",
        lambda given: given is value,
        do="Build the optimizer yourself and pass it to `initialize`.",
    )


NUMBER = Argument("a number of at least 0", _number)
BELOW = Argument("a number of at least 0, and below the rate of the optimizer", _number)
SIGNED = Argument("a number", lambda value: _number(value, -MOST))
ABOVE = Argument("a number above 0", lambda value: _number(value) and value > 0)
FLAG = Argument("true or false", lambda value: isinstance(value, bool))
BETAS = Argument("two numbers in [0, 1)", lambda value: _numbers(value, _is_fraction) and len(value) == 2)
STEPS = _count("a whole number above 0", 1)
STAIRS = _count("a whole number of at least 0", 0)
LAST = _count("a whole number of at least -1", -1)
RATES = Argument(
    "a number of at least 0, or a list of them, one per parameter group",
    lambda value: _number(value) or _numbers(value),
)
MOMENTA = Argument(
    "a number in [0, 1), or a list of them, one per parameter group",
    lambda value: _is_fraction(value) or _numbers(value, _is_fraction),
)
WARMUP_TYPE = _word("log", "linear")
CURVE = _word("linear", "cosine", "1-sqrt")
SHARE = Argument("a number from 0 to 1", lambda value: _number(value) and value <= 1)

Table = Mapping[str, Argument]

ANY: Table = {
    "adam_w_mode": FLAG,
    "torch_adam": FLAG,
    "foreach": FLAG,
    "fused": FLAG,
    "fp32_optimizer_states": _only(True),
    "bias_correction": _only(True),
    "amsgrad": _only(False),
}
"""Arguments that every elementwise optimizer accepts, some at one value only."""

_OF_OPTIMIZERS: Table = {
    **dict.fromkeys(("lr", "muon_lr", "adam_lr", "weight_decay", "momentum", "eps", "ns_eps"), NUMBER),
    **dict.fromkeys(("maximize", "nesterov"), FLAG),
    "betas": BETAS,
    "dampening": SIGNED,
    "ns_coefficients": Argument(
        "three numbers", lambda value: _numbers(value, SIGNED.fits) and len(value) == 3
    ),
    "ns_steps": _count("a whole number from 1 to 99", 1, 99),
    "ns_dtype": _word("bf16", "fp32"),
    "ns_method": _word("gram", "standard"),  # two ways to the same polynomial, which is computed as it is
    "adjust_lr_fn": _word("original", "match_rms_adamw"),
}

OPTIMIZERS: Mapping[str, Table] = {
    name: {key: _OF_OPTIMIZERS[key] for key in of_type(name).arguments} for name in TYPES.values()
}

_WARMUP: Table = {"warmup_num_steps": STEPS, "warmup_type": WARMUP_TYPE, "last_batch_iteration": LAST}

_HF_WARMUP: Table = {"num_warmup_steps": STAIRS, "last_batch_iteration": LAST}
_HF_LENGTH: Table = {**_HF_WARMUP, "num_training_steps": STEPS}
_HF_COSINE: Table = {**_HF_LENGTH, "num_cycles": ABOVE}
_HF_LEAST: Table = {**_HF_COSINE, "min_lr": BELOW, "min_lr_rate": SHARE}

SCHEDULES: Mapping[str, Table] = {
    "WarmupLR": {**_WARMUP, "warmup_min_lr": RATES, "warmup_max_lr": RATES},
    "WarmupDecayLR": {**_WARMUP, "total_num_steps": STEPS, "warmup_min_lr": RATES, "warmup_max_lr": RATES},
    "WarmupCosineLR": {
        **_WARMUP,
        "total_num_steps": STEPS,
        "warmup_min_ratio": NUMBER,
        "cos_min_ratio": NUMBER,
    },
    "OneCycle": {
        "cycle_min_lr": RATES,
        "cycle_max_lr": RATES,
        "decay_lr_rate": NUMBER,
        "cycle_first_step_size": ABOVE,
        "cycle_second_step_size": NUMBER,
        "cycle_first_stair_count": STAIRS,
        "cycle_second_stair_count": STAIRS,
        "decay_step_size": NUMBER,
        "cycle_momentum": FLAG,
        "cycle_min_mom": MOMENTA,
        "cycle_max_mom": MOMENTA,
        "decay_mom_rate": NUMBER,
        "last_batch_iteration": LAST,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": RATES,
        "lr_range_test_step_size": STEPS,
        "lr_range_test_step_rate": NUMBER,
        "lr_range_test_staircase": FLAG,
        "last_batch_iteration": LAST,
    },
    "constant": {"last_batch_iteration": LAST},
    "constant_with_warmup": _HF_WARMUP,
    "linear": _HF_LENGTH,
    "cosine": _HF_COSINE,
    "cosine_with_restarts": {**_HF_LENGTH, "num_cycles": STEPS},
    "cosine_with_min_lr": _HF_LEAST,
    "cosine_warmup_with_min_lr": {**_HF_LEAST, "warmup_lr_rate": SHARE},
    "polynomial": {**_HF_LENGTH, "lr_end": BELOW, "power": NUMBER},
    "inverse_sqrt": {**_HF_WARMUP, "timescale": STEPS},
    "warmup_stable_decay": {
        **_HF_LENGTH,
        "num_decay_steps": STEPS,
        "num_stable_steps": STAIRS,
        "warmup_type": CURVE,
        "decay_type": CURVE,
        "min_lr_ratio": SHARE,
        "num_cycles": ABOVE,
    },
}

ALIASES: Mapping[str, str] = {"wsd": "warmup_stable_decay"}

REQUIRED: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("linear", "cosine", "cosine_with_restarts", "polynomial"), ("num_training_steps",)),
    **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), ("num_training_steps",)),
    "warmup_stable_decay": ("num_decay_steps",),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}


def check_arguments(
    where: str, kind: str, params: Mapping[str, Any], problems: Problems, unknown: Collection[str] = ()
) -> dict[str, Any]:
    """Check the arguments of an optimizer or a schedule: null is left out, and `2e3` becomes a whole number.

    Wrong arguments go to `problems`, each with its path under `where`. `unknown` names arguments that are
    written but have no value yet.
    """
    own = OPTIMIZERS.get(kind) or SCHEDULES[kind]
    rest = None if kind in SCHEDULES else of_type(kind).rest
    table = own if kind in SCHEDULES or rest is not None else {**own, **ANY}
    values: dict[str, Any] = {}
    for key, value in params.items():
        if value is None:
            continue
        path, argument = join(where, key), table.get(key)
        if argument is None:
            whose = kind if rest is None else f"{kind} or of its {rest.name}"
            must = f"must be an argument of {whose}: {', '.join(own)}"
            problems.add(path, must, do=did_you_mean(key, table))
            continue
        if argument.integer and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not argument.fits(value):
            problems.add(path, f"must be {argument.words}", got=shown(value), do=argument.do)
            continue
        values[key] = value
    for key in REQUIRED.get(kind, ()):
        if params.get(key) is None and key not in unknown:
            problems.add(join(where, key), f"must be given: {table[key].words}")
    if kind in SCHEDULES:
        _check_together(where, kind, {**dict.fromkeys(unknown), **values}, problems)
    plain_momentum = values.get("momentum") and not values.get("dampening")
    if kind in SGD.types and values.get("nesterov") and not plain_momentum:
        must = "must be left out without `momentum`, or with `dampening`"
        problems.add(join(where, "nesterov"), must, got="true")
    return values


def _check_together(where: str, kind: str, given: Mapping[str, Any], problems: Problems) -> None:
    """Check arguments of a schedule that depend on each other; None is a number that is not known yet."""

    def one_of(first: str, second: str) -> bool:
        if (first in given) != (second in given):
            return True
        got = "both" if first in given else "neither"
        problems.add(join(where, first), f"must be given, or `{second}`, and not both", got=got)
        return False

    if kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        one_of("min_lr", "min_lr_rate")
    if kind == "warmup_stable_decay" and one_of("num_training_steps", "num_stable_steps"):
        total, decay = given.get("num_training_steps"), given.get("num_decay_steps")
        needed = (decay or 0) + (given.get("num_warmup_steps") or 0)
        if total is not None and needed > total:
            must = "must have room for `num_warmup_steps` and `num_decay_steps`"
            got = f"{total}, where they are {needed}"
            problems.add(join(where, "num_training_steps"), must, got=got)
