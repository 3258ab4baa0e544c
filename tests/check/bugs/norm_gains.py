"""Norm gains that stay exactly 1.0 (speculators #711: after 6,000 steps, where weight decay alone says
0.982).

Asked for: fine-tuning in bf16 at lr 1e-5. What happens: half a unit in the last place of 1.0 is 2e-3
downwards in bf16; no update of that size ever comes, so no gain changes in any step. The other weights
are small enough to move now and then.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tiny import Dense, batch, loss_of

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Dense().to(torch.bfloat16)
fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
for step in range(4):
    tokens, targets = batch(dist.get_rank(), step)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
gains = model.norm.weight.full_tensor()
if dist.get_rank() == 0:
    print("gains", sorted(set(gains.tolist())))
dist.destroy_process_group()
