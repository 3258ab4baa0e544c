"""What DeepSpeed takes in a config beside what its pages say: enums, old spellings, words it does not know.

Invariant: what the caller passed is not changed, and whatever is read otherwise than written is said.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from zerodrift.config.plain import shown
from zerodrift.deepspeed.utils.logging import logger
from zerodrift.optim.schedules import VALID_LR_SCHEDULES, WARMUP_LOG_RATE, is_warmup_type

MANAGED = "managed_gradient_accumulation"
"""Not the plan's affair: `DeepSpeedEngine.step` obeys it."""

_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_PIN = "cpu_offload_use_pin_memory"


def understood(written: dict[str, Any]) -> dict[str, Any]:
    """The config in the spellings that `config` knows."""
    config: dict[str, Any] = _plain(written)
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        _offloads(zero)
    scheduler = config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    is_deepspeeds = isinstance(scheduler, dict) and scheduler.get("type") in VALID_LR_SCHEDULES
    kind = params.get("warmup_type") if is_deepspeeds and isinstance(params, dict) else None
    if isinstance(params, dict) and isinstance(kind, str) and kind != "auto" and not is_warmup_type(kind):
        where = "scheduler.params.warmup_type"
        logger.warning("`%s` is %s, which is none: it is %r", where, shown(kind), WARMUP_LOG_RATE)
        params["warmup_type"] = WARMUP_LOG_RATE
    return config


def _plain(value: Any) -> Any:
    """Members of enums as their values, in dicts and lists of our own; a dict keeps its class."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        copied = value.copy() if type(value) is dict else _same_kind(value)
        for key, item in value.items():
            copied[key] = _plain(item)
        return copied
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _same_kind(value: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of a dict that knows how it was written."""
    copied = type(value)(value)
    copied.__dict__.update(getattr(value, "__dict__", {}))
    return copied


def _offloads(zero: dict[str, Any]) -> None:
    """`cpu_offload: true` and its kin, which DeepSpeed deprecated and still reads."""
    pinned = zero.pop(_PIN, None) if isinstance(zero.get(_PIN), bool) else None
    for old, new in _OFFLOAD.items():
        if not isinstance(zero.get(old), bool):
            continue
        if zero.pop(old) and zero.get(new) is None:
            logger.warning('`zero_optimization.%s` is old: write `"%s": {"device": "cpu"}`', old, new)
            zero[new] = {"device": "cpu"} if pinned is None else {"device": "cpu", "pin_memory": pinned}
