"""DeepSpeed's estimates of the memory that ZeRO-2 and ZeRO-3 need, from a model or from its size.

They are its own formulas, for Adam in 16 bits, so that a script that prints or compares them reads what it
expects; `zerodrift plan` has the bytes of a config as it runs here, and each table says so at its end.

Invariant: nothing is allocated and no process group is asked.
"""

from __future__ import annotations

import itertools

from torch import nn

GIB = 2**30


def sizes(model: nn.Module) -> tuple[int, int]:
    """Parameters of a model, tied ones once, and of its largest module, without what is below that."""
    largest = max(
        (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()), default=0
    )
    return sum(parameter.numel() for parameter in model.parameters()), largest


# --- ZeRO-2 -----------------------------------------------------------------------------------------------


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of CPU memory per node and of memory per GPU."""
    ranks = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * ranks, 16) * additional_buffer_factor), 2 * total_params
    on_gpu = 2 * total_params + int(18 * total_params / ranks)
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), on_gpu


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print them for a model, with and without offload."""
    total, _ = sizes(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print them for a model of a size."""
    _head(num_nodes, num_gpus_per_node, f"{_millions(total_params)} total params")
    for offload in (True, False):
        on_cpu, on_gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _row(on_cpu, on_gpu, f"offload_optimizer={_device(offload)}")
    _tail()


# --- ZeRO-3 -----------------------------------------------------------------------------------------------


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
    """Bytes of CPU memory per node, of memory per GPU, and of the largest layer."""
    ranks, layer = num_nodes * num_gpus_per_node, 4 * largest_layer_params
    rests = (18 if cpu_offload_params else 16) / num_nodes if cpu_offload else 0
    """Bytes per parameter that rest on the CPU of a node."""
    loads = 4 * num_gpus_per_node
    """Bytes per parameter while every process of a node makes the model."""
    if not cpu_offload:
        on_gpu = layer + int(18 * total_params / ranks)
        made = largest_layer_params if zero_init else total_params
        return int(made * loads * additional_buffer_factor), on_gpu, layer
    on_gpu = layer if cpu_offload_params else layer + int(2 * total_params / ranks)
    per_parameter = rests if zero_init else max(loads, rests)
    return int(total_params * per_parameter * additional_buffer_factor), on_gpu, layer


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print them for a model, with what may be offloaded and without."""
    total, largest = sizes(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print them for a model of a size."""
    model = f"{_millions(total_params)} total params, {_millions(largest_layer_params)} largest layer params"
    _head(num_nodes, num_gpus_per_node, model)
    for (optimizer, params), init in itertools.product(
        ((True, True), (True, False), (False, False)), (True, False)
    ):
        on_cpu, on_gpu, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            optimizer,
            params,
            init,
            additional_buffer_factor,
        )
        offload = f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}"
        _row(on_cpu, on_gpu, f"{offload}, zero_init={int(init)}")
    _tail()


# --- how it is printed ------------------------------------------------------------------------------------


def _millions(count: int) -> str:
    return f"{int(count / 1e6)}M"


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"


def _head(nodes: int, gpus: int, model: str) -> None:
    machines = f"{nodes} node{'s' * (nodes > 1)}, {gpus} GPU{'s' * (gpus > 1)} per node"
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {machines}.\nSW: Model with {model}.\n  per CPU  |  per GPU |   Options")


def _row(on_cpu: int, on_gpu: int, options: str) -> None:
    print(f" {on_cpu / GIB:7.2f}GB | {on_gpu / GIB:6.2f}GB | {options}")


def _tail() -> None:
    print("These are DeepSpeed's formulas; `zerodrift plan` has the bytes of a config.")
