"""Read the config that was passed to `initialize`, in any form that DeepSpeed accepts.

A config is a dict, a file (JSON, YAML or Hjson) or base64 of JSON, in one of four arguments. Keys that
accelerate and TRL write with dots are moved into their blocks, deprecated keys are replaced, and the keys of
`zerodrift run` are added. `zerodrift.config` interprets the keys.

Invariant: the caller's object is not changed, and a replaced value is logged.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import enum
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zerodrift.alias import run_settings
from zerodrift.config import Additions, Config, is_path, parse_json, plain, read, shown
from zerodrift.deepspeed.tools.functions import logger
from zerodrift.errors import ConfigError, Problems, ZerodriftError
from zerodrift.optim import VALID_LR_SCHEDULES, WARMUP_LOG_RATE, is_warmup_type

MANAGED = "managed_gradient_accumulation"
"""A key for `DeepSpeedEngine.step`, which the plan does not know."""

OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def written_config(args: Any, config: Any, config_params: Any) -> dict[str, Any]:
    """Return the config that was passed, with the keys that `zerodrift.config` knows."""
    ways = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = {name: value for name, value in ways.items() if value is not None}
    if not given:
        do = "Pass `config=` to `initialize`, or `--deepspeed_config` on the command line."
        raise ConfigError("config", "must be given", got="none", do=do)
    if len(given) > 1:
        raise ConfigError("config", "must be given once", got=" and ".join(given), do="Keep one.")
    (value,) = given.values()
    written: dict[str, Any] = _without_enums(_nested(_as_dict(value)))
    if isinstance(written.get("zero_optimization"), dict):
        _respell_offload(written["zero_optimization"])
    scheduler = written.get("scheduler")
    if isinstance(scheduler, dict) and scheduler.get("type") in VALID_LR_SCHEDULES:
        _respell_warmup(scheduler.get("params"))
    return written


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Config):
        return plain(value, Problems())
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, (str, os.PathLike)):
        must = "must be a path, a dict or a `zerodrift.Config`"
        raise ConfigError("config", must, got=type(value).__name__)
    parsed = _decode(value) if isinstance(value, str) and not os.path.exists(value) else None
    if parsed is None:
        parsed = read(value)
    if not isinstance(parsed, dict):
        raise ConfigError(os.fspath(value), "must hold a block of keys at its top")
    return parsed


def _decode(text: str) -> dict[str, Any] | None:
    """Decode base64 of JSON or Hjson, as launchers pass it. Return None for anything else."""
    try:
        config = parse_json(base64.urlsafe_b64decode(text).decode("utf-8"), "config")
    except (ConfigError, ValueError):
        return None
    return config if isinstance(config, dict) else None


# --- spellings --------------------------------------------------------------------------------------------


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """Move top-level keys such as `zero_optimization.stage` into their blocks. A value in the block wins."""
    tree: Any = copy.copy(config)  # keeps the record of keys that were written twice
    for key, value in config.items():
        if not isinstance(key, str) or "." not in key or not is_path(key):
            continue
        *blocks, last = key.split(".")
        place: Any = tree
        for block in blocks:
            below = place.get(block)
            if not isinstance(below, (dict, type(None))):
                break
            below = {} if below is None else copy.copy(below)
            place[block] = place = below
        else:
            del tree[key]
            if place.get(last) in (None, "auto"):
                place[last] = value
            elif place[last] != value:
                logger.warning("`%s: %s` is ignored: its block has %s", key, shown(value), shown(place[last]))
    return tree


def _without_enums(value: Any) -> Any:
    """Replace members of enums by their values, in copies. A dict keeps its class and attributes."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _without_enums(item) for key, item in value.items()})
        return copied
    if isinstance(value, (list, tuple)):
        return [_without_enums(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _respell_warmup(params: Any) -> None:
    kind = params.get("warmup_type") if isinstance(params, dict) else None
    if isinstance(kind, str) and kind != "auto" and not is_warmup_type(kind):
        where = "scheduler.params.warmup_type"
        logger.warning("`%s` %s is unknown: using %r", where, shown(kind), WARMUP_LOG_RATE)
        params["warmup_type"] = WARMUP_LOG_RATE


def _respell_offload(zero: dict[str, Any]) -> None:
    """Replace `cpu_offload` and `cpu_offload_param`, which DeepSpeed deprecated and still reads."""
    pin_key = "cpu_offload_use_pin_memory"
    pinned = zero.pop(pin_key, None) if isinstance(zero.get(pin_key), bool) else None
    for old, new in OLD_OFFLOAD.items():
        if isinstance(zero.get(old), bool) and zero.pop(old) and zero.get(new) is None:
            logger.warning('`zero_optimization.%s` is deprecated: write `"%s": {"device": "cpu"}`', old, new)
            zero[new] = {"device": "cpu"} if pinned is None else {"device": "cpu", "pin_memory": pinned}


# --- `zerodrift run` --------------------------------------------------------------------------------------


@contextlib.contextmanager
def with_additions(passed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the config with the keys that `zerodrift run` adds. Errors inside name its flags."""
    given = run_settings()
    if given is None:
        yield passed
        return
    given.mark_reached("initialized")
    additions = Additions(dict(given.config), given.flags)
    precision = passed.get("precision")
    rules = precision.get("rules") if isinstance(precision, Mapping) else None
    try:
        yield additions.merge_into(passed)
    except ZerodriftError as error:
        flagged = additions.name_flags(error, len(rules or ()))
        if flagged is error:
            raise
        raise flagged from None
