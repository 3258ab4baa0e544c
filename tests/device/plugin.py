"""Offer the stand-in device to every process of a command, as packages of other devices offer theirs.

torch loads what the entry points `torch.backends` name when it is imported. The folder `installed` has such
an entry point, so `environment` is all that a command needs: nothing in it knows of the stand-in.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return the environment in which torch has the stand-in as its accelerator."""
    folders = [ROOT, ROOT / "src", Path(__file__).with_name("installed")]
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def load() -> None:
    """Register the device and its process group with torch."""
    from tests.device.standin import install
    from tests.device.strict import begin

    install()
    begin()
    from tests.device.programs import launch_programs

    launch_programs()
