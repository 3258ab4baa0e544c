"""Switch torch to deterministic operations, and kernels of other packages, while an engine needs them.

They are needed under `reduce.order: tree`, and in a run with digests, which `zerodrift replay` compares.
torch refuses the operations of `policy/order.py` then. It cannot see kernels of other packages: those
of `KERNELS` have a switch of their own.

Invariants: when the last engine that needs deterministic operations ends, torch's switches are as the first
one found them. Nothing is asked of other packages on a CPU.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerodrift.errors import UnsupportedError
from zerodrift.policy import DeterminismNeed, remedy

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Size of cuBLAS's workspace, which decides between algorithms; read when CUDA is first used."""

_RAISED = re.compile(r"^(.+?) does not have a deterministic implementation")
_users: set[object] = set()
_before: tuple[bool, bool, bool, bool] | None = None


# --- the switches -------------------------------------------------------------------------------------------


def need_determinism(user: object, device: torch.device) -> None:
    """Turn deterministic operations on until `release_determinism`. torch would also fill memory that is not
    written yet; nothing here reads such memory, so that is off. cuDNN's choice of algorithms by their time is
    off, too, because it may choose others in the next run."""
    global _before
    if _before is None:
        fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        enabled = torch.are_deterministic_algorithms_enabled()
        _before = enabled, warns, fills, torch.backends.cudnn.benchmark
        if not enabled:
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if device.type == "cuda":
        os.environ.setdefault(WORKSPACE, ":4096:8")
    _users.add(user)


class Determinism:
    """The need of one engine. It holds the model weakly, because the process holds the need."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = weakref.ref(model), device
        self.need: DeterminismNeed | None = None
        """The key that errors name; None where nothing asks for deterministic operations."""

    def ask(self, need: DeterminismNeed | None) -> None:
        """Turn deterministic operations on until `release_determinism`, if a key asks and none did."""
        model = self._model()
        if need is not None and self.need is None and model is not None:
            require_deterministic_kernels(model, self._device.type, need)
            need_determinism(self, self._device)
            self.need = need


def release_determinism(user: object) -> None:
    """End one user's need."""
    global _before
    _users.discard(user)
    if _users or _before is None:
        return
    enabled, warns, fills, times = _before
    _before = None
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = times


def cuda_switches() -> dict[str, str]:
    """Return what the bits of products on CUDA depend on beside the device: settings that may stay as they
    are, but not change between two runs that are compared."""
    matmul, cuda = torch.backends.cuda.matmul, torch.backends.cuda
    convolution: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    attention = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return {
        "workspace": os.environ.get(WORKSPACE, ""),
        "fp32 products": f"matmul {matmul.fp32_precision}, cudnn {convolution.fp32_precision}",
        "reduced precision": (
            f"bf16 {matmul.allow_bf16_reduced_precision_reduction}, "
            f"fp16 {matmul.allow_fp16_reduced_precision_reduction}"
        ),
        "attention": ", ".join(name for name, on in attention.items() if on),
        "cudnn": str(torch.backends.cudnn.version()),
    }


# --- operations ---------------------------------------------------------------------------------------------


def nondeterministic_operation(error: BaseException, need: DeterminismNeed) -> UnsupportedError | None:
    """Return our error for an operation that torch refuses in this mode; None for anything else."""
    found = _RAISED.match(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    instead = remedy(found[1]) or "Use another operation in the model"
    return UnsupportedError(
        need.key,
        f"must be `{need.instead}` with `{found[1]}`, whose result is not the same each time",
        got=need.value,
        do=f"{instead}; or leave `{need.key.rpartition('.')[2]}` out.",
    )


# --- kernels of other packages ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelSwitch:
    """The environment variable that makes kernels of another package deterministic."""

    variable: str
    value: str
    late: bool
    """True if it is read in every call, so that it may still be set when the model is there."""


FLASH = KernelSwitch("FLASH_ATTENTION_DETERMINISTIC", "1", late=True)
KERNELS: Mapping[str, KernelSwitch] = {
    "flash_attn": FLASH,
    "transformer_engine": KernelSwitch("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", late=False),
}
"""Package of a module's class -> its switch. The flash attention of `transformers` has that of
`flash_attn`."""


def require_deterministic_kernels(
    model: nn.Module, device: str, need: DeterminismNeed, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set the switches of other packages that a model uses on CUDA; raise where one has another value."""
    if device != "cuda":
        return
    for what, switch in _switches_of(model):
        held = environment.get(switch.variable)
        if held is None and switch.late:
            environment[switch.variable] = switch.value
        elif held != switch.value:
            raise UnsupportedError(
                switch.variable,
                f"must be {switch.value!r} with {what} under `{need.key}: {need.value}`, for gradients that "
                "are the same each time",
                got="nothing" if held is None else repr(held),
                do=f"Start every process with `{switch.variable}={switch.value}`, or leave "
                f"`{need.key.rpartition('.')[2]}` out.",
            )


def _switches_of(model: nn.Module) -> Iterator[tuple[str, KernelSwitch]]:
    """Yield (what uses it, switch) for the kernels that a model names, each switch once."""
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "")
    found = {FLASH: f"attention `{attention}`"} if "flash" in attention else {}
    for path, module in model.named_modules():
        switch = KERNELS.get(type(module).__module__.partition(".")[0])
        if switch is not None:
            found.setdefault(switch, f"`{path}`, a module of {type(module).__module__.partition('.')[0]}")
    yield from ((what, switch) for switch, what in found.items())
