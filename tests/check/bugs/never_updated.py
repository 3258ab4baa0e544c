"""An optimizer that was built before the model was wrapped.

Asked for: training. What happens: `fully_shard` puts new parameters (DTensors) in the model's place; the
optimizer holds the old ones, which get no gradient, so that `step` does nothing. The loss changes from
batch to batch and is never told from learning.
"""

import torch
from torch.distributed.fsdp import fully_shard

from tiny import Dense, fit, start

start()
model = Dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
fully_shard(model)
fit(model, optimizer, after=lambda step: model.zero_grad())
