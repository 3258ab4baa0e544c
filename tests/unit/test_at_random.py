"""A slice of the random cases: plans or our own errors, each within a second; see `at_random`."""

from __future__ import annotations

import pytest

from tests.unit.at_random import main


@pytest.mark.timeout(600)
@pytest.mark.long
def test_random_configs_are_planned_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    failed = main(400)
    told = capsys.readouterr().out
    assert not failed, told
    assert "planned" in told and "ConfigError" in told
