"""Refusals by their messages: of any call, and of `load` for the tests of the config room."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerodrift.config.loader import load
from zerodrift.errors import ConfigError


def error_of(
    kind: type[Exception] | tuple[type[Exception], ...], call: Callable[..., Any], *given: Any, **named: Any
) -> str:
    """Return the message of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call(*given, **named)
    return str(caught.value)


def refusal(source: Any, *overrides: str) -> str:
    """Return the message with which `source` is refused."""
    return error_of(ConfigError, load, source, overrides)


def problems(source: Any, *overrides: str) -> list[str]:
    """Return the single problems of a refusal, without heading and numbers."""
    lines = refusal(source, *overrides).splitlines()
    if len(lines) == 1:
        return [lines[0].removeprefix("config: ")]
    return [re.sub(r"^  \d+\. ", "", line) for line in lines[1:]]


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path
