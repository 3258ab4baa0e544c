"""Run all scripts under DeepSpeed, on ranks of torchrun:

torchrun --nproc-per-node=2 tests/habits/deepspeed_runner.py FILE

The records go to FILE: by script and stage, what the script has shown, or the text of the error.

DeepSpeed needs two helping hands on a CPU: it refuses fp16 unless it is told that the CPU can do it, and its
stage 3 waits for the last of several gathers only, which gloo does not end in order, so that now and then it
reads half-filled parameters, or hangs. Here its gathers end before they return.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.habits.cells import SCRIPTS, Setting, run
from tests.habits.driven import OnDeepSpeed


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
    for name, script in SCRIPTS.items():
        for stage in {*script.stages} & {*script.alike}:
            loop, _, trouble = run(script, OnDeepSpeed, Setting(stage, "fp32"), deepspeed)
            found[name, stage] = trouble or loop.seen
    if dist.get_rank() == 0:
        torch.save(found, sys.argv[1])
    dist.barrier()


if __name__ == "__main__":
    main()
