"""Find models and data sets of the Hugging Face hub in the local cache, by the names that a job gives.

Nothing is downloaded. A name that is no path and not in the cache is refused where it is used, with the
command that downloads it. An existing path is always that path, whatever the cache holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from zerodrift.train.job import DataSet, Job

Kind = Literal["model", "dataset"]
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_LONGEST = 96
_SNAPSHOT = re.compile(r"(model|dataset)s--(.+)")


def from_cache(job: Job) -> Job:
    """Return a job with the cached folders in place of hub names."""
    data, model = job.data, job.model
    letters = data.tokenizer
    found = {
        "train": _data_from_cache(data.train),
        "validation": _data_from_cache(data.validation),
        "tokenizer": letters if letters in ("auto", "bytes") else path_of(letters, "model"),
    }
    source = {"source": path_of(model.source, "model")}
    return job.model_copy(
        update={"model": model.model_copy(update=source), "data": data.model_copy(update=found)}
    )


def _data_from_cache(written: Any) -> Any:
    if isinstance(written, str):
        return path_of(written, "dataset")
    if isinstance(written, DataSet):
        return written.model_copy(update={"path": _data_from_cache(written.path)})
    return tuple(map(_data_from_cache, written)) if isinstance(written, tuple) else written


def path_of(written: str, kind: Kind) -> str:
    """Return the cached folder of a name, or whatever else is written as it is."""
    if not is_name(written):
        return written
    found = _snapshot(hub_cache() / f"{kind}s--{written.replace('/', '--')}")
    return written if found is None else str(found)


def is_name(text: str) -> bool:
    """Return True if a text has the form of a hub name and is no path here."""
    fits = len(text) <= _LONGEST and _NAME.fullmatch(text) and ".." not in text and "--" not in text
    return bool(fits) and not Path(text).exists()


def _snapshot(folder: Path) -> Path | None:
    """Return the snapshot of the branch `main`, else the only one."""
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        snapshot = folder / "snapshots" / commit
        return snapshot if commit and snapshot.is_dir() else None
    except (OSError, ValueError):
        pass
    try:
        found = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return None
    return found[0] if len(found) == 1 else None


def hub_cache() -> Path:
    """Return the folder that `huggingface_hub` downloads to."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def name_in_cache(path: str | Path) -> tuple[Kind, str] | None:
    """Return the kind and hub name of a cached snapshot; None for any other path."""
    whole = Path(path)
    found = _SNAPSHOT.fullmatch(whole.parent.parent.name) if whole.parent.name == "snapshots" else None
    if found is None:
        return None
    return "model" if found[1] == "model" else "dataset", found[2].replace("--", "/", 1)


def advice(name: str, kind: Kind) -> str:
    """Return the advice to download a missing path; empty if it cannot be a hub name."""
    if "/" not in name or not is_name(name) or Path(name.partition("/")[0]).is_dir():
        return ""
    what = "--repo-type dataset " if kind == "dataset" else ""
    return f"Run `hf download {what}{name}` if it is one of the hub."


def cached_names(job: Job) -> Iterator[str]:
    """Yield a line for each name of a job that is read from the cache."""
    held = job.data.validation
    others = () if isinstance(held, float) else (held,) if isinstance(held, str) else held
    for path in dict.fromkeys((job.model.source, job.data.tokenizer, *job.data.paths, *others)):
        if found := name_in_cache(path):
            yield f"{found[0]} {found[1]} is read from the local cache: {path}"
