"""What a file says that a run should be, held against what was seen of it.

The file is a table that `check --save` wrote, a plan that `plan --json` wrote, or a config, ours or
DeepSpeed's. A config is planned on the model that was seen, and a column is held to it where one of its keys
decided the column; a plan is held to in every column that another library has too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerodrift.config.load import load
from zerodrift.dtypes import DType, from_torch, lost
from zerodrift.errors import ConfigError
from zerodrift.model.spec import ModelSpec, OwningModule, ParameterSpec
from zerodrift.observer import tables
from zerodrift.observer.finding import RunFinding
from zerodrift.observer.grouping import SHORT, cell
from zerodrift.observer.seen import SeenModel, SeenParameter, SeenProcess
from zerodrift.plan.build import build
from zerodrift.plan.table import Plan, Row
from zerodrift.policy.nouns import Master, State
from zerodrift.policy.resolve import mesh_for, resolve


def unexpected(path: Path, processes: Sequence[SeenProcess]) -> list[RunFinding]:
    """Every cell that is not as the file says."""
    data = _json(path)
    if tables.is_table(data):
        return [_differs(item) for item in tables.differences(tables.read(path), processes)]
    trained = [model for model in processes[0].models if model.trained]
    if len(trained) != 1:
        raise ConfigError(
            path.name,
            "must be a table that `check --save` wrote, where several models are trained",
            got=f"{len(trained)} models: {', '.join(model.name for model in trained)}",
        )
    whole = _is_plan(data)
    plan = _read_plan(path, data) if whole else _planned(path, trained[0], processes[0].world)
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for name, column, said, why, seen in _cells(plan, trained[0], processes[0].micro_batches, whole):
        alike.setdefault((column, said, why, seen), []).append(name)
    return [_declared(*key, tuple(names)) for key, names in alike.items()]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None  # the reader of configs says what is wrong with it


def _is_plan(data: Any) -> bool:
    return isinstance(data, dict) and {"rows", "segments", "digest"} <= data.keys()


def _read_plan(path: Path, data: Any) -> Plan:
    try:
        return Plan.from_json(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(path.name, "must be a plan that `plan --json` wrote", got=repr(error)) from None


def _differs(item: tables.CellDifference) -> RunFinding:
    return RunFinding(
        "not-as-expected",
        item.column,  # type: ignore[arg-type]
        item.names,
        f"It was {item.a} and is {item.b}.",
        "If the change is meant, save the table anew.",
    )


def _declared(column: str, said: str, why: str, seen: str, names: tuple[str, ...]) -> RunFinding:
    return RunFinding(
        "key-without-effect" if _KEY.search(why) else "not-as-expected",
        column,  # type: ignore[arg-type]
        names,
        f"{why}: {said} was declared, {seen} was seen.",
        "The library that runs does not do what the key says: see what it supports, or leave the key out.",
    )


_KEY = re.compile(r"[a-z_]+\.[a-z_]+|communication_data_type|[a-z]+_dtype")
"""A key, in the reason of a cell."""


def _planned(path: Path, model: SeenModel, world: int) -> Plan:
    config = load(path)
    mesh = mesh_for(config, world)
    return build(resolve(config, mesh), _spec(model), mesh)


def _spec(model: SeenModel) -> ModelSpec:
    return ModelSpec(model.name, tuple(_parameter(parameter) for parameter in model.parameters))


def _parameter(seen: SeenParameter) -> ParameterSpec:
    import torch

    names = (seen.name, *seen.also)
    rests = from_torch(getattr(torch, (seen.whats("storage") or ("float32",))[0]))
    return ParameterSpec(
        names=names,
        shape=seen.shape,
        dtype=rests or DType.FP32,
        owners=tuple(OwningModule(name.rpartition(".")[0], seen.kind) for name in names),
        trained=seen.trained,
    )


# --- cells --------------------------------------------------------------------------------------------


def _cells(
    plan: Plan, model: SeenModel, micro_batches: int, whole: bool
) -> Iterator[tuple[str, str, str, str, str]]:
    """Name, column, what is declared, why, what was seen: where they differ. `whole` is also of columns that
    no key decided."""
    for row in plan.rows:
        parameter = model.parameter(row.name)
        if parameter is None:
            yield row.name, "storage", "a parameter", "in the plan", "none of that name"
            continue
        why = row.columns.reasons()
        for column, said in _said(row, parameter).items():
            reason = why.get(column, "")
            if not parameter.whats(column):  # type: ignore[arg-type]
                continue
            if not whole and not _is_decided(column, reason, micro_batches):
                continue
            if not _holds(plan, row, column, said, parameter):
                yield row.name, column, SHORT.get(said, said), reason, cell(parameter, column)


def _is_decided(column: str, reason: str, micro_batches: int) -> bool:
    """Whether a config says it, and a library need not have a default of ours."""
    if "default" in reason:
        return False
    once = column == "accumulate" and micro_batches == 1
    return bool(_KEY.search(reason)) or not (column == "reduce" or once)


def _said(row: Row, parameter: SeenParameter) -> dict[str, str]:
    """The columns that another library has too, in torch's words."""
    columns = row.columns
    said = {"storage": _word(columns.storage.dtype), "compute": _word(columns.compute)}
    if columns.update is not None:
        update = columns.update
        said |= {
            "accumulate": _word(update.accumulate.dtype),
            "reduce": _word(update.reduce.wire),
            "master": "same" if update.master is Master.SAME else "float32",
            "state": {State.FP32: "float32"}.get(update.state, str(update.state.value)),
        }
    return said


def _holds(plan: Plan, row: Row, column: str, said: str, parameter: SeenParameter) -> bool:
    seen = parameter.whats(column)  # type: ignore[arg-type]
    if column == "master":
        wide = set(seen) <= {"float32"} or (seen == ("same",) and parameter.whats("storage") == ("float32",))
        return wide if said == "float32" else True
    if column == "state":
        return said != "float32" or set(seen) <= {"float32"}
    if column == "storage":
        return _narrowest(seen, said)
    mode = plan.policy.mode
    if column == "compute" and mode.autocast and not row.columns.pinned:
        return set(seen) <= {_word(mode.dtype), "float32"}
    return _narrowest(seen, said)


def _narrowest(seen: Sequence[str], said: str) -> bool:
    """Whether everything that was seen holds every value of what was said."""
    import torch

    least = from_torch(getattr(torch, said))
    for word in seen:
        for part in word.split(">"):
            dtype = from_torch(getattr(torch, part, torch.int8))
            if least is not None and (dtype is None or lost(least, dtype)):
                return False
    return True


def _word(dtype: DType) -> str:
    return str(dtype.torch).removeprefix("torch.")
