"""An optimizer that was built before the model was wrapped.

Asked for: training. What happens: `fully_shard` puts new parameters (DTensors) in the model's place; the
optimizer holds the old ones, which get no gradient, so that `step` does nothing. The loss changes from
batch to batch and is never told from learning.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tiny import Dense, batch, loss_of

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
fully_shard(model)
for step in range(4):
    tokens, targets = batch(dist.get_rank(), step)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = None
dist.destroy_process_group()
