"""A small mixture of experts under autocast: the router computes in bf16. See docs/start.md."""

import torch
from torch import nn

torch.manual_seed(0)


class Experts(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).max(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        picked = outputs.gather(-2, chosen[..., None, None].expand(*x.shape[:-1], 1, x.shape[-1]))
        return x + scores[..., None] * picked.squeeze(-2)


model = nn.Sequential(nn.Embedding(256, 64), Experts(64, 8), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for _ in range(100):
    tokens = torch.randint(256, (8, 32))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
