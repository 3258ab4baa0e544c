"""Run a script on DeepSpeed itself: `python tests/e2e/on_deepspeed.py SCRIPT ARGUMENTS`."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import deepspeed

_initialize = deepspeed.initialize


def initialize(args: Any = None, **rest: Any) -> Any:
    """Call DeepSpeed's own without Lightning's GPU argument, which is None on a CPU."""
    if getattr(args, "device_rank", 0) is None:
        del args.device_rank
    return _initialize(args=args, **rest)


deepspeed.initialize = initialize
del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
