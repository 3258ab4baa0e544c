"""FSDP1 with `no_sync`: micro-batches are added in `.grad` of a bf16 flat parameter, before any reduction."""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tiny import Expert, Tiny, fit, start

start()
model = FullyShardedDataParallel(
    Tiny(),
    auto_wrap_policy=ModuleWrapPolicy({Expert}),
    mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
    use_orig_params=True,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
fit(model, optimizer, micro_batches=4, unsynchronized=model.no_sync)
