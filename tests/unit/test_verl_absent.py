"""Without verl, or with another version, an error says so."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if f"{name}.".startswith(("verl.", "zerodrift.verl.")):
            monkeypatch.delitem(sys.modules, name)


def test_without_verl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ImportError, match="must have `verl` beside it; got no such package"):
        importlib.import_module("zerodrift.verl")


def test_a_verl_without_engines_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("verl")
    other.__path__ = []
    monkeypatch.setitem(sys.modules, "verl", other)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    with pytest.raises(ImportError, match=r"must have what 0\.9\.1 has; got 0\.1: No module"):
        importlib.import_module("zerodrift.verl")
