"""Gradients that are summed over ranks and never divided (NeMo-Automodel #3830: scaled by the world size).

Asked for: data parallelism by hand. What happens: gradients are as many times too large as there are ranks;
a norm that is clipped at 1 hides it, a learning rate that was tuned on one GPU does not.
"""

import torch
import torch.distributed as dist

from tiny import Dense, batch, loss_of

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    tokens, targets = batch(dist.get_rank(), step)
    loss_of(model(tokens), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
