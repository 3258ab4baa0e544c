"""Forwards and backwards, and an optimizer that is never asked to step."""

import torch

from tiny import Dense, batch, loss_of

torch.manual_seed(0)
model = Dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    tokens, targets = batch(0, step)
    loss_of(model(tokens), targets).backward()
