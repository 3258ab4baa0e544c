"""Names of the Hugging Face hub in a job: read from the local cache, where they were downloaded before.

Nothing is downloaded here. A name that is no path and is not in the cache is refused where it is used, with
the command that downloads it.

Invariant: what is there under a path is that path, whatever the cache holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from zerodrift.train.loop.job import DataSet, Job, Paths

Kind = Literal["model", "dataset"]
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_LONGEST = 96
"""Characters of a name, as the hub allows them."""
_CACHED = re.compile(r"(model|dataset)s--(.+)")


def from_cache(job: Job) -> Job:
    """A job in which names of the hub are the folders of the cache that hold them."""
    data, model = job.data, job.model
    held, letters = data.validation, data.tokenizer
    if isinstance(data.train, str):
        train: str | tuple[str | DataSet, ...] = path_of(data.train, "dataset")
    else:
        train = tuple(map(_set_from_cache, data.train))
    now = {
        "train": train,
        "validation": held if isinstance(held, float) else _paths_from_cache(held),
        "tokenizer": letters if letters in ("auto", "bytes") else path_of(letters, "model"),
    }
    source = path_of(model.source, "model")
    return job.model_copy(
        update={
            "model": model.model_copy(update={"source": source}),
            "data": data.model_copy(update=now),
        }
    )


def _set_from_cache(written: str | DataSet) -> str | DataSet:
    if isinstance(written, str):
        return path_of(written, "dataset")
    return written.model_copy(update={"path": _paths_from_cache(written.path)})


def _paths_from_cache(written: Paths) -> Paths:
    if isinstance(written, str):
        return path_of(written, "dataset")
    return tuple(path_of(each, "dataset") for each in written)


def path_of(written: str, kind: Kind) -> str:
    """The folder of a name that is in the cache; whatever else is written, as it is."""
    if not is_name(written):
        return written
    folder = cache() / f"{kind}s--{written.replace('/', '--')}"
    found = _snapshot(folder)
    return written if found is None else str(found)


def is_name(text: str) -> bool:
    """Whether a text has the form of a name of the hub, and is no path here."""
    fits = len(text) <= _LONGEST and _NAME.fullmatch(text) and ".." not in text and "--" not in text
    return bool(fits) and not Path(text).exists()


def _snapshot(folder: Path) -> Path | None:
    """That of the branch `main`; else the only one."""
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        there = folder / "snapshots" / commit
        return there if commit and there.is_dir() else None
    except (OSError, ValueError):
        pass
    try:
        found = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return None
    return found[0] if len(found) == 1 else None


def cache() -> Path:
    """Where `huggingface_hub` puts what it downloads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def name_in_cache(path: str | Path) -> tuple[Kind, str] | None:
    """Of which name a path is the snapshot; None for any other path."""
    whole = Path(path)
    if whole.parent.name != "snapshots":
        return None
    found = _CACHED.fullmatch(whole.parent.parent.name)
    if found is None:
        return None
    kind: Kind = "model" if found[1] == "model" else "dataset"
    return kind, found[2].replace("--", "/", 1)


def download(name: str, kind: Kind) -> str:
    """What to do to have it."""
    what = "--repo-type dataset " if kind == "dataset" else ""
    return f"Run `hf download {what}{name}` if it is one of the hub."


def advice(written: str, kind: Kind) -> str:
    """What to do where a path is not there: something only where it may be a name of the hub."""
    if "/" not in written or not is_name(written) or Path(written.partition("/")[0]).is_dir():
        return ""
    return download(written, kind)


def told(job: Job) -> Iterator[str]:
    """A line for each name that is read from the cache."""
    sources = (job.model.source, job.data.tokenizer, *job.data.paths)
    held = job.data.validation
    more = () if isinstance(held, float) else (held,) if isinstance(held, str) else held
    for path in dict.fromkeys((*sources, *more)):
        found = name_in_cache(path)
        if found is not None:
            yield f"{found[0]} {found[1]} is read from the local cache: {path}"
