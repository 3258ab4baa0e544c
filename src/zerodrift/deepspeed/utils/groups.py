"""`deepspeed.utils.groups`: who trains with whom. All ranks are data-parallel; no model is split."""

from __future__ import annotations

from typing import Any

from zerodrift.deepspeed import comm, unsupported

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
]


__getattr__ = unsupported.lookup(__name__)


def get_data_parallel_group() -> Any:
    return comm.get_world_group()


def get_data_parallel_world_size() -> int:
    return comm.get_world_size()


def get_data_parallel_rank() -> int:
    return comm.get_rank()


def get_model_parallel_world_size() -> int:
    return 1


def get_model_parallel_rank() -> int:
    return 0


get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
