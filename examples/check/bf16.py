"""A loop as many are written: the whole model in bf16, four micro-batches to a step. See docs/check.md."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 64),
    nn.LayerNorm(64),
    nn.Linear(64, 256),
).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for _ in range(100):
    for _ in range(4):
        tokens = torch.randint(256, (8, 32))
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        (loss / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
