"""Text of numbers: elements, bytes and percentages with three significant digits.

The terminal, the page and error messages all use these functions.

Invariant: a figure that is not zero never reads as zero, and a part never reads as the whole.
"""

from __future__ import annotations

import math

_COUNTS = ("", "K", "M", "B", "T", "Q")
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def elements(count: int) -> str:
    """Format a count of elements: `4096`, `131M`, `46.7B`. Counts below ten thousand are exact."""
    if count < 10_000:
        return str(count)
    value, suffix = _scaled(count, 1000.0, _COUNTS)
    return f"{value}{suffix}"


def size(count: int) -> str:
    """Format bytes: `512 B`, `1.46 GiB`."""
    if count < 1000:
        return f"{count} B"
    value, suffix = _scaled(count, 1024.0, _SIZES)
    return f"{value} {suffix}"


def percent(ratio: float) -> str:
    """Format a ratio: `0.0123%`, `97.3%`, `99.98%`. Ratios near 1 get more digits."""
    if ratio in (0.0, 1.0):
        return f"{ratio:.0%}"
    if ratio <= 0.5 or ratio > 1.0:
        return f"{significant(100 * ratio)}%"
    digits = max(1, -math.floor(math.log10(100 * (1 - ratio))))
    return f"{100 * ratio:.{digits}f}%"


def per_parameter(count: int, parameters: int) -> str:
    """Format bytes per parameter: `2`, `0.0625`, `<0.001`."""
    each = count / parameters if parameters else 0.0
    return "<0.001" if 0.0 < each < 0.001 else significant(each)


def significant(value: float) -> str:
    """Format a number with three significant digits, without an exponent. All integer digits stay."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    rounded = round(value, decimals)
    # 9.996 rounds to 10.00, which has one digit too many.
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{decimals}f}"


def shape(sizes: tuple[int, ...]) -> str:
    """Format a shape: `4096 x 14336`, or `scalar` without dimensions."""
    return " x ".join(map(str, sizes)) if sizes else "scalar"


def _scaled(count: int, base: float, suffixes: tuple[str, ...]) -> tuple[str, str]:
    """Return three significant digits and the smallest suffix that leaves at most three before the point."""
    value, index = float(count), 0
    while round(value) >= 1000 and index + 1 < len(suffixes):
        value, index = value / base, index + 1
    return significant(value), suffixes[index]
