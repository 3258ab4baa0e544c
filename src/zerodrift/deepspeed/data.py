"""Loaders, and the loop over the micro-batches of a step for `train_batch` and `eval_batch`.

Each rank gets its share of `training_data` from a DistributedSampler, in the same shuffled order in every
epoch, as with DeepSpeed. `train_batch` takes any model whose forward returns its loss: a tensor, an output
with a `loss`, or a tuple or mapping that has it first or by that name. A mapping becomes keyword arguments, a
tuple or list positional ones.

Invariant: the mean loss over micro-batches and ranks is the same number on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zerodrift.comm.collectives import Collectives
from zerodrift.deepspeed.errors import MisuseError
from zerodrift.engine.unit import loss_in
from zerodrift.errors import ConfigError, ModelError, UnsupportedError


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
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = sampler
        self.post_process_func: Callable[..., Any] | None = None
        """Called with every batch and the sampler's state."""
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=pin_memory and torch.cuda.is_available(),
        )
        self._batches: Iterator[Any] | None = None

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


def make_loader(
    dataset: Any,
    batch_size: int,
    place: tuple[int, int],
    sampler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    drop_last: bool = False,
    shuffle: bool = True,
) -> DeepSpeedDataLoader:
    """Make a loader for `place`, the data-parallel rank and number of ranks."""
    if batch_size < 1:
        raise ConfigError(
            "train_micro_batch_size_per_gpu",
            "must be known to make a loader of `training_data`",
            got="no batch size in the config",
            do="Write it, or use a loader of your own.",
        )
    if sampler is None and not isinstance(dataset, IterableDataset):
        rank, ranks = place
        sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=shuffle)
    return DeepSpeedDataLoader(dataset, batch_size, sampler, collate_fn, drop_last, pin_memory=True)


# --- a step's micro-batches -------------------------------------------------------------------------------


def take(batches: Iterator[Any] | None, count: int) -> list[Any]:
    """Return the next batches. Raise StopIteration if there are fewer, before any is used."""
    if batches is None:
        raise UnsupportedError(
            "train_batch(data_iter)",
            "must get an iterator of batches where `initialize` got no `training_data`",
            do="Pass `iter(loader)`, or `RepeatingLoader(loader)`.",
        )
    return [next(batches) for _ in range(count)]


def call(forward: Callable[..., Any], batch: Any, device: torch.device) -> Any:
    """Call the model on a batch, moved to its device."""
    batch = _to_device(batch, device)
    if isinstance(batch, Mapping):
        return forward(**batch)
    return forward(*batch) if isinstance(batch, list) else forward(batch)


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_device(item, device) for item in value]
    return value


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss from a model's output."""
    loss = loss_in(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise ModelError(
            "train_batch",
            "the model must return its loss, a tensor of one element, an output with `.loss`, or a "
            "tuple that begins with it",
            got=f"{type(loss).__name__}{shape}",
            do="Or write the loop with `forward`, `backward` and `step`.",
        )
    return loss


def require_loss(loss: Any) -> None:
    """Raise unless `backward` got a scalar with a graph, as DeepSpeed asserts."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.grad_fn is not None:
        return
    got, todo = f"a {type(loss).__name__}", "Pass the tensor that the forward's outputs gave."
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        got = f"one of shape {list(loss.shape)}"
        todo = "Call `backward` of the outputs with their gradients."
    elif isinstance(loss, torch.Tensor):
        got = "one without a graph: it was computed without gradients, or of nothing that is trained"
    raise MisuseError("backward", "must get a loss of one element, with a graph", got=got, do=todo)


def mean_loss(losses: list[torch.Tensor], comm: Collectives) -> torch.Tensor:
    """Return the mean over micro-batches and data-parallel ranks, in fp32."""
    mine = torch.stack([loss.detach().float().reshape(()) for loss in losses]).mean()
    everywhere = comm.all_gather_object(mine.item(), "data")
    return mine.new_tensor(sum(everywhere) / len(everywhere))
