"""A script for DeepSpeed's own launcher, as its documentation writes them: `--local_rank` is the launcher's.

deepspeed --num_gpus 2 tests/e2e/launched.py --folder FOLDER --deepspeed --deepspeed_config CONFIG
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

import zerodrift.deepspeed as deepspeed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--folder")
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(args=arguments, model=torch.nn.Linear(8, 1))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(engine.global_rank))
    losses = []
    for _ in range(3):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    told = {
        "rank": engine.global_rank,
        "local": [engine.local_rank, arguments.local_rank, int(os.environ["LOCAL_RANK"])],
        "world": engine.world_size,
        "losses": losses,
        "norm": engine.get_global_grad_norm(),
    }
    (Path(arguments.folder) / f"told-{engine.global_rank}.json").write_text(json.dumps(told))
    engine.destroy()


if __name__ == "__main__":
    main()
