"""accelerate with `mixed_precision="bf16"`: autocast over fp32 weights, DDP on two ranks."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from tiny import Dense, batch, loss_of

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
set_seed(0)
loader = DataLoader(TensorDataset(*batch(0, 0, size=64)), batch_size=4)
model = Dense()
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
for tokens, targets in loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model(tokens), targets))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
