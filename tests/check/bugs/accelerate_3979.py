"""accelerate #3979: the upcast to fp32 that does nothing, because its loop assigns to its own variable.

Fixed in accelerate since, so the loop of 1.13 is rebuilt here, in plain torch. Every parameter rests in
bf16, and AdamW updates bf16 with bf16 moments; the run converged 28 times slower.
"""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tiny import Tiny, fit, rank, start

start()
model = Tiny().to(torch.bfloat16)  # as `from_pretrained(..., dtype="bfloat16")`
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for expert in model.experts:
    fully_shard(expert, mp_policy=policy)
fully_shard(model, mp_policy=policy)

upcast = []
for name, param in model.named_parameters():
    if param.requires_grad and param.dtype != torch.float32:
        upcast.append(name)
        param = param.to(torch.float32)
if rank() == 0:
    print(f"Upcasted low precision parameters to fp32: {upcast}")

fit(model)
