"""The loader that `initialize` makes of `training_data`, and one that never ends.

Each rank gets its share of the data from a DistributedSampler, in the same shuffled order in every epoch, as
with DeepSpeed. Batches are loaded in the process itself; slow data needs a `torch.utils.data.DataLoader` with
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zerodrift.comm import usable_accelerator
from zerodrift.errors import ConfigError


class RepeatingLoader:
    """Restarts its loader whenever it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """Loads this rank's batches in the process itself. `next` works on it too."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, sampler
        self.post_process_func: Callable[..., Any] | None = None
        """Called with every batch and the sampler's state."""
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=pin_memory and usable_accelerator() is not None,
        )
        self._batches: Iterator[Any] | None = None

    @classmethod
    def of_rank(
        cls,
        place: tuple[int, int, bool],
        dataset: Any,
        batch_size: int,
        sampler: Any,
        collate_fn: Callable[..., Any] | None,
        drop_last: bool,
    ) -> DeepSpeedDataLoader:
        """Make a loader for `place`: the data-parallel rank, the number of ranks, and whether to shuffle."""
        if batch_size < 1:
            must, got = "must be known to make a loader of `training_data`", "no batch size in the config"
            do = "Write it, or use a loader of your own."
            raise ConfigError("train_micro_batch_size_per_gpu", must, got=got, do=do)
        if sampler is None and not isinstance(dataset, IterableDataset):
            rank, ranks, shuffle = place
            sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=shuffle)
        return cls(dataset, batch_size, sampler, collate_fn, drop_last, pin_memory=True)

    def __iter__(self) -> DeepSpeedDataLoader:
        self._batches = iter(self._loader)
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches)
        return batch if self.post_process_func is None else self.post_process_func(batch, {})
