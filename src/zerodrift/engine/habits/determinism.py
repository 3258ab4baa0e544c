"""Switch torch to deterministic operations, and kernels of other packages, while an engine needs them.

`reduce.order: tree` needs them, and so does a run with digests, which `zerodrift replay` compares. torch then
refuses the operations of `policy/order.py`. Kernels of other packages (`KERNELS`) have their own switches.

Under `reduce.order: tree` a gradient depends only on the weights, a micro-batch and its number. So a forward
in training must not write buffers, nor draw random numbers from a generator that goes on from one micro-batch
to the next: either would depend on the micro-batches that its rank ran before.

Invariants: when the last engine that needs deterministic operations ends, torch's switches are as the first
one found them. On a CPU no other package is switched. The seed of (seed, step, micro-batch) is the same on
every machine and in every version, because a resumed run depends on it.

[Note: fresh] Random numbers belong to a micro-batch if it was seeded by its number, or if a generator had
drawn nothing since it was last seeded when the first forward of the micro-batch began.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from zerodrift.engine.progress import refusal
from zerodrift.engine.segment import is_due
from zerodrift.errors import UnsupportedError
from zerodrift.kernels import parameter_key
from zerodrift.policy import DeterminismNeed, remedy

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Size of cuBLAS's workspace, which decides between algorithms; read when CUDA is first used."""
COMPILER, COMPILED = "torch._inductor.config", "TORCHINDUCTOR_DETERMINISTIC"
"""The module that holds the compiler's switch, and the variable that it reads when it is imported."""

_RAISED = re.compile(r"^(.+?) does not have a deterministic implementation")
_users: set[Determinism] = set()
_before: tuple[int, bool, bool, str | None] | None = None


# --- the switches -------------------------------------------------------------------------------------------


class Determinism:
    """One engine's need for deterministic operations."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.need: DeterminismNeed | None = None
        """The config key that asks for deterministic operations, or None."""

    def ask(self, need: DeterminismNeed | None, model: nn.Module) -> None:
        """Turn deterministic operations on until `release`, if a key asks for them. torch would also fill
        uninitialized memory, which is off because nothing here reads it. cuDNN's benchmark is off because it
        may choose other algorithms in the next run."""
        global _before
        if need is None or self.need is not None:
            return
        require_deterministic_kernels(model, self._device.type, need)
        if _before is None:
            fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
            mode = torch.get_deterministic_debug_mode()
            _before = mode, fills, torch.backends.cudnn.benchmark, os.environ.get(COMPILED)
            if not mode:
                torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            _set_mode(2)
            os.environ[COMPILED] = "1"
            torch.backends.cudnn.benchmark = False
        if self._device.type == "cuda":
            os.environ.setdefault(WORKSPACE, ":4096:8")
        _users.add(self)
        self.need = need

    def release(self) -> None:
        """End this need. The last one restores torch's switches."""
        global _before
        _users.discard(self)
        if _users or _before is None:
            return
        mode, fills, times, compiled = _before
        _before = None
        _set_mode(mode)
        os.environ.pop(COMPILED, None)
        if compiled is not None:
            os.environ[COMPILED] = compiled
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = times


def _set_mode(mode: int) -> None:
    """Set torch's mode for deterministic operations, and its compiler's if that is imported.

    torch.use_deterministic_algorithms imports the compiler, which takes a second and 97 MiB on every rank.
    """
    torch.set_deterministic_debug_mode(mode)
    if compiler := sys.modules.get(COMPILER):
        compiler.deterministic = mode > 0  # type: ignore[attr-defined]


def cuda_switches() -> dict[str, str]:
    """Return the settings that change bits of products on CUDA. Two runs that are compared must have the same
    ones."""
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
    must = f"must be `{need.instead}` with `{found[1]}`, whose result is not the same each time"
    do = f"{instead}; or leave `{need.key.rpartition('.')[2]}` out."
    return UnsupportedError(need.key, must, got=need.value, do=do)


