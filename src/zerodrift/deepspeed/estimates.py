"""DeepSpeed's estimates of the memory that ZeRO-2 and ZeRO-3 need, by its own formulas for Adam in 16 bits.

A script that prints or compares them gets DeepSpeed's numbers. `zerodrift plan` prints the bytes of a config
as it runs here, which each table says at its end.
"""

from __future__ import annotations

import itertools

from torch import nn

GIB = 2**30


def sizes(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters, tied ones once, and that of the largest module without its
    children."""
    own = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    return sum(parameter.numel() for parameter in model.parameters()), max(own, default=0)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of CPU memory per node and of GPU memory per GPU."""
    ranks = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * ranks, 16) * additional_buffer_factor), 2 * total_params
    on_gpu = 2 * total_params + int(18 * total_params / ranks)
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), on_gpu


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes of CPU memory per node, of GPU memory per GPU, and of the largest layer."""
    ranks, layer = num_nodes * num_gpus_per_node, 4 * largest_layer_params
    at_init = 4 * num_gpus_per_node  # bytes per parameter while every process of a node builds the model
    if not cpu_offload:
        on_gpu = layer + int(18 * total_params / ranks)
        built = largest_layer_params if zero_init else total_params
        return int(built * at_init * additional_buffer_factor), on_gpu, layer
    on_gpu = layer if cpu_offload_params else layer + int(2 * total_params / ranks)
    offloaded = (18 if cpu_offload_params else 16) / num_nodes
    per_parameter = offloaded if zero_init else max(at_init, offloaded)
    return int(total_params * per_parameter * additional_buffer_factor), on_gpu, layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for a model."""
    total, _ = sizes(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for the size of a model."""
    machines, rows = (num_gpus_per_node, num_nodes), []
    for offload in (True, False):
        needs = estimate_zero2_model_states_mem_needs(
            total_params, *machines, offload, additional_buffer_factor
        )
        rows.append((*needs, f"offload_optimizer={_device(offload)}"))
    _print(*machines, f"{_millions(total_params)} total params", rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for a model."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *sizes(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates for the size of a model."""
    counts, machines, rows = (total_params, largest_layer_params), (num_gpus_per_node, num_nodes), []
    places = ((True, True), (True, False), (False, False))
    for (optimizer, params), init in itertools.product(places, (True, False)):
        needs = estimate_zero3_model_states_mem_needs(
            *counts, *machines, optimizer, params, init, additional_buffer_factor
        )
        offload = f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}"
        rows.append((*needs[:2], f"{offload}, zero_init={int(init)}"))
    model = "{} total params, {} largest layer params".format(*map(_millions, counts))
    _print(*machines, model, rows)


def _millions(count: int) -> str:
    return f"{int(count / 1e6)}M"


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"


def _print(gpus: int, nodes: int, model: str, rows: list[tuple[int, int, str]]) -> None:
    machines = f"{nodes} node{'s' * (nodes > 1)}, {gpus} GPU{'s' * (gpus > 1)} per node"
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {machines}.\nSW: Model with {model}.\n  per CPU  |  per GPU |   Options")
    for on_cpu, on_gpu, options in rows:
        print(f" {on_cpu / GIB:7.2f}GB | {on_gpu / GIB:6.2f}GB | {options}")
    print("These are DeepSpeed's formulas; `zerodrift plan` has the bytes of a config.")
