"""DeepSpeed #7747: what the model keeps in fp32, here the router, is cast to bf16 all the same.

`bf16.enabled` casts every parameter, at any stage, and nothing is said: the router's fp32 master is made
from the bf16 copy.
"""

import deepspeed
import torch
from torch import nn

from tiny import Tiny, batch, loss_of


class Pinned(Tiny):
    """A model whose router stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)
        self.router.float()

    def route(self, h: torch.Tensor) -> torch.Tensor:
        weight = self.router.weight
        return nn.functional.linear(h.to(weight.dtype), weight).softmax(-1)


deepspeed.init_distributed()
torch.manual_seed(0)
model = Pinned()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 100000},
    "communication_data_type": "fp32",
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for step in range(4):
    tokens, targets = batch(engine.global_rank, step)
    engine.backward(loss_of(engine(tokens), targets))
    engine.step()
