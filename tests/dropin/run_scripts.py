"""Run scripts on one rank under one package. As a program, under DeepSpeed, on ranks of torchrun:

torchrun --nproc-per-node=2 tests/dropin/run_scripts.py FILE

The reports go to FILE: by script and stage, the reported values, or the text of the error.

DeepSpeed needs two helping hands on a CPU: it refuses fp16 unless it is told that the CPU can do it, and its
stage 3 waits for the last of several gathers only, which gloo does not end in order, so that now and then it
reads half-filled parameters, or hangs. Here its gathers end before they return.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.dropin import configs, engines, gradients, parameters, pieces, schedules, whole
from tests.dropin.script import STAGES, Run, Script

KINDS = (parameters, pieces, gradients, schedules, configs, engines, whole)

SCRIPTS: dict[str, Script] = {script.name: script for kind in KINDS for script in kind.SCRIPTS}


def told(script: Script, package: Any, stage: int) -> dict[str, Any]:
    """Run a script on this rank and return its reports."""
    folder = [tempfile.mkdtemp(prefix="script-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    torch.manual_seed(0)
    run = Run(package, stage, Path(folder[0]))
    try:
        script.run(run)
        run.finish()
    finally:
        for engine in run.engines:
            engine.destroy()
    return run.told


def ended(call: Any) -> Any:
    """Wait for the end of a collective, however it was called."""

    @functools.wraps(call)
    def whole_call(*args: Any, **kwargs: Any) -> Any:
        work = call(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    return whole_call


def main() -> None:
    for gather in ("all_gather_into_tensor", "all_gather_single", "all_gather"):
        if hasattr(dist, gather):
            setattr(dist, gather, ended(getattr(dist, gather)))
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    found: dict[tuple[str, int], Any] = {}
    for script in SCRIPTS.values():
        for stage in STAGES:
            if stage in script.stages and stage in script.alike:
                try:
                    found[script.name, stage] = told(script, deepspeed, stage)
                except Exception:
                    found[script.name, stage] = traceback.format_exc()
    if dist.get_rank() == 0:
        torch.save(found, sys.argv[1])
    dist.barrier()


if __name__ == "__main__":
    main()
