"""accelerate #3979: the upcast to fp32 that does nothing.

A model is loaded in bf16, and accelerate's FSDP2 path says that it upcasts its parameters, so that the
optimizer updates fp32. The loop assigned to its own variable; the run converged 28 times slower. Mended
in accelerate since (this is 1.15), so the loop of 1.13 is rebuilt here, in plain torch.

Asked for: fp32 masters, bf16 compute. What happens: every parameter rests in bf16, AdamW updates bf16,
and its moments are bf16.
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
