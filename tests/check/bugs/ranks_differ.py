"""Ranks that begin from different weights, because a seed was missing.

Gradients are averaged by hand, so nothing copies rank 0's weights as DDP would. Asked for: data
parallelism. What happens: each rank trains a model of its own with the average of gradients that were taken
at different weights.
"""

import torch
import torch.distributed as dist

from tiny import Dense, batch, loss_of

dist.init_process_group("gloo")
model = Dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    tokens, targets = batch(dist.get_rank(), step)
    loss_of(model(tokens), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
