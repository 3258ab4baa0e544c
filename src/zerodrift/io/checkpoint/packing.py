"""States as bytes and back: values that only hold data, of Python, numpy and torch.

`torch.load(weights_only=True)` reads a file without running what is in it. It knows torch's own classes and
Python's basic ones; what people put into the state of a run beside those is named here: the arguments of a
script, paths, dates, and what numpy makes of a mean.

Invariant: making one of these from a file runs nothing but its own constructor.
"""

from __future__ import annotations

import argparse
import datetime
import io
import pathlib
import types
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch

from zerodrift.errors import UnsupportedError, said

DATA = (
    *(argparse.Namespace, types.SimpleNamespace),
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(frozenset, range, slice),
    *(np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}),
    # What numpy itself names in a file, for an array and for a number.
    *(np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]),
)
"""Classes and functions that `torch.load` need not refuse (torch 2.13 to 2.15, numpy 1 and 2)."""


def load(stream: IO[bytes]) -> dict[str, Any]:
    """A state that was packed; tensors are on the CPU."""
    with torch.serialization.safe_globals(list(DATA)):
        state: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=True)
    return state


def packed(state: Mapping[str, Any], what: str) -> bytes:
    """A state as bytes that can be read again; `what` is in it, for the error."""
    out = io.BytesIO()
    try:
        torch.save(dict(state), out)
        load(io.BytesIO(out.getvalue()))
    except Exception as error:
        path, value = _culprit(state, "")
        raise UnsupportedError(
            what,
            "must be made of numbers, strings, tensors, arrays, paths, dates, lists and dicts, to be saved",
            got=f"a {type(value).__name__} at {path}" if path else said(error),
        ) from error
    return out.getvalue()


def _culprit(value: Any, path: str) -> tuple[str, Any]:
    """What cannot be saved in a state that cannot, as deep as dicts go."""
    for key, item in value.items() if isinstance(value, Mapping) else ():
        out = io.BytesIO()
        try:
            torch.save(item, out)
            load(io.BytesIO(out.getvalue()))
        except Exception:
            return _culprit(item, f"{path}[{key!r}]")
    return path, value
