"""Three models in one process: a policy and a value model that are trained, a reference that is not."""

import copy

import torch
from torch import nn

from tiny import Dense, batch, loss_of

torch.manual_seed(0)
policy = Dense()
reference = copy.deepcopy(policy).requires_grad_(False)
value = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1)).to(torch.bfloat16)
of_policy = torch.optim.AdamW(policy.parameters(), lr=1e-3)
of_value = torch.optim.SGD(value.parameters(), lr=1e-2)
for step in range(4):
    tokens, targets = batch(0, step)
    logits = policy(tokens)
    with torch.no_grad():
        before = reference(tokens)
    (loss_of(logits, targets) + (logits - before).square().mean()).backward()
    value(logits.detach().to(torch.bfloat16)).float().square().mean().backward()
    of_policy.step()
    of_value.step()
    of_policy.zero_grad()
    of_value.zero_grad()
