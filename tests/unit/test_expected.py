"""`check --expect`: a saved table, a plan or a config is compared with the observation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zerodrift
from zerodrift.errors import ConfigError
from zerodrift.inspect.check.compare import unexpected
from zerodrift.inspect.check.table import encoded
from zerodrift.inspect.trace.records import ModelRecord, ParameterRecord, ProcessRecord
from zerodrift.model.spec import ModelSpec, OwningModule, ParameterSpec
from zerodrift.plan.bill import cost
from zerodrift.report.as_json import plan_json

BF16 = dict.fromkeys(("storage", "compute", "grad"), "bfloat16")
BF16 |= dict.fromkeys(("accumulate", "reduce", "master", "state"), "float32")
"""A bf16 run with fp32 masters and sums."""

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "communication_data_type": "fp32",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def records(name: str = "head.weight", **cells: str) -> list[ProcessRecord]:
    parameter = ParameterRecord(name, (8, 4), "torch.nn.modules.linear.Linear", True)
    for column, what in {**BF16, **cells}.items():
        parameter.add(column, what, "test")  # type: ignore[arg-type]
    return [ProcessRecord(0, 2, 3, [ModelRecord("Net", [parameter])], micro_batches=4)]


def write_expected(folder: Path, text: str) -> Path:
    (folder / "expected.json").write_text(text)
    return folder / "expected.json"


@pytest.mark.parametrize(
    ("column", "dtype", "kind"),
    [
        ("accumulate", "bfloat16", "key-without-effect"),
        ("reduce", "bfloat16", "key-without-effect"),
        ("storage", "float16", "not-as-expected"),
        ("master", "same", "not-as-expected"),
        ("compute", "float16", "not-as-expected"),
    ],
)
def test_a_cell_that_is_not_as_a_config_says_is_named(
    column: str, dtype: str, kind: str, tmp_path: Path
) -> None:
    (found,) = unexpected(write_expected(tmp_path, json.dumps(CONFIG)), records(**{column: dtype}))
    assert (found.kind, found.column, found.names) == (kind, column, ("head.weight",))


WITHOUT_KEY = {key: value for key, value in CONFIG.items() if key != "data_types"}


@pytest.mark.parametrize(
    ("config", "cells"),
    [
        (CONFIG, {"compute": "float32"}),
        (CONFIG, {"master": "split"}),
        (WITHOUT_KEY, {"accumulate": "bfloat16"}),
    ],
)
def test_what_no_key_decides_is_the_librarys_own_and_wider_is_no_difference(
    config: dict[str, Any], cells: dict[str, str], tmp_path: Path
) -> None:
    assert unexpected(write_expected(tmp_path, json.dumps(config)), records(**cells)) == []


@pytest.mark.parametrize("asked", [True, False])
def test_a_rule_binds_whatever_its_pattern_says(asked: bool, tmp_path: Path) -> None:
    """peft calls its adapters `default`, like the reason of columns without a rule."""
    rules = [{"match": "*.default.*", "accumulate": "fp32"}] if asked else []
    file = write_expected(tmp_path, json.dumps({**WITHOUT_KEY, "precision": {"rules": rules}}))
    found = unexpected(file, records("lora_A.default.weight", accumulate="bfloat16"))
    assert [(each.kind, each.column) for each in found] == [("key-without-effect", "accumulate")] * asked


def plan(name: str = "head.weight") -> str:
    owner = OwningModule("head", "torch.nn.modules.linear.Linear")
    spec = ParameterSpec((name,), (8, 4), zerodrift.dtypes.DType.FP32, (owner,))
    planned = zerodrift.make_plan(CONFIG, ModelSpec("Net", (spec,)), 2)
    return plan_json(planned, cost(planned, None))


@pytest.mark.parametrize("what", ["a config", "a plan", "a table"])
def test_each_is_held_to_in_its_columns(what: str, tmp_path: Path) -> None:
    """A plan is checked in columns without a key too, and a saved table cell by cell."""
    texts = {"a config": json.dumps(CONFIG), "a plan": plan(), "a table": encoded(records(), [])}
    column = {"a config": "master", "a plan": "state", "a table": "reduce"}[what]
    file = write_expected(tmp_path, texts[what])
    assert unexpected(file, records()) == []
    (found,) = unexpected(file, records(**{column: "bfloat16"}))
    assert (found.kind, found.column) == ("not-as-expected", column)


def test_a_parameter_that_only_the_plan_has_is_named(tmp_path: Path) -> None:
    (found,) = unexpected(write_expected(tmp_path, plan("model.head.weight")), records())
    assert found.names == ("model.head.weight",) and "none of that name" in found.what


@pytest.mark.parametrize("text", ["", "nonsense: [", '{"rows": 1, "segments": 2, "digest": 3}', '{"no": 1}'])
def test_what_says_nothing_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected\.json|`no`"):
        unexpected(write_expected(tmp_path, text), records())


def test_several_models_need_a_table(tmp_path: Path) -> None:
    (process,) = records()
    process.models *= 2
    with pytest.raises(ConfigError, match="several models"):
        unexpected(write_expected(tmp_path, json.dumps(CONFIG)), [process])
