"""Norm gains that stay exactly 1.0 (speculators #711: after 6,000 steps, where weight decay alone says
0.982).

Asked for: fine-tuning in bf16 at lr 1e-5. What happens: half a unit in the last place of 1.0 is 2e-3
downwards in bf16; no update of that size ever comes, so no gain changes in any step. The other weights
are small enough to move now and then.
"""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tiny import Dense, fit, start

start()
model = Dense().to(torch.bfloat16)
fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
fit(model, torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1))
