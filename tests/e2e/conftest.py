"""Fixtures for tests of whole commands."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import ROOT


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the root of the repository, from which jobs name models and files."""
    monkeypatch.chdir(ROOT)
