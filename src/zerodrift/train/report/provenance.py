"""Where and with what a run was started: for its page, and for whoever reads its folder from elsewhere.

Invariant: words and numbers only; what cannot be found out is left out, and stops nothing.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from zerodrift.versions import TESTED, __version__

FOLDER = "folder"
"""The working folder, which relative paths of a job were looked for in."""


def environment(command: str, computed: Mapping[str, object]) -> dict[str, str]:
    """What a run was started with; `computed` is what its bits depend on."""
    found = {
        "command": command,
        FOLDER: os.getcwd(),
        "commit": _commit(),
        "host": socket.gethostname(),
        "system": platform.platform(terse=True),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "zerodrift": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in (*TESTED, "peft", "triton") if name != "python"},
        **{key: str(value) for key, value in computed.items() if key != "torch"},
    }
    return {key: value for key, value in found.items() if value}


def _version(package: str) -> str:
    """Of what is imported: the rest is not at work."""
    return str(getattr(sys.modules.get(package), "__version__", ""))


def _commit() -> str:
    """Of the working folder, `-dirty` where files are other than committed; empty outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def found_from(path: str, folder: str) -> str:
    """A path of a job, from another working folder than its own: as it is where it leads somewhere, else
    below the folder that the run was started in."""
    if not path or Path(path).expanduser().exists() or not folder:
        return path
    there = Path(folder) / Path(path).expanduser()
    return str(there) if there.exists() else path
