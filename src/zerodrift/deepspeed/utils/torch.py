"""`deepspeed.utils.torch`: which torch is there. The name is DeepSpeed's."""

from __future__ import annotations

from torch import __version__

from zerodrift.versions import numbers

__all__ = ["required_torch_version"]


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Whether torch is within these, both included, as far as they are written."""
    given = str(__version__)
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version: Must specify min_version or max_version")
    if min_version is not None and numbers(given) < numbers(str(min_version)):
        return False
    return max_version is None or numbers(given, str(max_version)) <= numbers(str(max_version))
