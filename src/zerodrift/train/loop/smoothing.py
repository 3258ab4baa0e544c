"""Label smoothing: a share of each label is spread over the vocabulary, while a model is trained.

Models of `transformers` compute their loss by a function that can be replaced, also in the last piece of a
pipeline, and with the losses of routers added to it. Evaluations have the loss of the labels as they are, so
that their perplexity means the same in every run.

Invariant: in training, a micro-batch's loss is the mean over its learned tokens of the smoothed loss of
`transformers.trainer_pt_utils.LabelSmoother`; where it is not, the run ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from zerodrift.comm.collectives import Collectives
from zerodrift.errors import UnsupportedError
from zerodrift.train.data.blocks import IGNORED

KEY = "data.label_smoothing"


class SmoothedLoss:
    """The loss function of a causal language model, with smoothing where gradients are wanted."""

    def __init__(self, share: float, plain: Callable[..., torch.Tensor]) -> None:
        self.was_called = False
        self._share, self._plain = share, plain

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **rest: Any) -> torch.Tensor:
        self.was_called = True
        if not torch.is_grad_enabled():
            return self._plain(logits, labels, *args, **rest)
        return smoothed(logits, labels, self._share)

    def __deepcopy__(self, memo: dict[int, Any]) -> SmoothedLoss:
        return self  # of the pieces of a model: one of them calls it


def smoothed(logits: torch.Tensor, labels: torch.Tensor, share: float) -> torch.Tensor:
    """The mean over labels, which are not shifted; in fp32."""
    return F.cross_entropy(
        logits[..., :-1, :].float().flatten(0, -2),
        labels[..., 1:].flatten(),
        ignore_index=IGNORED,
        label_smoothing=share,
    )


def smooth(model: nn.Module, share: float) -> SmoothedLoss | None:
    """Make a model's loss a smoothed one; None where nothing is smoothed."""
    if not share:
        return None
    inside: Any = model
    if hasattr(inside, "get_base_model"):  # one with adapters
        inside = inside.get_base_model()
    plain: Any = getattr(inside, "loss_function", None)
    if getattr(plain, "__name__", "") != "ForCausalLMLoss":
        raise _refused(type(inside).__name__)
    loss = SmoothedLoss(share, plain)
    inside.loss_function = loss
    return loss


def require_called(loss: SmoothedLoss | None, comm: Collectives, model: str) -> None:
    """That the model has used it, on some rank; asked after the first step, by every rank."""
    if loss is not None and not any(comm.all_gather_object(loss.was_called)):
        raise _refused(model)


def _refused(model: str) -> UnsupportedError:
    must = "must be 0 for a model whose loss is not the `loss_function` of `transformers`"
    return UnsupportedError(KEY, must, got=model, do="Smooth in the model's own loss.")
