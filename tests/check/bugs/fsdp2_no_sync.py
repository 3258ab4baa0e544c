"""pytorch #170648: FSDP2 accumulates in bf16 when it does not reduce and `reduce_dtype` is left at None.

Only an explicit `reduce_dtype=torch.float32` moves micro-batches to an fp32 accumulator.
"""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tiny import Tiny, batch, loss_of, rank, start

MICRO_BATCHES = 8

start()
model = Tiny()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for expert in model.experts:
    fully_shard(expert, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    for micro in range(MICRO_BATCHES):
        model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
        tokens, targets = batch(rank(), 10 * step + micro)
        (loss_of(model(tokens), targets) / MICRO_BATCHES).backward()
    optimizer.step()
    optimizer.zero_grad()
