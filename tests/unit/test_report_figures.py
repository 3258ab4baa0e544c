"""Numbers in reports: three digits, never zero for something, never all for a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerodrift.report import figures

SHOWN: list[tuple[Callable[..., str], dict[Any, str]]] = [
    (figures.elements, {0: "0", 9999: "9999", 10_000: "10.0K", 131_072_000: "131M", 999_499: "999K"}),
    (figures.elements, {999_500: "1.00M", 46_702_792_704: "46.7B", 1_000_000_000_000: "1.00T"}),
    (figures.size, {0: "0 B", 999: "999 B", 1000: "0.977 KiB", 1024: "1.00 KiB", 1 << 30: "1.00 GiB"}),
    (figures.size, {1_567_890_123: "1.46 GiB", 1 << 60: "1024 PiB"}),
    (figures.percent, {0.0: "0%", 1.0: "100%", 0.000123: "0.0123%", 0.5: "50.0%", 0.973: "97.3%"}),
    (figures.percent, {0.99984: "99.98%", 0.9999998: "99.99998%", 1.7: "170%"}),
    (figures.significant, {9.996: "10.0", 0.0123: "0.0123", 123456.0: "123456", 0.0: "0", -1.5: "-1.50"}),
    (figures.shape, {(4096, 14336): "4096 x 14336", (): "scalar"}),
]


@pytest.mark.parametrize(("show", "texts"), SHOWN)
def test_a_number_is_shown(show: Callable[..., str], texts: dict[Any, str]) -> None:
    assert {number: show(number) for number in texts} == texts


@given(st.floats(1e-12, 1 - 1e-12))
def test_a_part_is_neither_nothing_nor_all(ratio: float) -> None:
    assert 0.0 < float(figures.percent(ratio).rstrip("%")) < 100.0


@given(st.integers(1, 10**17))
def test_something_never_reads_as_nothing(count: int) -> None:
    assert float(figures.elements(count).rstrip("KMBTQ")) > 0
    assert float(figures.size(count).split()[0]) > 0
