"""fp16 with a GradScaler, and `clip_grad_norm_` before `unscale_`.

Asked for: gradients of norm at most 1. What happens: the norm is that of gradients multiplied by 65536,
so that every update is clipped, to 1 / 65536 of what was meant. AdamW hides it, since it divides by the
size of gradients; SGD does not learn.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from tiny import Dense, batch, loss_of, rank, start

start()
model = DistributedDataParallel(Dense())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for step in range(4):
    tokens, targets = batch(rank(), step)
    with torch.autocast("cpu", torch.float16):
        logits = model(tokens)
    scaler.scale(loss_of(logits, targets)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
