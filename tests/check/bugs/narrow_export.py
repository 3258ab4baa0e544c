"""fp32 weights, and a file in bf16.

Asked for: a checkpoint of what was trained. What happens: a line that was there for serving casts the state
to bf16 on its way to the file; who goes on from it goes on from rounded weights.
"""

import os
import tempfile

import torch
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from tiny import Dense, fit, rank, start

start()
model = DistributedDataParallel(Dense())


def export(step: int) -> None:
    if step == 1 and rank() == 0:
        state = {name: value.to(torch.bfloat16) for name, value in model.module.state_dict().items()}
        save_file(state, os.path.join(tempfile.mkdtemp(), "model.safetensors"))


fit(model, autocast=True, after=export)
