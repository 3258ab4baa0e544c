"""A job file or dict to a checked `Job`: every wrong key at once, each with its nearest match.

The text is read by `config/read.py`, overrides and messages are those of the config too, and what is under
`config` is checked there, so one error tells all that is wrong with a file.

Invariant: nothing is started and nothing but the named files is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from zerodrift.config import fields
from zerodrift.config.load import load, tree_of
from zerodrift.config.plain import Tree, join, override, shown
from zerodrift.config.schema import Block, Config
from zerodrift.errors import ConfigError, Problems, nearest
from zerodrift.train.job import Job

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
    job = _job(tree, problems)
    config, wrong = _config(given, [text.removeprefix(UNDER_CONFIG) for text in for_config])
    if wrong and problems:
        raise ConfigError(f"{_told(problems, heading)}\n{wrong}")
    if wrong:
        raise ConfigError(wrong)
    problems.raise_as(ConfigError, heading)
    if job is None or config is None:
        raise AssertionError("a job that is not valid must have a problem")
    return _with_folder(job, heading), config


def _told(problems: Problems, heading: str) -> str:
    try:
        problems.raise_as(ConfigError, heading)
    except ConfigError as error:
        return str(error)
    raise AssertionError("there are problems")


def _config(given: Any, overrides: list[str]) -> tuple[Config | None, str]:
    """The engine's config, and what is wrong with it. A dict and the overrides of its keys belong to one
    tree; a path and its overrides to another file."""
    if given is not None and not isinstance(given, (dict, str)):
        return None, ""  # told already, as a key of the job
    source: Any = {} if given is None else given
    try:
        return load(source, overrides), ""
    except ConfigError as error:
        text = str(error)
        return None, text if isinstance(source, str) else text.replace("config", "`config` of the job", 1)


def _with_folder(job: Job, heading: str) -> Job:
    """The job with the folder that it goes to by default."""
    if job.run.folder:
        return job
    name = Path(heading).stem if heading != "job" else "job"
    return job.model_copy(update={"run": job.run.model_copy(update={"folder": f"runs/{name}"})})


# --- the walk -----------------------------------------------------------------------------------------


def _job(tree: Tree, problems: Problems) -> Job | None:
    made = _block(tree, Job, "", problems)
    return made if isinstance(made, Job) else None


def _block(tree: Tree, block: type[Block], path: str, problems: Problems) -> BaseModel | None:
    """A block with its values checked one by one, so that each message is about one key."""
    known = fields.fields(block)
    unknown = [key for key in tree if key not in known]
    for key in unknown:
        owner = f"`{path}`" if path else "a job"
        todo = _suggestion(key, path, known) or "docs/job.md lists every key."
        problems.add(join(path, key), f"must be a key of {owner}", "", todo)
    before = len(list(problems))
    values: dict[str, Any] = {}
    for key, kind in known.items():
        here, value = join(path, key), tree.get(key)
        if value is None:
            if block.model_fields[key].is_required() and not unknown:
                admitted = "a block of keys" if fields.block_of(kind) else fields.admits(kind)
                problems.add(here, f"must be given: {admitted}", "", _first_sentence(block, key))
            continue
        inner = fields.block_of(kind)
        if inner is not None and isinstance(value, dict):
            values[key] = _block(value, inner, here, problems)
            continue
        try:
            values[key] = TypeAdapter(kind).validate_python(value)
        except ValidationError:
            words = "must be a block of keys" if fields.is_free(kind) else fields.must(kind, value)
            problems.add(here, words, shown(value), _remedy(kind, value))
    if unknown or len(list(problems)) > before:
        return None
    return block.model_validate(values)


def _first_sentence(block: type[Block], key: str) -> str:
    text = " ".join((block.model_fields[key].description or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def _suggestion(key: str, path: str, known: Mapping[str, Any]) -> str:
    """The key that was probably meant: in this block, in another, or of the engine's config."""
    found = [join(path, word) for word in nearest(key, known)]
    found += [other for other in every_path() if other.rpartition(".")[2] == key and other not in found]
    found += [UNDER_CONFIG + key] if key in fields.fields(Config) else []
    if not found:
        last = {other.rpartition(".")[2]: other for other in every_path()}
        found = [last[word] for word in nearest(key, last)]
        found += [UNDER_CONFIG + word for word in nearest(key, fields.fields(Config)) if not found]
    return f"Did you mean {' or '.join(f'`{name}`' for name in found[:3])}?" if found else ""


def every_path() -> Iterator[str]:
    """Every key of a job, dotted."""
    for key in fields.every_key(Job):
        yield key.path


def _remedy(kind: Any, value: Any) -> str:
    if isinstance(value, str):
        close = nearest(value, fields.choices(kind))
        return f"Did you mean `{close[0]}`?" if close else ""
    return ""
