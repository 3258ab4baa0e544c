"""fp32 weights, and a file in bf16.

Asked for: a checkpoint of what was trained. What happens: a line that was there for serving casts the state
to bf16 on its way to the file; who goes on from it goes on from rounded weights.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from tiny import Dense, batch, loss_of

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Dense())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    tokens, targets = batch(dist.get_rank(), step)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    loss_of(logits, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 and dist.get_rank() == 0:
        state = {name: value.to(torch.bfloat16) for name, value in model.module.state_dict().items()}
        save_file(state, os.path.join(tempfile.mkdtemp(), "model.safetensors"))
dist.destroy_process_group()
