"""Raises in its second step; of two ranks, the first does."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tiny import Dense, batch, loss_of

torch.manual_seed(0)
rank, model = int(os.environ.get("RANK", 0)), Dense()
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    if step == 1 and rank == 0:
        raise ValueError("the data of step 1 are not to be read")
    tokens, targets = batch(rank, step)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
