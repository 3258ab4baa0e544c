"""`train_batch` and `eval_batch`: all micro-batches of a step from an iterator, and their mean loss.

DeepSpeed has them for pipelines. Here any model will do whose forward returns its loss: a tensor, an output
with a `loss`, or a tuple or mapping that has it first or by that name. A batch that is a mapping becomes
keyword arguments, a tuple or list positional ones.

Invariant: what is returned is the mean over micro-batches and ranks, the same number on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from zerodrift.comm.collectives import Collectives
from zerodrift.deepspeed.unsupported import MisuseError
from zerodrift.engine.executor import loss_in
from zerodrift.errors import ModelError, UnsupportedError


def call(forward: Callable[..., Any], batch: Any, device: torch.device) -> Any:
    """The model on a batch, moved to its device."""
    batch = moved(batch, device)
    if isinstance(batch, Mapping):
        return forward(**batch)
    if isinstance(batch, (tuple, list)):
        return forward(*batch)
    return forward(batch)


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [moved(item, device) for item in value]
    return value


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned."""
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
    """That `backward` gets what DeepSpeed asserts: a scalar that was computed with gradients."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.grad_fn is not None:
        return
    got, todo = f"a {type(loss).__name__}", "Pass the tensor that the forward's outputs gave."
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        got = f"one of shape {list(loss.shape)}"
        todo = "Call `backward` of the outputs with their gradients."
    elif isinstance(loss, torch.Tensor):
        got = "one without a graph: it was computed without gradients, or of nothing that is trained"
    raise MisuseError("backward", "must get a loss of one element, with a graph", got=got, do=todo)


def take(batches: Iterator[Any] | None, count: int) -> list[Any]:
    """So many batches; raises StopIteration where there are fewer, before any is used."""
    if batches is None:
        raise UnsupportedError(
            "train_batch(data_iter)",
            "must get an iterator of batches where `initialize` got no `training_data`",
            do="Pass `iter(loader)`, or `RepeatingLoader(loader)`.",
        )
    return [next(batches) for _ in range(count)]


def mean_loss(losses: list[torch.Tensor], comm: Collectives) -> torch.Tensor:
    """Over micro-batches and data-parallel ranks, in fp32."""
    mine = torch.stack([loss.detach().float().reshape(()) for loss in losses]).mean()
    everywhere = comm.all_gather_object(mine.item(), "data")
    return mine.new_tensor(sum(everywhere) / len(everywhere))
