"""`zerodrift check`: findings of all ranks, what was expected of them, and the config that fixes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zerodrift
from zerodrift.config import load
from zerodrift.errors import ConfigError
from zerodrift.inspect.check import compare
from zerodrift.inspect.check.findings import run_findings
from zerodrift.inspect.check.fixes import fixes
from zerodrift.inspect.check.report import run_page, run_text
from zerodrift.inspect.check.table import Kind, RunFinding, encoded, read_declaration
from zerodrift.inspect.trace.records import ModelRecord, ParameterRecord, ProcessRecord
from zerodrift.model.spec import ModelSpec, OwningModule, ParameterSpec
from zerodrift.plan.bill import cost
from zerodrift.policy import mesh_for, resolve
from zerodrift.report.as_json import plan_json

OWNS = ([1.0, -2.0, 0.5, 4.0], [3.0, 2.0, -1.5, 1.0])
"""Gradients of two ranks."""
MEAN = [2.0, 0.0, -0.5, 2.5]


def parameter(name: str = "w", **facts: Any) -> ParameterRecord:
    seen = ParameterRecord(name, (4,), "torch.nn.Linear", True)
    seen.facts |= {"optimized": True, "gradients": 2, "changed": True, **facts}
    return seen


def process(rank: int, *models: ModelRecord, micro_batches: int = 1) -> ProcessRecord:
    return ProcessRecord(rank, 2, 2, list(models), micro_batches)


def ranks_with(
    used: list[list[float | None]], wrapper: str = "", micro_batches: int = 1
) -> list[ProcessRecord]:
    """Return the records of two ranks whose optimizer had these gradients."""
    models = [
        ModelRecord("M", [parameter(own=own, used=held)], wrappers=(wrapper,))
        for own, held in zip(OWNS, used, strict=True)
    ]
    return [process(rank, model, micro_batches=micro_batches) for rank, model in enumerate(models)]


def columns(storage: str, compute: str, master: str, **facts: Any) -> list[ProcessRecord]:
    one = parameter(**facts)
    for column, what in {"storage": storage, "compute": compute, "master": master}.items():
        one.add(column, what, "")  # type: ignore[arg-type]
    return [process(0, ModelRecord("M", [one]))]


def models_of_one_name() -> list[ProcessRecord]:
    """Return the records of two ranks with two models of one name each."""
    kinds = [[ModelRecord("Sequential", [parameter(digest=digest)]) for digest in (1, 2)] for _ in range(2)]
    return [process(rank, *models) for rank, models in enumerate(kinds)]


NOTHING: list[float | None] = [None] * 4
LAST = [[0.3, 5.0, -0.1, -1.0]] * 2
LEFT_OUT = ModelRecord("M", [parameter(optimized=False)], trained=False)
CASES: dict[str, tuple[list[ProcessRecord], list[str]]] = {
    "the mean": (ranks_with([MEAN] * 2), []),
    "the sum": (ranks_with([[2 * value for value in MEAN]] * 2), ["not-averaged"]),
    "the own gradient": (ranks_with([*OWNS]), ["not-averaged"]),
    "the mean, and nothing on the other rank": (ranks_with([MEAN, NOTHING]), []),
    "the last of four": (ranks_with(LAST, "DeepSpeedEngine", micro_batches=4), ["not-accumulated"]),
    "neither, of one": (ranks_with(LAST, "DeepSpeedEngine"), []),
    "models of one name": (models_of_one_name(), []),
    "nothing is updated": ([process(0, LEFT_OUT)], ["never-updated"]),
    "another is updated": ([process(0, LEFT_OUT, ModelRecord("N", [parameter()]))], []),
    "a cast of what updates round": (columns("bfloat16", "float32", "same"),
        ["no-master", "upcast-without-effect"]),
    "bf16 without a master": (columns("bfloat16", "bfloat16", "same"), ["no-master"]),
    "bf16 that stays": (columns("bfloat16", "bfloat16", "same", changed=False, used=[1.0]), ["no-master"]),
    "rounding noise": (
        [process(0, ModelRecord("M", [parameter(used=[1.0]), parameter("b", used=[1e-8], changed=False)]))],
        []),
    "bf16 with a master": (columns("bfloat16", "float32", "float32"), []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_found_in_what_ranks_saw(case: str) -> None:
    processes, kinds = CASES[case]
    findings = run_findings(processes)
    assert [finding.kind for finding in findings] == kinds
    assert all(finding.names == ("w",) for finding in findings)
    assert len({finding.do for finding in findings}) <= 1


@pytest.mark.parametrize("ties", [True, None, False])
def test_an_embedding_and_its_like_are_a_fault_where_a_config_ties_them(ties: bool | None) -> None:
    shape, kinds = (4, 2), {"embed.weight": "torch.nn.Embedding", "head.weight": "torch.nn.Linear"}
    pair = [ParameterRecord(name, shape, kind, True, facts={"began": 7}) for name, kind in kinds.items()]
    findings = run_findings([process(0, ModelRecord("M", pair, ties=ties))])
    assert [finding.kind for finding in findings] == ([] if ties is False else ["untied"])
    if findings:
        assert ("config ties them" in findings[0].what) is bool(ties)
        assert ("meant to be" in findings[0].do) is not ties


# --- what was expected -----------------------------------------------------------------------------------


BF16 = {
    **dict.fromkeys(("storage", "compute", "grad"), "bfloat16"),
    **dict.fromkeys(("accumulate", "reduce", "master", "state"), "float32"),
}
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
WITHOUT_KEY = {key: value for key, value in CONFIG.items() if key != "data_types"}


def records(name: str = "head.weight", **cells: str) -> list[ProcessRecord]:
    parameter = ParameterRecord(name, (8, 4), "torch.nn.modules.linear.Linear", True)
    for column, what in {**BF16, **cells}.items():
        parameter.add(column, what, "test")  # type: ignore[arg-type]
    return [ProcessRecord(0, 2, 3, [ModelRecord("Net", [parameter])], micro_batches=4)]


def unexpected(file: Path, seen: list[ProcessRecord]) -> list[RunFinding]:
    return compare.unexpected(read_declaration(file) or load(file), file.name, seen)


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


@pytest.mark.parametrize(
    ("config", "cells"),
    [
        ({**CONFIG, "communication_data_type": "bf16"}, {"compute": "float32", "reduce": "bfloat16"}),
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


# --- what fixes it ------------------------------------------------------------------------------------


LIBRARIES: dict[str, tuple[dict[str, Any], str]] = {
    "torch": ({}, "model.float()"),
    "fully_shard": ({"layout": "sharded on dim 0 over 2 ranks"}, "reduce_dtype=torch.float32"),
    "FullyShardedDataParallel": ({"wrappers": ("FullyShardedDataParallel",)}, "reduce_dtype=torch.float32"),
    "DeepSpeed": ({"wrappers": ("DeepSpeedEngine",)}, '"torch_autocast": {'),
    "transformers": ({"libraries": {"transformers.trainer": "5"}}, "TrainingArguments(bf16=True)"),
    "accelerate": ({"libraries": {"accelerate": "1"}}, 'Accelerator(mixed_precision="bf16")'),
    "Lightning": ({"libraries": {"lightning": "2"}}, 'Trainer(precision="bf16-mixed")'),
}
"""Library -> what a run under it looks like, and a line that fixes it there."""


def narrow_run(layout: str = "", wrappers: tuple[str, ...] = (), **rest: Any) -> ProcessRecord:
    one = ParameterRecord("layers.3.router.weight", (4,), "torch.nn.Linear", True, layout)
    for column, dtype in {"storage": "bfloat16", "compute": "bfloat16", "master": "same"}.items():
        one.add(column, dtype, "")  # type: ignore[arg-type]
    one.facts |= {"optimized": True, "gradients": 3, "changed": True, "lost": 0.75}
    return ProcessRecord(0, 2, 3, [ModelRecord("M", [one], wrappers=wrappers)], **rest)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_block_says_what_mends_a_finding_and_loads(library: str) -> None:
    facts, line = LIBRARIES[library]
    kinds: tuple[Kind, ...] = ("no-master", "wire-in-16-bits", "loss-in-16-bits", "router-in-16-bits")
    names = ("layers.3.router.weight", "layers.4.router.weight")
    found = [RunFinding(kind, None, names, "what.", "do.") for kind in kinds]
    blocks = dict(fixes([narrow_run(**facts)], found))
    assert line in blocks[library] and "logits.float()" in blocks[library]
    assert all(len(line) <= 78 for text in blocks.values() for line in text.splitlines())
    assert '"match": "layers.*.router.weight"' in blocks["zerodrift"]
    config = load(json.loads(blocks["zerodrift"]))
    assert resolve(config, mesh_for(config, 2)).mode.name == "BF16"
    assert fixes([narrow_run(**facts)], []) == []


def test_findings_with_one_mending_stand_together_and_the_costliest_first() -> None:
    run = narrow_run()
    run.events = [{"kind": "loss-loss", "line": "a.py:1", "operation": "log_softmax", "dtype": "bfloat16",
                   "module": "", "greatest": 8.0}]  # fmt: skip
    found = run_findings([run])
    assert [finding.kind for finding in found] == ["no-master", "loss-in-16-bits", "router-in-16-bits"]
    assert [finding.cost for finding in found] == [0.75, 8 / 256, 1 / 256]
    for width in (60, 80):
        text = run_text([run], found, (), color=False, width=width)
        first, second = text.index("1  Keep the weights in fp32"), text.index("2  Cast the logits")
        assert first < text.index("no-master") < second
        table, _, config = text.partition("\nconfig")
        assert max(map(len, table.splitlines())) <= width and "logits.float()" in config
    assert "logits.float()" in run_page([run], found, (), "python a.py")
