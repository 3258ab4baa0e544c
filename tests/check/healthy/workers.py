"""A DataLoader with two forked workers, which import torch and train nothing."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from tiny import Dense, batch, loss_of

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Dense()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens, targets in DataLoader(TensorDataset(*batch(0, 0, size=16)), batch_size=4, num_workers=2):
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
