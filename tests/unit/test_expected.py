"""`check --expect`: a saved table, a plan or a config, held against what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zerodrift
from zerodrift.errors import ConfigError
from zerodrift.inspect.check.compare import unexpected
from zerodrift.inspect.check.findings import RunFinding
from zerodrift.inspect.check.table import encoded
from zerodrift.inspect.trace.records import ModelRecord, ParameterRecord, ProcessRecord
from zerodrift.model.spec import ModelSpec, OwningModule, ParameterSpec
from zerodrift.plan.cost import cost
from zerodrift.report.as_json import plan_json

BF16 = {
    "storage": "bfloat16",
    "compute": "bfloat16",
    "grad": "bfloat16",
    "accumulate": "float32",
    "reduce": "float32",
    "master": "float32",
    "state": "float32",
}
"""A bf16 run with fp32 masters and sums."""

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def seen(**cells: str) -> list[ProcessRecord]:
    parameter = ParameterRecord("head.weight", (8, 4), "torch.nn.modules.linear.Linear", True)
    for column, what in {**BF16, **cells}.items():
        parameter.add(column, what, "test")  # type: ignore[arg-type]
    return [ProcessRecord(0, 2, 3, [ModelRecord("Net", [parameter])], micro_batches=4)]


def written(folder: Path, text: str, name: str = "expected.json") -> Path:
    (folder / name).write_text(text)
    return folder / name


def told(findings: list[RunFinding]) -> set[tuple[str, str | None]]:
    return {(finding.kind, finding.column) for finding in findings}


def test_a_run_that_does_what_its_config_says(tmp_path: Path) -> None:
    assert unexpected(written(tmp_path, json.dumps(CONFIG)), seen()) == []


@pytest.mark.parametrize(
    ("cells", "finding"),
    [
        ({"accumulate": "bfloat16"}, ("key-without-effect", "accumulate")),
        ({"storage": "float16"}, ("not-as-expected", "storage")),
        ({"master": "same"}, ("not-as-expected", "master")),
        ({"compute": "float16"}, ("not-as-expected", "compute")),
    ],
)
def test_a_cell_that_is_not_as_a_config_says_is_named(
    cells: dict[str, str], finding: tuple[str, str], tmp_path: Path
) -> None:
    (found,) = unexpected(written(tmp_path, json.dumps(CONFIG)), seen(**cells))
    assert (found.kind, found.column) == finding and found.names == ("head.weight",)


def test_what_no_key_decides_is_the_librarys_own(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "data_types"}
    assert unexpected(written(tmp_path, json.dumps(config)), seen(accumulate="bfloat16")) == []


def test_wider_than_declared_is_no_difference(tmp_path: Path) -> None:
    assert unexpected(written(tmp_path, json.dumps(CONFIG)), seen(compute="float32")) == []


def plan(name: str = "head.weight") -> str:
    owner = OwningModule("head", "torch.nn.modules.linear.Linear")
    spec = ParameterSpec((name,), (8, 4), zerodrift.dtypes.DType.FP32, (owner,))
    planned = zerodrift.make_plan(CONFIG, ModelSpec("Net", (spec,)), 2)
    return plan_json(planned, cost(planned, None))


def test_a_plan_is_held_to_in_columns_that_no_key_decides(tmp_path: Path) -> None:
    file = written(tmp_path, plan())
    assert unexpected(file, seen()) == []
    assert told(unexpected(file, seen(state="bfloat16"))) == {("not-as-expected", "state")}


def test_a_parameter_that_only_the_plan_has_is_named(tmp_path: Path) -> None:
    (found,) = unexpected(written(tmp_path, plan("model.head.weight")), seen())
    assert found.names == ("model.head.weight",) and "none of that name" in found.what


def test_a_saved_table_is_compared_cell_by_cell(tmp_path: Path) -> None:
    file = written(tmp_path, encoded(seen(), []))
    assert unexpected(file, seen()) == []
    assert told(unexpected(file, seen(reduce="bfloat16"))) == {("not-as-expected", "reduce")}


@pytest.mark.parametrize("text", ["", "nonsense: [", '{"rows": 1, "segments": 2, "digest": 3}', '{"no": 1}'])
def test_what_says_nothing_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected\.json|`no`"):
        unexpected(written(tmp_path, text), seen())


def test_several_models_need_a_table(tmp_path: Path) -> None:
    (process,) = seen()
    process.models *= 2
    with pytest.raises(ConfigError, match="several models"):
        unexpected(written(tmp_path, json.dumps(CONFIG)), [process])