# --- kernels of other packages ------------------------------------------------------------------------------


FLASH = "FLASH_ATTENTION_DETERMINISTIC", "1"
"""Read in every call, so it can still be set here. Other variables are read at import."""
KERNELS: Mapping[str, tuple[str, str]] = {
    "flash_attn": FLASH,
    "transformer_engine": ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
}
"""Package of a module's class -> (environment variable, value) that makes its kernels deterministic. The
flash attention of `transformers` uses that of `flash_attn`."""


def require_deterministic_kernels(
    model: nn.Module, device: str, need: DeterminismNeed, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set the switches of other packages that a model uses on CUDA; raise if it is too late for one."""
    if device != "cuda":
        return
    for (variable, value), what in _switches_of(model).items():
        held = environment.get(variable)
        if held is None and (variable, value) == FLASH:
            environment[variable] = value
        elif held != value:
            raise UnsupportedError(
                variable,
                f"must be {value!r} with {what} under `{need.key}: {need.value}`, for gradients that "
                "are the same each time",
                got="nothing" if held is None else repr(held),
                do=f"Start every process with `{variable}={value}`, or leave "
                f"`{need.key.rpartition('.')[2]}` out.",
            )


def _switches_of(model: nn.Module) -> dict[tuple[str, str], str]:
    """Return the (variable, value) pairs that a model needs, each with the user of the kernel."""
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "")
    found = {FLASH: f"attention `{attention}`"} if "flash" in attention else {}
    for path, module in model.named_modules():
        package = type(module).__module__.partition(".")[0]
        if package in KERNELS:
            found.setdefault(KERNELS[package], f"`{path}`, a module of {package}")
    return found


# --- micro-batches ---------------------------------------------------------------------------------------


def seed_of(seed: int, step: int, micro_batch: int) -> int:
    """Return the 64-bit seed of a micro-batch."""
    return parameter_key(f"{step}:{micro_batch}", seed)


def generators(device: torch.device) -> list[torch.Generator]:
    if device.type == "cpu":
        return [torch.default_generator]
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return [torch.default_generator, torch.get_device_module(device).default_generators[index]]


def seed_generators(seed: int, device: torch.device) -> None:
    for generator in generators(device):
        generator.manual_seed(seed)


def generators_kept(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


class MicrobatchState:
    """Checks that no random state or buffer passes from one micro-batch to the next; see [Note: fresh]."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._generators = generators(device)
        self.is_seeded = False
        self._holders = [
            (f"{path}.{name}".lstrip("."), module, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        """(full name, module, attribute) of every buffer that a checkpoint keeps."""
        self._checks = 0

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Check a forward in training; raises after it."""
        if not self._model.training or not torch.is_grad_enabled():
            yield
            return
        states = [generator.get_state() for generator in self._generators]
        buffers = self.copy_buffers()
        yield
        self.require_unchanged(buffers)
        if self.is_seeded:
            return
        for generator, state in zip(self._generators, states, strict=True):
            if not torch.equal(generator.get_state(), state):
                seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
                if not torch.equal(seeded.get_state(), state):
                    raise refusal("not seeded")
                self.is_seeded = True

    def copy_buffers(self) -> dict[str, torch.Tensor] | None:
        """Copy the buffers before a forward or a step. Return None, on all ranks alike, if this time they are
        not compared."""
        self._checks += 1
        if not is_due(self._checks - 1):
            return None
        return {name: buffer.clone() for name, buffer in self._buffers().items()}

    def require_unchanged(self, before: dict[str, torch.Tensor] | None) -> None:
        if before is None:
            return
        now = self._buffers()
        for name in before | now:
            if name not in before or name not in now or not _are_same_bits(before[name], now[name]):
                raise refusal("buffer written", name=name)

    def _buffers(self) -> dict[str, torch.Tensor]:
        found = ((name, module._buffers.get(key)) for name, module, key in self._holders)
        return {name: buffer for name, buffer in found if buffer is not None}


def _are_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    bits = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)
