"""Raises in its second step; of two ranks, the first does."""

from torch.nn.parallel import DistributedDataParallel

from tiny import Dense, fit, rank, start


def crash(step: int) -> None:
    if step == 0 and rank() == 0:
        raise ValueError("the data of step 1 are not to be read")


start()
fit(DistributedDataParallel(Dense()), after=crash)
