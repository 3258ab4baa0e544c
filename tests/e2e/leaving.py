"""A script that ends after a collective without `destroy_process_group`; started by torchrun."""

import torch
import torch.distributed as dist

from zerodrift.comm.mesh import start
from zerodrift.mesh import MeshShape

mesh = start(lambda world: MeshShape(shard=world), device="cpu")
share, whole = torch.ones(2000), torch.empty(4000)
for _ in range(50):
    dist.all_gather_into_tensor(whole, share, group=mesh.group("shard"), async_op=True).wait()
