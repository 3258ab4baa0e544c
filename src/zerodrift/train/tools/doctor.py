"""Examine this machine for training: versions, devices, compiler, communication, and what is slow or missing.

Every fact is looked up or measured now. Nothing is changed. A missing part is a line, not an error.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed

from zerodrift.comm import can_share, usable_accelerator
from zerodrift.engine import computed_by
from zerodrift.errors import first_line
from zerodrift.kernels import COMPILERS, device, find_compiler, native, products
from zerodrift.legible import legible
from zerodrift.report import WIDTH, grid, pairs, render, section, size, title
from zerodrift.versions import TESTED, __version__, warning

EXTRAS = {
    "transformers": "hf",
    "tokenizers": "hf",
    "pyarrow": "hf",
    "peft": "peft",
    "tensorboard": "tensorboard",
    "wandb": "",
    "matplotlib": "plot",
    "deepspeed": "",
    "lightning": "",
    "accelerate": "",
    "triton": "",
}
"""Optional packages -> the extra that installs them, if there is one."""
TAKEN = 1 << 30
"""Bytes of a GPU outside of torch that show that other processes use it: libraries need fewer."""
TF32 = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables that round the operands of fp32 products on a GPU, whatever a program says."""
SLOW = 1.5
"""Ratio to the time of fp32 products from which bf16 products are slow."""


@dataclass(frozen=True, slots=True)
class MachineFact:
    part: str
    what: str
    found: str
    note: str = ""
    """The consequence, and what to do."""
    bad: bool = False


def examine(environment: Mapping[str, str]) -> list[MachineFact]:
    return [*_versions(), *_cpu(environment), *_gpus(environment), *_communication(), *_kernels()]


def _versions() -> Iterator[MachineFact]:
    yield MachineFact("versions", "zerodrift", __version__, f"in {Path(__file__).parents[2]}")
    for name in ("python", "torch", *EXTRAS):
        found = platform.python_version() if name == "python" else _installed(name)
        if not found:
            extra = f"'zerodrift[{EXTRAS[name]}]'" if EXTRAS[name] else name
            yield MachineFact("versions", name, "-", f"not installed: pip install {extra}")
            continue
        is_untested = name in TESTED and bool(warning({name: found}))
        tested = f"tested: {' to '.join(TESTED[name])}" if name in TESTED else ""
        note = f"not {tested}: check results" if is_untested else tested
        yield MachineFact("versions", name, found, note, bad=is_untested)


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu(environment: Mapping[str, str]) -> Iterator[MachineFact]:
    asked = environment.get("OMP_NUM_THREADS")
    name = str(computed_by(torch.device("cpu"))["processor"])
    yield MachineFact("CPU", "processor", name or platform.machine(), f"{os.cpu_count()} logical")
    threads = str(torch.get_num_threads())
    yield MachineFact("CPU", "threads", threads, f"OMP_NUM_THREADS={asked}" if asked else "")
    ratio = _seconds(torch.bfloat16) / _seconds(torch.float32)
    todo = "use config.precision.mode: fp32 where a model is trained on this CPU" if ratio > SLOW else ""
    speed = f"{ratio:.2g} times as slow as fp32" if ratio > 1 else f"{1 / ratio:.2g} times as fast as fp32"
    yield MachineFact("CPU", "bf16 products", speed, todo, bad=ratio > SLOW)


