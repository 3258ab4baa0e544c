"""A job file or dict to a checked `Job`: every wrong key at once, each with its nearest match.

It is read as a config is (`config/tree.py`), and what is under `config` is checked as one, so one error tells
all that is wrong with a file.

Invariant: nothing is started and nothing but the named files is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from zerodrift.config import fields
from zerodrift.config.load import load
from zerodrift.config.plain import join, override
from zerodrift.config.schema import Config
from zerodrift.config.tree import Keys, TreeReader, tree_of
from zerodrift.errors import ConfigError, nearest
from zerodrift.train.data.hub import from_cache
from zerodrift.train.loop.job import Job

UNDER_CONFIG = "config."


def read_job(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[Job, Config]:
    """The job, and the engine's config in it, after `overrides` such as `run.steps=10` or
    `config.zero_optimization.stage=2`."""
    heading, tree, problems = tree_of(source, "job")
    for_config = [text for text in overrides if text.startswith(UNDER_CONFIG)]
    override(tree, [text for text in overrides if text not in for_config], problems)
    given = tree.get("config")
    walk = TreeReader(KEYS, problems)
    job = walk.validated(walk.used(tree))
    config, wrong = _config(given, [text.removeprefix(UNDER_CONFIG) for text in for_config])
    if wrong is not None:
        raise ConfigError.joined([ConfigError.of(problems, heading), wrong] if problems else [wrong])
    problems.raise_as(ConfigError, heading)
    if job is None or config is None:
        raise AssertionError("a job that is not valid must have a problem")
    job = from_cache(_with_folder(job, heading))
    return job.model_copy(update={"config": _tree(given, for_config)}), config


def read_back(path: Path) -> Job:
    """The job of a run as it was written beside it; what is under `config` is not looked at."""
    heading, tree, problems = tree_of(path, "job")
    walk = TreeReader(KEYS, problems)
    job = walk.validated(walk.used(tree))
    problems.raise_as(ConfigError, heading)
    if job is None:
        raise AssertionError("a job that is not valid must have a problem")
    return job


def _config(given: Any, overrides: list[str]) -> tuple[Config | None, ConfigError | None]:
    """The engine's config, and what is wrong with it. A dict and the overrides of its keys belong to one
    tree; a path and its overrides to another file."""
    if given is not None and not isinstance(given, (dict, str)):
        return None, None  # told already, as a key of the job
    source: Any = {} if given is None else given
    try:
        return load(source, overrides), None
    except ConfigError as error:
        if isinstance(source, str):
            return None, error
        return None, ConfigError.of(error.problems, "`config` of the job")


def _tree(given: Any, overrides: list[str]) -> dict[str, Any]:
    """The engine's config as it is written, overrides and the file that it is in put in their places; it has
    been read without a problem."""
    _, tree, problems = tree_of({} if given is None else given, "config")
    override(tree, [text.removeprefix(UNDER_CONFIG) for text in overrides], problems)
    return tree


def _with_folder(job: Job, heading: str) -> Job:
    """The job with the folder that it goes to by default."""
    if job.run.folder:
        return job
    name = Path(heading).stem if heading != "job" else "job"
    return job.model_copy(update={"run": job.run.model_copy(update={"folder": f"runs/{name}"})})


# --- unknown keys ---------------------------------------------------------------------------------------


def _suggestion(key: str, block: type[BaseModel] | None, path: str) -> str:
    """The key that was probably meant: in this block, in another, or of the engine's config."""
    known = fields.fields(block) if block is not None else {}
    paths = [join(path, word) for word in nearest(key, known)]
    paths += [other for other in every_path() if other.rpartition(".")[2] == key and other not in paths]
    paths += [UNDER_CONFIG + key] if key in fields.fields(Config) else []
    if not paths:
        last = {other.rpartition(".")[2]: other for other in every_path()}
        paths = [last[word] for word in nearest(key, last)]
        paths += [UNDER_CONFIG + word for word in nearest(key, fields.fields(Config)) if not paths]
    if not paths:
        return "docs/job.md lists every key."
    return f"Did you mean {' or '.join(f'`{name}`' for name in paths[:3])}?"


def every_path() -> Iterator[str]:
    """Every key of a job, dotted."""
    for key in fields.every_key(Job):
        yield key.path


KEYS = Keys("job", Job, "a job", _suggestion, free="a block of keys")
