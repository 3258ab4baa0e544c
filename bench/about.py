"""What a figure was measured with: the versions and the hardware, in the lines above a benchmark's table."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def about(*packages: str) -> str:
    """Versions of torch and `packages` as installed, then the processor, and the GPU if there is one."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "zerodrift", *packages):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{', '.join(versions)}\n{os.cpu_count()} cores of {_processor()}{_gpu()}"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{named[0] if named else platform.machine()} ({', '.join(units) or platform.machine()})"


def _gpu() -> str:
    import torch

    return f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
