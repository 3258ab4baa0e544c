"""Triton's programs on the stand-in device: a launch like any other, which Triton's interpreter runs."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tests.device import standin

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets in this process: it decides so when it is imported."""


def round_once() -> None:
    """Make the interpreter round a fused product once, as a GPU does. Older ones rounded it twice."""
    from triton._C.libtriton import interpreter as compiled
    from triton.runtime import interpreter

    def fma(self: object, x: Any, y: Any, z: Any) -> Any:
        arrays = np.broadcast_arrays(x.data, y.data, z.data)
        a, b, c = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
        return interpreter.TensorHandle(torch.addcmul(c, a, b).numpy(), z.dtype.scalar)

    if not hasattr(compiled, "fma_fp32"):
        interpreter.InterpreterBuilder.create_fma = fma


def launch_programs() -> None:
    """Launch programs whose tensors are on the stand-in device there, if this process interprets any.

    A program is taken to write all that it is given.
    """
    if not INTERPRETED or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.interpreter import GridExecutor

    round_once()
    run = GridExecutor.__call__

    def call(self: Any, *args: Any, **choices: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not any(tensor.device.type == standin.NAME for tensor in tensors):
            return run(self, *args, **choices)
        views = pytree.tree_map_only(torch.Tensor, standin.device.native.host_view, args)
        standin.launch_on(self.fn.__name__, tensors, tensors, lambda: run(self, *views, **choices) is None)
        return None

    GridExecutor.__call__ = call