def _seconds(dtype: torch.dtype) -> float:
    left, right = (torch.ones(512, 512, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(4):
        began = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - began)
    return min(times)


def _gpus(environment: Mapping[str, str]) -> Iterator[MachineFact]:
    accelerator = usable_accelerator()
    if accelerator is None:
        yield MachineFact("GPU", "none", "-", _why_there_is_none())
        return
    for number in range(torch.accelerator.device_count()):
        yield from _gpu(torch.device(accelerator.type, number))
    if accelerator.type == "cuda":
        yield MachineFact("GPU", "CUDA", str(torch.version.cuda or torch.version.hip))
        forced = [name for name in TF32 if environment.get(name) == "1"]
        note = f"products of fp32 keep 10 bits of 23: unset {' and '.join(forced)}" if forced else ""
        yield MachineFact("GPU", "TF32", "on" if forced else "off", note, bad=bool(forced))


def _why_there_is_none() -> str:
    """Return why torch finds no GPU: a driver that is missing or too old, in the words of torch."""
    if not (torch.version.cuda or torch.version.hip):
        return "this torch is built only for CPUs"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return legible(first_line(error))
    return "no driver, or no GPU"


def _gpu(gpu: torch.device) -> Iterator[MachineFact]:
    """Yield what a GPU is, what is free of its memory, and who has the rest."""
    name = torch.get_device_module(gpu).get_device_name(gpu)
    free, total = torch.accelerator.get_memory_info(gpu)
    is_slow, capability = False, ""
    if gpu.type == "cuda":
        capability = ", {}.{}".format(*torch.cuda.get_device_capability(gpu))
        is_slow = not torch.cuda.is_bf16_supported(including_emulation=False)
    note = "no bf16 units: use config.precision.mode: fp16" if is_slow else ""
    yield MachineFact("GPU", str(gpu), f"{name}, {size(total)}{capability}", note, bad=is_slow)
    why = products.obstacle(gpu)
    yield MachineFact("GPU", f"{gpu} fp8 products", *_fp8_products(gpu, why))
    others = total - free - torch.accelerator.memory_reserved(gpu)
    is_taken = others > TAKEN
    note = f"other processes have {size(others)}: end them, or take another GPU" if is_taken else ""
    yield MachineFact("GPU", f"{gpu} memory", f"{size(free)} free", note, bad=is_taken)


def _fp8_products(gpu: torch.device, why: str) -> tuple[str, str]:
    """Return how far products of fp8 operands are from the exact ones, or why there are none."""
    if why:
        return "no", f"config.precision.compute: fp8 is refused here: {why}"
    try:
        measured = products.deviation(gpu)
    except RuntimeError as error:  # of torch, its libraries or the driver
        return "no", f"config.precision.compute: fp8 fails here: {legible(first_line(error))}"
    found = f"{measured.differing:.2%} of bf16 results have different bits than exact sums"
    return found, f"sums of {measured.length}: off by up to {measured.largest:.1e} of the sum of magnitudes"


def _communication() -> Iterator[MachineFact]:
    there = distributed.is_available()
    gloo = there and distributed.is_gloo_available()
    nccl = there and distributed.is_nccl_available()
    note = "" if gloo else "ranks on a CPU need it"
    yield MachineFact("ranks", "gloo", "yes" if gloo else "no", note, bad=not gloo)
    slow = "no memfd, or no /proc: ranks of one CPU machine exchange through sockets, slower"
    shared = can_share()
    yield MachineFact("ranks", "shared memory", "yes" if shared else "no", "" if shared else slow)
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl and torch.cuda.is_available() else ""
    found = f"yes {version}".strip() if nccl else "no"
    yield MachineFact("ranks", "NCCL", found, "" if nccl else "GPUs of several ranks need it")


def _kernels() -> Iterator[MachineFact]:
    """Say which compiled kernels are used, and whether there is a compiler where there are none."""
    library, compiler = native.library(), find_compiler()
    slow = "" if library else "updates on a CPU run in plain PyTorch: the same bits, several times slower"
    origin = library.origin if library else "plain PyTorch"
    yield MachineFact("kernels", "CPU updates", origin, slow, bad=library is None)
    todo = "" if library or compiler else f"install one of {', '.join(COMPILERS)}, or name one in CXX"
    yield MachineFact("kernels", "C++ compiler", compiler or "none", todo, bad=bool(todo))
    accelerator = usable_accelerator()
    if accelerator is not None:
        why = device.obstacle(torch.device(accelerator.type, 0))
        slow = f"updates on a GPU run in plain PyTorch, several times slower: {why}"
        found = "plain PyTorch" if why else "Triton"
        yield MachineFact("kernels", "GPU updates", found, slow if why else "", bad=bool(why))


def doctor_text(findings: list[MachineFact], *, color: bool, width: int = WIDTH) -> str:
    parts = [title("doctor", width=width)]
    for part in dict.fromkeys(finding.part for finding in findings):
        rows = [(f.what, f.found, f.note) for f in findings if f.part == part]
        parts += [section(part), grid(rows, (16, 40), ("", "bold"), width)]
    wrong = [(f.what, f"{f.found}; {f.note}" if f.note else f.found) for f in findings if f.bad]
    parts.append(section("slow or missing" if wrong else "nothing is slow or missing"))
    if wrong:
        parts.append(pairs(wrong, width=width))
    return render(parts, color, width)
