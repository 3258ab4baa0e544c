"""Descriptions of configs on disk: a model is planned again without importing torch or `transformers`.

Both take seconds to import, and a plan needs nothing of them but the description. An entry is found by the
config, the interpreter and the installed packages, and lists the files that were imported to compute it.

Invariant: a description that is read equals the one that would be computed. An entry is not used if a file in
its list has changed, nor by a process that has imported either package, since code may have altered them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerodrift.dtypes import DType
from zerodrift.files import cache_folder
from zerodrift.model.spec import ModelSpec
from zerodrift.record import decode, encode

KEPT = 32
"""Entries on disk; the oldest ones beyond are removed."""


def entry_of(config: Mapping[str, Any], dtype: DType | None) -> Path | None:
    """Return the file of a description, which may not exist; None for a process that must compute it."""
    folder = cache_folder() if _is_fresh() else None
    if folder is None:
        return None
    known = [config, encode(dtype), sys.version, sys.path, _installed()]
    name = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
    return folder / "models" / f"{name}.json"


def read(entry: Path) -> ModelSpec | None:
    """Return the description of an entry, or None if there is none that holds."""
    try:
        document = json.loads(entry.read_bytes())
        if document["stamp"] != _stamp(document["files"]):
            return None
        return decode(ModelSpec, document["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(entry: Path, spec: ModelSpec) -> None:
    """Write a description with the files that this process has imported. A full disk is no error."""
    files, new = _imported(), entry.with_suffix(f".{os.getpid()}.new")
    try:
        document = {"files": files, "stamp": _stamp(files), "model": encode(spec)}
        entry.parent.mkdir(exist_ok=True)
        new.write_text(json.dumps(document))
        new.replace(entry)
        entries = sorted(entry.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in entries[:-KEPT]:
            old.unlink()
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()


def _is_fresh() -> bool:
    """Return True if this process has imported neither package."""
    return not {"torch", "transformers"} & sys.modules.keys()


def _installed() -> list[list[str]]:
    """List the installed distributions, with their versions, by folder of `sys.path`."""
    found = []
    for folder in sys.path:
        with contextlib.suppress(OSError):
            names = os.listdir(folder or os.curdir)
            found.append(sorted(name for name in names if name.endswith((".dist-info", ".egg-info", ".pth"))))
    return found


def _imported() -> list[str]:
    """Return the source files of imported modules, without those of Python, and of torch only its layers."""
    files = set()
    for name, module in list(sys.modules.items()):
        package, path = name.partition(".")[0], getattr(module, "__file__", None)
        is_versioned = package in sys.stdlib_module_names or package == "torch"
        if path and (not is_versioned or name.startswith("torch.nn.modules")):
            files.add(os.path.abspath(path))
    return sorted(files)


def _stamp(files: Iterable[str]) -> str:
    """Return a hash of the sizes and times of files."""
    found = []
    for file in files:
        state = os.stat(file)
        found.append((file, state.st_size, state.st_mtime_ns))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
