"""The stand-in device's extension, compiled once for each torch."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

needs_device = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux and a C++ compiler"
)

SOURCE = Path(__file__).with_name("standin.cpp")


@functools.cache
def library() -> Path:
    """Return the extension's file, which is compiled if it was not for this source and torch."""
    root = Path(torch.__file__).parent
    key = hashlib.sha256(
        SOURCE.read_bytes() + f"{torch.__version__} {sysconfig.get_platform()}".encode()
    ).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"standin-{os.getuid()}-{key[:16]}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made := folder / "standin_ext.so").exists():
            _compile(root, folder / "unfinished.so")
            (folder / "unfinished.so").rename(made)
    return made


def _compile(root: Path, target: Path) -> None:
    folders = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = ["torch", "torch_cpu", "c10", "torch_python"]
    subprocess.run(
        [
            *("c++", "-O0", "-std=c++20", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=standin_ext"),
            *(f"-I{folder}" for folder in folders),
            *(str(SOURCE), "-o", str(target), f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"),
            *(f"-l{name}" for name in libraries),
        ],
        check=True,
    )


@functools.cache
def extension() -> Any:
    spec = importlib.util.spec_from_file_location("standin_ext", library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
