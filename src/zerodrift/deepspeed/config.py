"""Read the config that was passed to `initialize`, in any form that DeepSpeed accepts.

A config is a dict, a file (JSON, YAML or Hjson) or base64 of JSON, in one of four arguments. The keys of
`zerodrift run` are added. `zerodrift.config` interprets the keys.

Invariant: the caller's object is not changed, and a replaced value is logged.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zerodrift.alias import run_settings
from zerodrift.config import Additions, Config, collect_written, nest, parse_json, shown, tree_of
from zerodrift.deepspeed.tools.functions import logger
from zerodrift.errors import ConfigError, ZerodriftError
from zerodrift.optim import VALID_LR_SCHEDULES, WARMUP_LOG_RATE, is_warmup_type

MANAGED = "managed_gradient_accumulation"
"""A key for `DeepSpeedEngine.step`, which the plan does not know."""


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
    source = collect_written(value) if isinstance(value, Config) else _decoded(value)
    heading, written, problems = tree_of(source, "config")
    problems.raise_as(ConfigError, heading)
    for key in nest(written):
        logger.warning("`%s: %s` is ignored: %s", key.path, shown(key.value), key.because)
    scheduler = written.get("scheduler")
    if isinstance(scheduler, dict) and scheduler.get("type") in VALID_LR_SCHEDULES:
        _respell_warmup(scheduler.get("params"))
    return written


def _decoded(value: Any) -> Any:
    """Decode base64 of JSON or Hjson, as launchers pass it. Return anything else unchanged."""
    if isinstance(value, str) and not os.path.exists(value):
        with contextlib.suppress(ConfigError, ValueError):
            decoded = parse_json(base64.urlsafe_b64decode(value).decode("utf-8"), "config")
            return decoded if isinstance(decoded, dict) else value
    return value


def _respell_warmup(params: Any) -> None:
    kind = params.get("warmup_type") if isinstance(params, dict) else None
    if isinstance(kind, str) and kind != "auto" and not is_warmup_type(kind):
        where = "scheduler.params.warmup_type"
        logger.warning("`%s` %s is unknown: using %r", where, shown(kind), WARMUP_LOG_RATE)
        params["warmup_type"] = WARMUP_LOG_RATE


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
