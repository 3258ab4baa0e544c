"""Pure bf16 with AdamW, by DDP: no master anywhere (axolotl #3154: "trained pure bf16 for months").

Asked for: a bf16 model that trains. What happens: AdamW adds lr-sized updates to bf16 weights, which lose all
that is below half a unit in the last place; its second moment is bf16 and can never shrink, since v * 0.999
rounds back to v.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tiny import Tiny, batch, loss_of

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Tiny().bfloat16())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    tokens, targets = batch(dist.get_rank(), step)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print("moments", {s["exp_avg_sq"].dtype for s in optimizer.state.values()})
dist.destroy_process_group()
