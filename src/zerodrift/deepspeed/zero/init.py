"""`zero.Init`: a model is built in pieces, so that no rank ever holds all of it.

Modules are made as usual, on every rank, and taken apart as soon as nobody's `__init__` is likely to touch
them again: a module's children go when the module itself is handed to its parent, the rest at the end of the
context. So at most one block and the root's own layers are whole at a time. An `__init__` may initialise what
is below it, by `Module.apply` or with a loop of its own: inside the context a parameter in pieces is lent to
whoever asks for its values, on all ranks alike, and the oldest of these goes back where they are many.

What differs from DeepSpeed: values keep the dtype and the bits that the model made, unless `dtype` is
given, so that masters start exact; buffers, and tensors that are no parameters, are not touched.

Invariant: all ranks take the same parameters apart in the same order.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration

from zerodrift.deepspeed import comm
from zerodrift.deepspeed.zero.gathered import GatheredParameters
from zerodrift.deepspeed.zero.slices import ParameterSlice, guard, show, slice_of, take_apart
from zerodrift.errors import Problems, UnsupportedError

REFUSED = {
    "mpu": "There is no tensor parallelism. Leave it out.",
    "zero_param_parallel_group": "There is no second partition of the parameters. Leave it out.",
    "zero_quantized_weights": "Weights are not quantized on the wire. Leave it out.",
    "zero_quantized_nontrainable_weights": "Frozen weights are not quantized. Leave it out.",
    "sequence_data_parallel_group": "There is no sequence parallelism. Leave it out.",
    "param_swapper": "Nothing is offloaded to NVMe. Leave it out.",
}
"""Arguments that would place or change parameters in a way that is not here."""

LENT = 32
"""So many parameters at a time: more than one operation takes."""


class Init:
    """The context; `with zero.Init(): model = Model()`."""

    def __init__(  # DeepSpeed's sixteen parameters
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        """The config is not asked: its dtypes are the plan's affair. `mem_efficient_linear`, `pin_memory` and
        `tensor_overrides` have nothing to act on: linear layers and tensors are left as they are."""
        given = {
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
        }
        problems = Problems()
        for name, value in given.items():
            if value:
                problems.add(f"zero.Init({name})", "must be left out", got=repr(value), do=REFUSED[name])
        if remote_device not in (None, "none", "cpu", "cuda"):
            problems.add("zero.Init(remote_device)", "must be cpu or left out", got=repr(remote_device))
        problems.raise_as(UnsupportedError)
        self._enabled = enabled
        self._dtype = dtype
        self._number = 0
        self._whole: dict[int, nn.Module] = {}
        """Modules with parameters of their own that are still whole."""
        self._lent: deque[ParameterSlice] = deque()
        self._inside = False
        self._handles: list[Any] = []
        self._apply: Callable[..., Any] | None = None
        if not enabled:
            return
        comm.init_distributed()
        if (
            data_parallel_group is not None
            and comm.get_world_size(data_parallel_group) != comm.get_world_size()
        ):
            raise UnsupportedError(
                "zero.Init(data_parallel_group)",
                "must be all ranks",
                got="fewer",
                do="Use `mics_shard_size` or `sharding.replicate` in the config for smaller groups.",
            )
        if module is not None:
            for part in module.modules():
                self._take(part)

    def __enter__(self) -> Init:  # noqa: PYI034 (Self is of Python 3.11)
        if not self._enabled:
            return self
        self._inside = True
        # torch's own hooks: a child that is set on its parent, a parameter that is set on its module.
        self._handles = [
            registration.register_module_module_registration_hook(self._registered),
            registration.register_module_parameter_registration_hook(self._owns),
        ]
        self._apply = nn.Module.apply
        nn.Module.apply = _gathering(self._apply)  # type: ignore[method-assign]
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if not self._enabled:
            return
        for handle in self._handles:
            handle.remove()
        if self._apply is not None:
            nn.Module.apply = self._apply  # type: ignore[method-assign]
        left, self._whole = list(self._whole.values()), {}
        lent, self._lent, self._inside = self._lent, deque(), False
        if kind is None:  # after an exception the other ranks may not come this far
            for part in lent:
                part.take_back()
            for module in left:
                self._take(module)

    def _owns(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._whole[id(module)] = module

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """`child` is made; what is below it will not be touched by its `__init__` again."""
        for module in child.modules() if child is not None else ():
            if module is not child and id(module) in self._whole:
                self._take(module)

    def _take(self, module: nn.Module) -> None:
        self._whole.pop(id(module), None)
        for name, parameter in module._parameters.items():
            if parameter is not None and slice_of(parameter) is None:
                path = f"{type(module).__name__}.{name}"
                lend = functools.partial(self._lend, weakref.ref(parameter))
                take_apart(parameter, self._number, self._dtype, path, lend)
                self._number += 1
                if slice_of(parameter) is not None:
                    guard(module)

    def _lend(self, reference: weakref.ref[nn.Parameter]) -> bool:
        """Put a parameter together for an `__init__` that asks for its values; whether it is there."""
        parameter = reference()
        part = None if parameter is None else slice_of(parameter)
        if parameter is None or part is None or not self._inside:
            return False
        if len(self._lent) == LENT:
            self._lent.popleft().take_back()
        show(parameter, part)
        part.lent = parameter
        self._lent.append(part)
        return True


def _gathering(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.apply` that puts together what the function is applied to."""

    def apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        for child in self.children():
            apply(child, fn)
        with GatheredParameters(list(self.parameters(recurse=False)), modifier_rank=0):
            fn(self)
        return self

    apply.__wrapped__ = plain  # type: ignore[attr-defined]
    return apply
