"""The attributes that DeepSpeed sets on every parameter at stage 3 and under `zero.Init`.

Lightning, PEFT, TRL and transformers read them. Numbers and shapes are DeepSpeed's: `partition_numel` is an
equal share of the parameter, rounded up. Only `ds_tensor` is the shard that this rank really holds, which may
have another length or be empty. Methods that move values raise an error that says what to use.

Invariant: nothing that is read here is a copy, and nothing that is written is lost.
"""

from __future__ import annotations

import enum
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerodrift.deepspeed.modules import PARAMETER_ABSENT, Placeholder
from zerodrift.errors import UnsupportedError

ZeroParamType = enum.Enum("ZeroParamType", "NORMAL PARTITIONED REMOTE", module=__name__)
ZeroParamStatus = enum.Enum("ZeroParamStatus", "AVAILABLE NOT_AVAILABLE INFLIGHT", module=__name__)

_MOVED = {name: Placeholder(f"param.{name}", instead) for name, instead in PARAMETER_ABSENT.items()}

_CONSTANT = {
    "ds_param_type": ZeroParamType.PARTITIONED,
    "ds_persist": False,
    "is_external_param": False,
    "ds_enable_sanity_checks": False,
    "ds_secondary_tensor": None,
    "ds_secondary_tensor_group_size": 1,
    "ds_secondary_tensor_num_of_groups": 1,
    "ds_zero_param_process_group": None,
    "nvme_swapper": None,
}
"""Attributes that are equal for every parameter."""

_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__set__")


class HeldShard(torch.Tensor):
    """`param.ds_tensor`: the elements of a parameter that this rank holds. Flat and read-only."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", str(func)), kwargs or {}
        first = given.get("out", args[0] if args else None)
        targets = first if isinstance(first, (list, tuple)) else [first]
        writes = name in _WRITES or "out" in given or (name.endswith("_") and not name.endswith("__"))
        sends = str(getattr(func, "__module__", "")).startswith("torch.distributed")
        if (writes or sends) and any(isinstance(target, cls) for target in targets):
            must = "must not be written, because master weights would not follow"
            do = "Write inside `zero.GatheredParameters` with a `modifier_rank`; send a clone."
            raise UnsupportedError("param.ds_tensor", must, got=f"`{name}`", do=do)
        made = super().__torch_function__(func, types, args, given)
        if not isinstance(made, cls):
            return made
        shares = isinstance(first, cls) and _memory(made) == _memory(first)
        return made if shares else made.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def mark(parameter: nn.Parameter, number: int, group: dist.ProcessGroup | None = None) -> None:
    """Set the attributes of a parameter that is sharded over a group, or over all ranks."""
    running = dist.is_initialized()
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if running else (0, 1)
    numel, reference = parameter.numel(), weakref.ref(parameter)
    part = -(-numel // ranks)
    values: dict[str, Any] = {
        "ds_id": number,
        "ds_shape": parameter.shape,
        "ds_numel": numel,
        "ds_numel_aligned": part * ranks,
        "ds_status": ZeroParamStatus.NOT_AVAILABLE,
        "ds_active_sub_modules": set[nn.Module](),
        "ds_tensor": None,
        "ds_process_group": dist.group.WORLD if group is None and running else group,
        "ds_zero_partition_rank": rank,
        "ds_zero_partition_world_size": ranks,
        "partition_numel": lambda: part,
        "aligned_size": lambda: part * ranks,
        "padding_size": lambda: part * ranks - numel,
        "ds_summary": lambda use_debug_name=False: _summary(reference()),
    }
    vars(parameter).update(_CONSTANT, **_MOVED, **values)


def show_shard(parameter: torch.Tensor, flat: torch.Tensor) -> None:
    shard = flat.detach().as_subclass(HeldShard)
    vars(shard)["ds_numel"] = flat.numel()
    vars(parameter)["ds_tensor"] = shard


def unmark(parameter: nn.Parameter) -> None:
    for name in [name for name in vars(parameter) if name in NAMES]:
        delattr(parameter, name)


def _summary(parameter: Any) -> dict[str, Any]:
    """Return the dict that DeepSpeed returns."""
    gradient, shard = parameter.grad, parameter.ds_tensor
    return {
        "id": parameter.ds_id,
        "status": parameter.ds_status.name,
        "numel": parameter.numel(),
        "ds_numel": parameter.ds_numel,
        "shape": tuple(parameter.shape),
        "ds_shape": tuple(parameter.ds_shape),
        "requires_grad": parameter.requires_grad,
        "grad_shape": None if gradient is None else tuple(gradient.shape),
        "persist": parameter.ds_persist,
        "active_sub_modules": parameter.ds_active_sub_modules,
        "ds_tensor.shape": None if shard is None else shard.shape,
    }


_marked = nn.Parameter(torch.empty(0))
mark(_marked, 0)
NAMES = frozenset(vars(_marked))
