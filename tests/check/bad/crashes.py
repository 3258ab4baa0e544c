"""Raises in its second step, on one of its ranks where there are two."""

import os

import torch

from tiny import Dense, batch, loss_of

torch.manual_seed(0)
model = Dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    if step == 1 and os.environ.get("RANK", "0") == "0":
        raise ValueError("the data of step 1 are not to be read")
    tokens, targets = batch(0, step)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
