"""The line of a person's script that is running."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types

_HERE = os.path.dirname(__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARIES = tuple(
    {
        os.path.realpath(path) + os.sep
        for key in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(key))
    }
)
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Parts of the paths of packages wherever they lie: of a user, of an environment below this one."""


@functools.cache
def _whose(file: str) -> str:
    """`script`, `library`, or empty for what is passed on the way out to either."""
    if file.startswith(("<", _HERE)):
        return ""
    if file.startswith((_PACKAGE, *_LIBRARIES)) or any(part in file for part in _PACKAGES):
        return "library"
    return "script"


def is_from_script() -> bool:
    """Whether the call that is under way was made by a person's code, and by no library for itself."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _whose(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and _whose(frame.f_code.co_filename) == "script"


def line_of_script() -> str:
    """`file:line` of the innermost frame that is in no library; empty where there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _whose(file) == "script":
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class LineOfCall:
    """The line of a call that is under way, found once."""

    def __init__(self) -> None:
        self._line: str | None = None

    def __call__(self) -> str:
        if self._line is None:
            self._line = line_of_script()
        return self._line
