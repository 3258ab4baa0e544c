"""The arguments of the `optimizer` and `scheduler` blocks, and the caller's numbers for keys that are "auto".

Wrong arguments are refused when the config is resolved, before any process starts. Optimizers and schedules
set their own defaults.

Invariant: arguments that pass `check_arguments` build without an error; after `require_all_used`, every
passed number replaces exactly one written "auto"; nothing here imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from zerodrift.config import Config, fields, join, plain, shown
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
STEPS = _count("a whole number above 0", 1)
STAIRS = _count("a whole number of at least 0", 0)
_EACH = ", or a list of them, one per parameter group"
RATES = Argument(f"a number of at least 0{_EACH}", lambda v: _number(v) or _numbers(v))
MOMENTA = Argument(f"a number in [0, 1){_EACH}", lambda v: _is_fraction(v) or _numbers(v, _is_fraction))
SHARE = Argument("a number from 0 to 1", lambda value: _number(value) and value <= 1)

Table = Mapping[str, Argument]


def _each(argument: Argument, names: str) -> Table:
    return dict.fromkeys(names.split(), argument)


ANY: Table = {
    **_each(FLAG, "adam_w_mode torch_adam foreach fused"),
    **_each(_only(True), "fp32_optimizer_states bias_correction"),
    "amsgrad": _only(False),
}
"""Arguments that every elementwise optimizer accepts, some at one value only."""

_ARGUMENTS: Table = {
    **_each(NUMBER, "lr muon_lr adam_lr weight_decay momentum eps ns_eps"),
    **_each(FLAG, "maximize nesterov"),
    "betas": Argument("two numbers in [0, 1)", lambda v: _numbers(v, _is_fraction) and len(v) == 2),
    "dampening": SIGNED,
    "ns_coefficients": Argument("three numbers", lambda v: _numbers(v, SIGNED.fits) and len(v) == 3),
    "ns_steps": _count("a whole number from 1 to 99", 1, 99),
    "ns_dtype": _word("bf16", "fp32"),
    "ns_method": _word("gram", "standard"),  # two ways to the same polynomial, which is computed as it is
    "adjust_lr_fn": _word("original", "match_rms_adamw"),
    **_each(STEPS, "warmup_num_steps total_num_steps num_training_steps timescale num_decay_steps"),
    **_each(STEPS, "lr_range_test_step_size"),
    **_each(STAIRS, "num_warmup_steps num_stable_steps"),
    **_each(STAIRS, "cycle_first_stair_count cycle_second_stair_count decay_step_size"),
    **_each(_count("a whole number of at least -1", -1), "last_batch_iteration"),
    **_each(RATES, "warmup_min_lr warmup_max_lr cycle_min_lr cycle_max_lr lr_range_test_min_lr"),
    **_each(MOMENTA, "cycle_min_mom cycle_max_mom"),
    **_each(NUMBER, "warmup_min_ratio cos_min_ratio decay_lr_rate cycle_second_step_size decay_mom_rate"),
    **_each(NUMBER, "lr_range_test_step_rate power"),
    **_each(ABOVE, "cycle_first_step_size num_cycles"),
    **_each(FLAG, "cycle_momentum lr_range_test_staircase"),
    **_each(BELOW, "min_lr lr_end"),
    **_each(SHARE, "min_lr_rate warmup_lr_rate min_lr_ratio"),
    "warmup_type": _word("log", "linear"),
}
"""Argument of an optimizer or a schedule -> the values that it accepts."""

OPTIMIZERS: Mapping[str, Table] = {
    name: {key: _ARGUMENTS[key] for key in of_type(name).arguments} for name in TYPES.values()
}


def _takes(names: str, **other: Argument) -> Table:
    """Return the arguments of a schedule; `other` are those that mean something else in it."""
    return {name: other.get(name) or _ARGUMENTS[name] for name in names.split()}


_WARMUP = "warmup_num_steps warmup_type last_batch_iteration"
_HF_WARMUP = "num_warmup_steps last_batch_iteration"
_HF_LENGTH = f"{_HF_WARMUP} num_training_steps"
_HF_LEAST = f"{_HF_LENGTH} num_cycles min_lr min_lr_rate"
_CURVE = _word("linear", "cosine", "1-sqrt")

SCHEDULES: Mapping[str, Table] = {
    "WarmupLR": _takes(f"{_WARMUP} warmup_min_lr warmup_max_lr"),
    "WarmupDecayLR": _takes(f"{_WARMUP} total_num_steps warmup_min_lr warmup_max_lr"),
    "WarmupCosineLR": _takes(f"{_WARMUP} total_num_steps warmup_min_ratio cos_min_ratio"),
    "OneCycle": _takes(
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
        "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
        "cycle_max_mom decay_mom_rate last_batch_iteration"
    ),
    "LRRangeTest": _takes(
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
        "last_batch_iteration"
    ),
    "constant": _takes("last_batch_iteration"),
    "constant_with_warmup": _takes(_HF_WARMUP),
    "linear": _takes(_HF_LENGTH),
    "cosine": _takes(f"{_HF_LENGTH} num_cycles"),
    "cosine_with_restarts": _takes(f"{_HF_LENGTH} num_cycles", num_cycles=STEPS),
    "cosine_with_min_lr": _takes(_HF_LEAST),
    "cosine_warmup_with_min_lr": _takes(f"{_HF_LEAST} warmup_lr_rate"),
    "polynomial": _takes(f"{_HF_LENGTH} lr_end power"),
    "inverse_sqrt": _takes(f"{_HF_WARMUP} timescale"),
    "warmup_stable_decay": _takes(
        f"{_HF_LENGTH} num_decay_steps num_stable_steps warmup_type decay_type min_lr_ratio num_cycles",
        warmup_type=_CURVE,
        decay_type=_CURVE,
    ),
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
        is_one = (first in given) != (second in given)
        if not is_one:
            got = "both" if first in given else "neither"
            problems.add(join(where, first), f"must be given, or `{second}`, and not both", got=got)
        return is_one

    if kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        one_of("min_lr", "min_lr_rate")
    if kind == "warmup_stable_decay" and one_of("num_training_steps", "num_stable_steps"):
        total, decay = given.get("num_training_steps"), given.get("num_decay_steps")
        needed = (decay or 0) + (given.get("num_warmup_steps") or 0)
        if total is not None and needed > total:
            must = "must have room for `num_warmup_steps` and `num_decay_steps`"
            got = f"{total}, where they are {needed}"
            problems.add(join(where, "num_training_steps"), must, got=got)


# --- numbers of the caller for keys that are "auto" --------------------------------------------------------

AUTO = "auto"

AutoValues = Mapping[str, float | Sequence[float]]
"""The numbers for keys that are "auto", by dotted key; `optimizer.params.betas` takes a pair."""


class AutoNumbers:
    """The numbers that the caller passed for keys that are "auto"."""

    def __init__(self, given: AutoValues, problems: Problems) -> None:
        if not isinstance(given, Mapping):
            problems.add("auto", "must be a block of numbers by dotted key", got=shown(given))
            given = {}
        self._numbers = plain(given, problems)
        self._problems = problems
        self._auto_keys: set[str] = set()

    def _auto(self, key: str) -> Any:
        self._auto_keys.add(key)
        if key in self._numbers and self._numbers[key] != "auto":
            return self._numbers[key]
        must = "must be a number here: it is auto and nothing was passed for it"
        ways = f"`--auto {key}=...`, auto={{'{key}': ...}} in Python, or `auto: {{{key}: ...}}` in a job"
        do = f"Write the number, or pass it: {ways}."
        self._problems.add(key, must, got="'auto'", do=do)
        return None

    def value(self, key: str, written: Any) -> Any:
        """Return what is written, or the caller's number for "auto", checked as if written in the config."""
        number = self._auto(key) if written == AUTO else None
        if number is None:
            return None if written == AUTO else written
        kind = next(known.kind for known in fields.every_key(Config) if known.path == key)
        try:
            return fields.adapter(kind).validate_python(number)
        except ValidationError:
            one = not isinstance(number, (list, dict))
            must = fields.must(kind, number).replace(f' or "{AUTO}"', "") if one else "must be one number"
            self._problems.add(key, must, got=shown(number), do="Pass another.")
            return None

    def number(self, key: str, written: float | str | None, default: float) -> float:
        value = self.value(key, written)
        return default if value is None else float(value)

    def params(self, where: str, kind: str, params: Mapping[str, Any]) -> str:
        """Fill the autos of a block of arguments, check the block, and return it as JSON text."""
        filled = {
            name: self._auto(join(where, name)) if value == AUTO else value for name, value in params.items()
        }
        missing = {name for name, value in filled.items() if params[name] == AUTO and value is None}
        named = {name: value for name, value in filled.items() if name not in missing}
        return json.dumps(check_arguments(where, kind, named, self._problems, missing), sort_keys=True)

    def require_all_used(self) -> None:
        """Refuse a number for a key that is not auto, which would be ignored silently."""
        for key in self._numbers:
            if key not in self._auto_keys:
                must = "must be 'auto' in the config to take a passed value"
                do = did_you_mean(key, self._auto_keys) or "Or write the number in the config."
                self._problems.add(key, must, got=f"{shown(self._numbers[key])} passed", do=do)
