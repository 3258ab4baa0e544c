"""`bench/same_bits.py` names what differs between two runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("other", [{"values": {"weight a": "1"}}, {"digest": "1"}, {"skipped": 2}])
def test_what_is_apart_is_named(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    same_bits = importlib.import_module("same_bits")
    alike = {"values": {"weight a": "0"}, "digest": "0", "skipped": 1}
    first, second = (same_bits.Outcome(same_bits.RUNS[0], "", 1, **what) for what in (alike, alike | other))
    assert first.difference(first) == ""
    text = second.difference(first)
    assert str(*other).removeprefix("values") in text and "other" in text
