"""Count the operations of a step, and know the peaks of devices: model FLOPs utilisation.

The operations of one forward are counted as they run, by torch's own formulas. Training counts three times
that, as is customary: recomputed activations are not the model's work. A peak is what the device's maker
states for dense products in a dtype.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zerodrift.inspect.trace import every_operation, flops_of

TRAINING = 3
"""Forward and backward, in forwards."""

PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 80}),
    ("GH200", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("H200", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("H100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ("H100 NVL", {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60}),
    ("H100", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("A100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("A40", {"bf16": 150, "fp16": 150, "tf32": 75, "fp32": 37.4}),
    ("A10", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    ("L40S", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    ("L4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    ("V100", {"fp16": 125, "fp32": 15.7}),
    ("T4", {"fp16": 65, "fp32": 8.1}),
    ("RTX 4090", {"bf16": 165, "fp16": 165, "tf32": 83, "fp32": 83}),
    ("RTX 3090", {"bf16": 71, "fp16": 71, "tf32": 36, "fp32": 36}),
    ("MI300X", {"bf16": 1307, "fp16": 1307, "fp32": 163}),
    ("MI250X", {"bf16": 383, "fp16": 383, "fp32": 48}),
)
"""Words of a device's name -> TFLOP/s of dense products by dtype; the first match counts."""

_SLOWER = ("Laptop", "Max Q", "D")
"""Words in the names of slower variants."""


@contextlib.contextmanager
def forward_flops(model: nn.Module) -> Iterator[list[int]]:
    """Yield a list that gets the operations of the first forward of a module inside the block, one by one."""
    counts: list[int] = []
    mode = every_operation(lambda *called: counts.append(flops_of(*called)), compiled=False)
    running = contextlib.ExitStack()

    def start(*_: Any) -> None:
        begin.remove()
        running.enter_context(mode)

    begin = model.register_forward_pre_hook(start)
    end = model.register_forward_hook(lambda *_: running.close(), always_call=True)
    try:
        yield counts
    finally:
        begin.remove()
        end.remove()


def peak(device: str, dtype: str) -> float | None:
    """Return the stated FLOP/s of a device; None if unknown."""
    words = f" {device.replace('-', ' ')} "
    if any(f" {word} " in words for word in _SLOWER):
        return None
    known: dict[str, float] = next((peaks for name, peaks in PEAKS if f" {name} " in words), {})
    return known[dtype] * 1e12 if dtype in known else None


def dtype_of_products(compute: str) -> str:
    """Return the dtype of the products of a compute dtype: torch may take TF32 for fp32."""
    tf32 = compute == "fp32" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 else compute


def readable(flops: float) -> str:
    """`12.3 TFLOP/s`."""
    if flops <= 0:
        return "0 FLOP/s"
    power = min(5, max(0, int(math.log10(flops)) // 3))
    return f"{flops / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}FLOP/s"
