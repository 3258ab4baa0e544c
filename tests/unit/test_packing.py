"""Values that users put into the state of a run come back unchanged, and no other kinds are saved."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zerodrift.checkpoint.state import load, packed
from zerodrift.errors import UnsupportedError

VALUES: dict[str, Any] = {
    "arguments": argparse.Namespace(lr=0.1, files=[Path("/data/a"), Path("b")]),
    "namespace": types.SimpleNamespace(a=1, b={"c": (1, None)}),
    "best": np.mean([1.0, 2.5]),
    "numbers": [np.int64(3), np.bool_(True), np.float16(0.5), 1j],
    "random": [np.random.RandomState(1).get_state(), random.Random(1).getstate()],
    "generator": np.random.default_rng(1).bit_generator.state,
    "when": [datetime.datetime(2026, 1, 2, 3), datetime.date(2026, 1, 2), datetime.timedelta(seconds=3)],
    "sets": [{2}, frozenset("a"), range(2, 9, 3), slice(1, None)],
    "counts": [collections.Counter("abca"), collections.OrderedDict(b=2)],
    "tensors": [torch.arange(3), torch.bfloat16, torch.Size([2]), torch.device("cpu")],
}


@pytest.mark.parametrize("name", VALUES)
def test_it_comes_back(name: str) -> None:
    found = load(io.BytesIO(packed({name: VALUES[name]}, "client")))[name]
    assert repr(found) == repr(VALUES[name]) and type(found) is type(VALUES[name])


@pytest.mark.parametrize("code", np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?")
def test_arrays_of_every_dtype_come_back(code: str) -> None:
    array = np.arange(6).astype(code).reshape(2, 3)
    found = load(io.BytesIO(packed({"array": array}, "client")))["array"]
    assert found.dtype == array.dtype and np.array_equal(found, array)


class Tokens:
    """A class of the script's own."""


def test_what_cannot_be_read_again_is_named_where_it_is() -> None:
    for bad, kind in ((Tokens(), "Tokens"), (Tokens, "type"), (collections.deque([1]), "deque")):
        with pytest.raises(UnsupportedError) as raised:
            packed({"client": {"good": 1, "more": {"it": bad}}}, "client")
        assert raised.value.got == f"a {kind} at ['client']['more']['it']"


def test_a_file_that_runs_something_is_not_read() -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return print, ("run",)

    with pytest.raises(UnsupportedError, match="a Runs at"):
        packed({"a": Runs()}, "client")
