"""Read a job file or dict into a checked `Job`. One error names every wrong key, with its nearest match.

A job is read like a config (`config/tree.py`), and its `config` block is checked like one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerodrift.config import Config, Keys, TreeReader, fields, load, override, tree_of
from zerodrift.dtypes import ADMITTED, parse_among
from zerodrift.errors import ConfigError, Problems
from zerodrift.train.data.files import from_cache
from zerodrift.train.job import Job, Model

UNDER_CONFIG = "config."
JOB_FILE, PLAN_FILE = "job.json", "plan.json"
"""The job and the plan in the folder of a run."""
FROZEN = "precision.frozen"
"""The key of the config that `model.base` sets."""
TOTALS = ("total_num_steps", "num_training_steps")
"""Arguments of schedules that a job fills in if the config has "auto"."""

UNCOUNTED = 1 << 30
"""Steps of a job before its data are counted: large enough for every schedule."""


def read_job(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[Job, Config]:
    """Read a job from a file, a dict, or the folder of a run to resume."""
    file = _job_of_run(source)
    heading, tree, problems = tree_of(source if file is None else file, "job")
    if file is not None and isinstance(run := tree.setdefault("run", {}), dict):
        run["folder"] = str(file.parent)  # from any working folder
    for_config = [text.removeprefix(UNDER_CONFIG) for text in overrides if text.startswith(UNDER_CONFIG)]
    override(tree, [text for text in overrides if not text.startswith(UNDER_CONFIG)], problems)
    given = tree.get("config")
    job = _validated(tree, problems)
    config = None
    if given is None or isinstance(given, (dict, str)):  # any other is a problem of the job's key
        try:
            config = load({} if given is None else given, for_config)
            if job is not None and job.model.base:
                for_config.append(f"{FROZEN}={job.model.base}")
                _check_base(job.model, config, problems)
                config = load({} if given is None else given, for_config)
        except ConfigError as error:
            is_file, named = isinstance(given, str), "the job" if heading == "job" else heading
            wrong = error if is_file else ConfigError.of(error.problems, f"`config` of {named}")
            joined = [ConfigError.of(problems, heading), wrong] if problems else [wrong]
            raise ConfigError.joined(joined) from None
    problems.raise_as(ConfigError, heading)
    assert job is not None and config is not None, "a job that is not valid has a problem"
    if not job.run.folder:
        name = Path(heading).stem if heading != "job" else "job"
        job = job.model_copy(update={"run": job.run.model_copy(update={"folder": f"runs/{name}"})})
    # The job keeps the config as it was written, with its file and overrides put in their places.
    _, tree, problems = tree_of({} if given is None else given, "config")
    override(tree, for_config, problems)
    return from_cache(job).model_copy(update={"config": tree}), config


def is_job(source: str) -> bool:
    """Return True if a file has the blocks of a job, or for the folder of a run."""
    if _job_of_run(source) is not None:
        return True
    try:
        _, tree, _ = tree_of(source, "job")
    except ConfigError:
        return False
    return "data" in tree and "model" in tree


def _job_of_run(source: object) -> Path | None:
    """Return the job in the folder of a run, which has its plan beside it; None for any other source."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    is_run = all(os.path.isfile(os.path.join(source, name)) for name in (JOB_FILE, PLAN_FILE))
    return Path(source) / JOB_FILE if is_run else None


def numbers_of(job: Job, config: Config, steps: int | None) -> Mapping[str, Any]:
    """Return the values of "auto" keys: the job's, and the number of steps, or `UNCOUNTED` for None."""
    return {**dict.fromkeys(totals(config), steps or UNCOUNTED), **job.auto}


def totals(config: Config) -> list[str]:
    params = {} if config.scheduler is None else config.scheduler.params
    return [f"scheduler.params.{name}" for name in TOTALS if params.get(name) == "auto"]


def _check_base(model: Model, config: Config, problems: Problems) -> None:
    said = config.precision.frozen
    if said is not None and said is not parse_among(model.base, ADMITTED["frozen"]):
        must = f"must agree with `{UNDER_CONFIG}{FROZEN}`, which says {said}"
        problems.add("model.base", must, got=model.base, do="Keep one of the two keys.")
    if model.lora is None and not model.freeze:
        must = "must go with `model.lora` or `model.freeze`: it is for parameters that are not trained"
        problems.add("model.base", must, got=model.base, do="Add `model.lora`, or leave it out.")


def read_back(path: Path) -> Job:
    """Return the job of a run from its folder, without a check of its `config`."""
    heading, tree, problems = tree_of(path, "job")
    job = _validated(tree, problems)
    problems.raise_as(ConfigError, heading)
    assert job is not None, "a job that is not valid has a problem"
    return job


def _validated(tree: dict[str, Any], problems: Problems) -> Job | None:
    used = TreeReader(KEYS, problems).select_used(tree)
    return None if problems else Job.model_validate(used)


_OF_CONFIG = tuple(UNDER_CONFIG + key for key in fields.fields(Config))
KEYS = Keys("job", Job, "a job", "docs/job.md lists every key.", _OF_CONFIG, free="a block of keys")
