"""Runs the scripts of `deepspeed_scripts` on one rank, for one of the two packages; started by torchrun.

    torchrun --nproc-per-node=2 tests/e2e/run_scripts.py zerodrift FOLDER plain accumulation ...

Only the import changes: a script's text says `import deepspeed`, and for zerodrift that line is another. What
a script leaves in `told` goes to FOLDER/<script>.json.

DeepSpeed needs two helping hands on a CPU: it refuses fp16 unless it is told that the CPU can do it, and its
stage 3 waits for the last of several gathers only, which gloo does not end in order, so that now and then it
reads half-filled parameters, or hangs. Here its gathers end before they return.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

SCRIPTS = Path(__file__).parent / "deepspeed_scripts"

PLAIN = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}},
    "zero_optimization": {"stage": 1},
}


def source(name: str, package: str) -> str:
    """The text of a script for a package."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    if package == "deepspeed":
        return text
    text = re.sub(r"^import deepspeed$", "import zerodrift.deepspeed as deepspeed", text, flags=re.MULTILINE)
    return re.sub(r"^from deepspeed\.", "from zerodrift.deepspeed.", text, flags=re.MULTILINE)


def arguments(name: str, folder: Path) -> list[str]:
    if name == "plain":
        config = folder / "plain_config.json"
        config.write_text(json.dumps(PLAIN))
        return ["--deepspeed", "--deepspeed_config", str(config), "--out", str(folder / "plain.json")]
    return ["--folder", str(folder / "checkpoints")] if name == "resume" else []


def ended(call: Any) -> Any:
    """A collective that has ended when it returns, however it was called."""

    @functools.wraps(call)
    def whole(*args: Any, **kwargs: Any) -> Any:
        work = call(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    return whole


def main() -> None:
    package, folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    if package == "deepspeed":
        for gather in ("all_gather_into_tensor", "all_gather_single", "all_gather"):
            if hasattr(torch.distributed, gather):
                setattr(torch.distributed, gather, ended(getattr(torch.distributed, gather)))
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
    for name in names:
        sys.argv = [name, *arguments(name, Path(folder))]
        print(f"--- {name}", flush=True)
        names_of_script: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source(name, package), name, "exec"), names_of_script)
        if "told" in names_of_script and torch.distributed.get_rank() == 0:
            (Path(folder) / f"{name}.json").write_text(json.dumps(names_of_script["told"]))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
