"""The line of a person's script that is running."""

from __future__ import annotations

import os
import sys
import sysconfig

_HERE = os.path.dirname(__file__) + os.sep
_LIBRARIES = tuple(
    {
        os.path.realpath(path) + os.sep
        for key in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(key))
    }
)


def is_from_script() -> bool:
    """Whether the call that is under way was made by a person's code, and by no library for itself."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(("<", _HERE)):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and not frame.f_code.co_filename.startswith(_LIBRARIES)


def line_of_script() -> str:
    """`file:line` of the innermost frame that is in no library; empty where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(("<", _HERE)) or file.startswith(_LIBRARIES)):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
