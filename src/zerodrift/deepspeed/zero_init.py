"""`zero.Init`: build a model in shards, so that no rank ever holds all of it.

Modules are built as usual on every rank. A module's children are sharded when the module is handed to its
parent, and the rest at the end of the context, so at most one block and the root's own layers are whole at a
time. An `__init__` may still initialize its descendants, by `Module.apply` or a loop of its own: inside the
context a sharded parameter is lent to code that asks for its values, on all ranks alike, and the oldest loan
ends when there are many.

Unlike in DeepSpeed, values keep the dtype and bits that the model made unless `dtype` is given, so that
master weights start exact. Buffers and other tensors are not touched.

Invariant: all ranks shard the same parameters in the same order.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as registration

from zerodrift.deepspeed.gathered_parameters import GatheredParameters
from zerodrift.deepspeed.launch import init_distributed
from zerodrift.deepspeed.parameter_shards import ParameterShard, guard, shard_of, shard_parameter
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
"""The most parameters that are lent at a time: more than one operation takes."""


class Init:
    """The context: `with zero.Init(): model = Model()`."""

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
        """Accept `config`, `mem_efficient_linear`, `pin_memory` and `tensor_overrides` without effect: the
        plan decides dtypes, and linear layers and tensors are left as they are."""
        arguments = locals()
        problems = Problems()
        for name, do in REFUSED.items():
            if arguments[name]:
                problems.add(f"zero.Init({name})", "must be left out", got=repr(arguments[name]), do=do)
        if remote_device not in (None, "none", "cpu", "cuda"):
            problems.add("zero.Init(remote_device)", "must be cpu or left out", got=repr(remote_device))
        problems.raise_as(UnsupportedError)
        self._enabled = enabled
        self._dtype = dtype
        self._number = 0
        self._whole: dict[int, nn.Module] = {}
        """Modules with parameters of their own that are not sharded yet."""
        self._lent: deque[ParameterShard] = deque()
        self._inside = False
        self._handles: list[Any] = []
        self._apply: Callable[..., Any] = nn.Module.apply
        if not enabled:
            return
        init_distributed()
        group, ranks = data_parallel_group, dist.get_world_size()
        if group is not None and dist.get_world_size(group) != ranks:
            raise UnsupportedError(
                "zero.Init(data_parallel_group)",
                "must be all ranks",
                got="fewer",
                do="Use `mics_shard_size` or `sharding.replicate` in the config for smaller groups.",
            )
        if module is not None:
            for part in module.modules():
                self._shard(part)

    def __enter__(self) -> Init:  # noqa: PYI034 (Self is of Python 3.11)
        if not self._enabled:
            return self
        self._inside = True
        # torch's own hooks: a child is set on its parent, a parameter is set on its module.
        self._handles = [
            registration.register_module_module_registration_hook(self._on_child),
            registration.register_module_parameter_registration_hook(self._on_parameter),
        ]
        self._apply = nn.Module.apply
        nn.Module.apply = _gathering_apply(self._apply)  # type: ignore[method-assign]
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if not self._enabled:
            return
        for handle in self._handles:
            handle.remove()
        nn.Module.apply = self._apply  # type: ignore[method-assign]
        left, self._whole = list(self._whole.values()), {}
        lent, self._lent, self._inside = self._lent, deque(), False
        if kind is None:  # after an exception the other ranks may not come here
            for shard in lent:
                shard.take_back()
            for module in left:
                self._shard(module)

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._whole[id(module)] = module

    def _on_child(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Shard the descendants of `child`, because its `__init__` has ended."""
        for module in child.modules() if child is not None else ():
            if module is not child and id(module) in self._whole:
                self._shard(module)

    def _shard(self, module: nn.Module) -> None:
        self._whole.pop(id(module), None)
        for name, parameter in module._parameters.items():
            if parameter is not None and shard_of(parameter) is None:
                path = f"{type(module).__name__}.{name}"
                lend = functools.partial(self._lend, weakref.ref(parameter))
                shard_parameter(parameter, self._number, self._dtype, path, lend)
                self._number += 1
                if shard_of(parameter) is not None:
                    guard(module)

    def _lend(self, reference: weakref.ref[nn.Parameter]) -> bool:
        """Gather a parameter for an `__init__` that asks for its values. Return True if they are there."""
        parameter = reference()
        shard = None if parameter is None else shard_of(parameter)
        if parameter is None or shard is None or not self._inside:
            return False
        if len(self._lent) == LENT:
            self._lent.popleft().take_back()
        shard.gather(parameter)
        shard.lent = parameter
        self._lent.append(shard)
        return True


def _gathering_apply(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Module.apply` that gathers the parameters of each module."""

    def apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        for child in self.children():
            apply(child, fn)
        with GatheredParameters(list(self.parameters(recurse=False)), modifier_rank=0):
            fn(self)
        return self

    apply.__wrapped__ = plain  # type: ignore[attr-defined]
    return apply
