"""Describe where and with what a run was started, for its page and its `environment.json`."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone

from zerodrift.versions import TESTED, __version__


def environment(command: str, computed: Mapping[str, object]) -> dict[str, str]:
    """Return the facts that can be found out; `computed` is what the bits of a run depend on.

    The `folder` is the working folder, which relative paths of a job start from. Versions are those of
    imported packages.
    """
    packages = [name for name in (*TESTED, "peft", "triton") if name != "python"]
    found = {
        "command": command,
        "folder": os.getcwd(),
        "commit": _commit(),
        "host": socket.gethostname(),
        "system": platform.platform(terse=True),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "zerodrift": __version__,
        "python": platform.python_version(),
        **{name: str(getattr(sys.modules.get(name), "__version__", "")) for name in packages},
        **{key: str(value) for key, value in computed.items() if key != "torch"},
    }
    return {key: value for key, value in found.items() if value}


def _commit() -> str:
    """Return the commit of the working folder, `-dirty` with other files; empty outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
