"""Estimate the memory of ZeRO-2 and ZeRO-3 by DeepSpeed's formulas for Adam in 16 bits."""

from __future__ import annotations

import itertools

from torch import nn


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
    total, _ = _count(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    setup, rows = (num_gpus_per_node, num_nodes), []
    for offload in (True, False):
        needs = estimate_zero2_model_states_mem_needs(total_params, *setup, offload, additional_buffer_factor)
        rows.append((*needs, f"offload_optimizer={_PLACES[offload]}"))
    _print_needs(*setup, f"{int(total_params / 1e6)}M total params", rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    estimate_zero3_model_states_mem_needs_all_cold(
        *_count(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    counts, setup, rows = (total_params, largest_layer_params), (num_gpus_per_node, num_nodes), []
    places = ((True, True), (True, False), (False, False))
    for (optimizer, params), init in itertools.product(places, (True, False)):
        on_cpu, on_gpu, _ = estimate_zero3_model_states_mem_needs(
            *counts, *setup, optimizer, params, init, additional_buffer_factor
        )
        offload = f"offload_param={_PLACES[params]}, offload_optimizer={_PLACES[optimizer]}"
        rows.append((on_cpu, on_gpu, f"{offload}, zero_init={int(init)}"))
    total, largest = (f"{int(count / 1e6)}M" for count in counts)
    _print_needs(*setup, f"{total} total params, {largest} largest layer params", rows)


_PLACES = {True: "cpu ", False: "none"}


def _count(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters, tied ones once, and the most that one module has itself."""
    own = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    return sum(parameter.numel() for parameter in model.parameters()), max(own, default=0)


def _print_needs(gpus: int, nodes: int, model: str, rows: list[tuple[int, int, str]]) -> None:
    setup = f"{nodes} node{'s' * (nodes > 1)}, {gpus} GPU{'s' * (gpus > 1)} per node"
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {setup}.\nSW: Model with {model}.\n  per CPU  |  per GPU |   Options")
    for on_cpu, on_gpu, options in rows:
        print(f" {on_cpu / 2**30:7.2f}GB | {on_gpu / 2**30:6.2f}GB | {options}")
    print("These are DeepSpeed's formulas; `zerodrift plan` has the bytes of a config.")
