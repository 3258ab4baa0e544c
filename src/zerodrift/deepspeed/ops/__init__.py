"""`deepspeed.ops`: the optimizers that scripts build by hand. Everything else of it is absent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.ops import adam, lion, op_builder
from zerodrift.optimizers import ADAM, ADAMW, LION, SGD, Algorithm

__all__ = ["adam", "lion", "op_builder"]

OVER_PARAMETERS: Mapping[Algorithm, Callable[..., torch.optim.Optimizer]] = {
    ADAMW: adam.FusedAdam,
    ADAM: functools.partial(adam.FusedAdam, adam_w_mode=False),
    SGD: torch.optim.SGD,
    LION: lion.FusedLion,
}
"""What makes a config's optimizer over some of a model's parameters, or groups of them."""

__compatible_ops__ = {name: builder().is_compatible() for name, builder in op_builder.ALL_OPS.items()}

__getattr__ = unsupported.lookup(__name__)
