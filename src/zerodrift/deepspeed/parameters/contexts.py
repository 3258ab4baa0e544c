"""`zero.GatheredParameters` and `zero.Init`: contexts that gather sharded parameters, and that create them.

GatheredParameters gathers parameters of an engine or of Init, to be read, or to be written by one rank. Other
parameters are whole already and left alone. With `modifier_rank`, that rank's values are broadcast at the end
and reach the master weights. Without it a change would be lost, and is an error on every rank.

Init shards a model while it is built, so that no rank ever holds all of it. A module's children are sharded
when the module is assigned to its parent, and the rest at the end of the context: at most one block and the
root's own layers are whole at a time. An `__init__` may still initialize its descendants: inside the context
a sharded parameter is gathered for any code that reads or writes its values, and sharded again later. Unlike
in DeepSpeed, values keep the dtype and bits that the model made unless `dtype` is given, so that master
weights start exact.

Invariant: all ranks enter and leave together, and gather and shard in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as registration

from zerodrift.deepspeed.parameters.attributes import ZeroParamStatus
from zerodrift.deepspeed.parameters.shards import ParameterShard, guard, shard_of, shard_parameter
from zerodrift.deepspeed.parameters.values import engine_parameter
from zerodrift.deepspeed.tools import collectives as comm
from zerodrift.deepspeed.tools.functions import register_external_parameter
from zerodrift.engine import Engine, tensor_digest
from zerodrift.errors import ModelError, Problems, UnsupportedError

REFUSED = {
    "mpu": "There is no tensor parallelism. Leave it out.",
    "zero_param_parallel_group": "There is no second partition of the parameters. Leave it out.",
    "zero_quantized_weights": "Set it in the config, which decides the dtypes of gathers.",
    "zero_quantized_nontrainable_weights": "Set it in the config, which decides what is quantised.",
    "sequence_data_parallel_group": "There is no sequence parallelism. Leave it out.",
    "param_swapper": "Nothing is offloaded to NVMe. Leave it out.",
}
"""Arguments of Init that are refused -> what to do."""

LENT = 32
"""Most parameters that stay gathered after use inside Init, unless one operation takes more."""


class GatheredParameters:
    """The context: `with zero.GatheredParameters(weight, modifier_rank=0): ...`."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._writer = modifier_rank
        self._sharded: list[tuple[ParameterShard, nn.Parameter]] = []
        self._whole: list[nn.Parameter] = []
        """Parameters of `zero.Init` on one rank, which are never sharded."""
        self._outer: list[nn.Parameter] = []
        """Sharded parameters that an outer context has gathered and will release."""
        self._engines: dict[int, tuple[Engine, dict[str, nn.Parameter]]] = {}
        self._available: list[nn.Parameter] = []
        """Parameters whose `ds_status` this context sets to AVAILABLE."""
        self._read_only: list[tuple[nn.Parameter, int, str]] = []
        """Parameters that must not be written, each with its address and the digest of its values."""
        self._stack = contextlib.ExitStack()
        if not enabled:
            return
        given = [params] if params is None or isinstance(params, torch.Tensor) else list(params)
        for parameter in dict.fromkeys(each for each in given if isinstance(each, nn.Parameter)):
            owner, shard = engine_parameter(parameter), shard_of(parameter)
            if owner is not None:
                engine = owner.running()
                self._engines.setdefault(id(engine), (engine, {}))[1][owner.name] = parameter
            elif shard is not None:
                self._sharded.append((shard, parameter))
            elif hasattr(parameter, "ds_status"):
                self._whole.append(parameter)
            if fwd_module is not None:
                register_external_parameter(fwd_module, parameter)
        self._sharded.sort(key=lambda pair: pair[0].number)

    def __enter__(self) -> None:
        writes = self._writer is not None
        self._outer = [parameter for shard, parameter in self._sharded if shard.is_gathered]
        self._sharded = [pair for pair in self._sharded if not pair[0].is_gathered]
        with torch.no_grad():
            for shard, parameter in self._sharded:
                shard.gather(parameter)
            for engine, held in self._engines.values():
                names = [row.name for row in engine.plan.rows if row.name in held]
                self._stack.enter_context(engine.gathered(names, write=writes))
        gathered = [*self._whole, *(parameter for _, parameter in self._sharded)]
        gathered += [parameter for _, held in self._engines.values() for parameter in held.values()]
        for parameter in gathered:
            if getattr(parameter, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE:
                parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
                self._available.append(parameter)
        if not writes:
            self._read_only = [(held, held.data_ptr(), tensor_digest("", held)) for held in gathered]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            # Other ranks may not have raised: no collective is called, and changes are dropped.
            self._release()
            self._stack.__exit__(kind, error, trace)
            return
        changed = self._count_changed()
        if self._writer is not None:
            self._send(self._writer)
        self._release()
        try:
            self._stack.close()
        except ModelError:
            if not changed:
                raise  # otherwise the error below is clearer
        if changed:
            must = "must have a `modifier_rank` where parameters are written"
            got = f"changed values of {changed} of them without one, which would be lost"
            raise ModelError("GatheredParameters", must, got=got, do="Pass `modifier_rank=0`.")

    def _count_changed(self) -> int:
        """Return the largest number, over ranks, of parameters that were written without `modifier_rank`."""
        if not self._read_only:
            return 0
        # A forward inside the context releases the units that it runs, and changes addresses.
        changes = sum(
            held.data_ptr() == place and tensor_digest("", held) != before
            for held, place, before in self._read_only
        )
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return changes
        count = torch.tensor([changes], device=self._read_only[0][0].device)
        comm.all_reduce(count, dist.ReduceOp.MAX)
        return int(count)

    def _send(self, writer: int) -> None:
        with torch.no_grad():
            for shard, parameter in self._sharded:
                values = parameter.data.contiguous().to(shard.flat)
                comm.broadcast(values, writer)
                shard.keep(values)
            held = self._outer
            if writer != 0:  # an engine broadcasts rank 0's values itself
                held = [*held, *(held[name] for _, held in self._engines.values() for name in sorted(held))]
            for parameter in held:
                values = parameter.data.contiguous()
                comm.broadcast(values, writer)
                parameter.data.copy_(values)

    def _release(self) -> None:
        for parameter in self._available:
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
        for shard, parameter in self._sharded:
            shard.release(parameter)


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
        """`config`, `mem_efficient_linear`, `pin_memory` and `tensor_overrides` have no effect: the plan
        decides dtypes, and linear layers and tensors are not replaced."""
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
        """Modules whose own parameters are not sharded yet."""
        self._lent: deque[ParameterShard] = deque()
        self._inside = False
        self._handles: list[Any] = []
        self._apply: Callable[..., Any] = nn.Module.apply
        if not enabled:
            return
        comm.init_distributed()
        group, ranks = data_parallel_group, dist.get_world_size()
        if group is not None and dist.get_world_size(group) != ranks:
            where = "zero.Init(data_parallel_group)"
            do = "Use `mics_shard_size` or `sharding.replicate` in the config for smaller groups."
            raise UnsupportedError(where, "must be all ranks", got="fewer", do=do)
        if module is not None:
            for part in module.modules():
                self._shard(part)

    def __enter__(self) -> Init:  # noqa: PYI034 (Self is of Python 3.11)
        if not self._enabled:
            return self
        self._inside = True
        self._handles = [
            registration.register_module_module_registration_hook(self._on_child),
            registration.register_module_parameter_registration_hook(self._on_parameter),
        ]
        self._apply = nn.Module.apply
        nn.Module.apply = _gathering_apply  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if not self._enabled:
            return
        for handle in self._handles:
            handle.remove()
        nn.Module.apply = self._apply  # type: ignore[method-assign]
        left, self._whole = list(self._whole.values()), {}
        lent, self._lent, self._inside = self._lent, deque(), False
        if kind is None:  # after an exception other ranks may not shard along
            for shard in lent:
                shard.take_back()
            for module in left:
                self._shard(module)

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._whole[id(module)] = module

    def _on_child(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
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

    def _lend(self, reference: weakref.ref[nn.Parameter], keep: bool) -> bool:
        """Gather a parameter for an `__init__` that uses its values. Return True if it was gathered. With
        `keep`, the parameters that were lent before stay gathered, because the same operation uses them."""
        parameter = reference()
        shard = None if parameter is None else shard_of(parameter)
        if parameter is None or shard is None or not self._inside:
            return False
        while len(self._lent) >= LENT and not keep:
            self._lent.popleft().take_back()
        shard.gather(parameter)
        shard.lent = parameter
        self._lent.append(shard)
        return True


def _gathering_apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Replace `Module.apply`: gather each module's parameters for the function."""
    for child in self.children():
        _gathering_apply(child, fn)
    with GatheredParameters(list(self.parameters(recurse=False)), modifier_rank=0):
        fn(self)
    return self
