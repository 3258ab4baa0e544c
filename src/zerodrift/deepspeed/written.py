"""The config as it was passed to `initialize`: by one of four ways, with what belongs to it.

It may be a dict, a file (JSON, YAML or Hjson), or base64 of one. Keys that accelerate and TRL write with dots
are put where they belong, and those of `zerodrift run` are added. What keys mean is `config`'s affair.

Invariant: what the caller passed is not changed.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerodrift.alias import errand
from zerodrift.config.additions import Additions
from zerodrift.config.known import is_path
from zerodrift.config.plain import plain, shown
from zerodrift.config.read import read
from zerodrift.config.schema import Config
from zerodrift.deepspeed import hjson
from zerodrift.deepspeed.spellings import understood
from zerodrift.deepspeed.utils.logging import logger
from zerodrift.errors import ConfigError, Problems, ZerodriftError


def written_config(args: Any, config: Any, config_params: Any) -> dict[str, Any]:
    """The one config that was passed."""
    return understood(nested(_passed(args, config, config_params)))


def _passed(args: Any, config: Any, config_params: Any) -> dict[str, Any]:
    ways = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = {name: value for name, value in ways.items() if value is not None}
    if not given:
        raise ConfigError(
            "config",
            "must be given",
            got="none",
            do="Pass `config=` to `initialize`, or `--deepspeed_config` on the command line.",
        )
    if len(given) > 1:
        raise ConfigError("config", "must be given once", got=" and ".join(given), do="Keep one.")
    (value,) = given.values()
    if isinstance(value, Config):
        return plain(value, Problems())
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(
            "config", "must be a path, a dict or a `zerodrift.Config`", got=type(value).__name__
        )
    if isinstance(value, str) and not os.path.exists(value):
        decoded = _decoded(value)
        if decoded is not None:
            return decoded
    parsed = _of_file(value)
    if not isinstance(parsed, dict):
        raise ConfigError(os.fspath(value), "must hold a block of keys at its top")
    return parsed


def _of_file(path: str | os.PathLike[str]) -> Any:
    """Of a file that is neither JSON nor YAML: read as Hjson, as DeepSpeed reads every file."""
    try:
        return read(path)
    except ConfigError as error:
        try:
            return hjson.parse(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise error from None


def _decoded(text: str) -> dict[str, Any] | None:
    """Base64 of JSON, as launchers pass it; None for anything else."""
    try:
        config = hjson.parse(base64.urlsafe_b64decode(text).decode("utf-8"))
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return config if isinstance(config, dict) else None


# --- keys with dots -------------------------------------------------------------------------------------


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """accelerate and TRL set `zero_optimization.reduce_bucket_size`, with its dot, at top level, where
    DeepSpeed reads nothing. Here it is the key that it names; where that is written too, that one holds."""
    tree: Any = copy.copy(config)  # which also knows the keys that came twice
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
                logger.warning(
                    "`%s: %s` is in its block as %s, which holds", key, shown(value), shown(place[last])
                )
    return tree


# --- what `zerodrift run` adds --------------------------------------------------------------------------


@contextlib.contextmanager
def with_additions(passed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config with what `zerodrift run` adds to it; errors inside are told by its flags."""
    given = errand()
    if given is None:
        yield passed
        return
    given.reached("initialized")
    additions = Additions(dict(given.config), given.flags)
    precision = passed.get("precision")
    rules = precision.get("rules") if isinstance(precision, Mapping) else None
    try:
        yield additions.added_to(passed)
    except ZerodriftError as error:
        flagged = additions.flagged(error, len(rules or ()))
        if flagged is error:
            raise
        raise flagged from None
