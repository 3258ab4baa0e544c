"""What tests of whole commands share."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import ROOT


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs name models and files from the root of the repository."""
    monkeypatch.chdir(ROOT)
