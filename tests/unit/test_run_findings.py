"""Findings from all ranks' observations: gradients of other parameters, and models of one name."""

from __future__ import annotations

from typing import Any

import pytest

from zerodrift.inspect.check.findings import run_findings
from zerodrift.inspect.check.table import completed
from zerodrift.inspect.trace.records import ModelRecord, ParameterRecord, ProcessRecord, Sighting

OWNS = ([1.0, -2.0, 0.5, 4.0], [3.0, 2.0, -1.5, 1.0])
"""Gradients of two ranks."""

MEAN = [2.0, 0.0, -0.5, 2.5]


def parameter(name: str = "w", **facts: Any) -> ParameterRecord:
    seen = ParameterRecord(name, (4,), "torch.nn.Linear", True)
    seen.facts |= {"optimized": True, "gradients": 2, "changed": True, **facts}
    return seen


def process(rank: int, *models: ModelRecord, micro_batches: int = 1) -> ProcessRecord:
    return ProcessRecord(rank, 2, 2, list(models), micro_batches)


def records(used: list[list[float | None]], wrapper: str = "", micro_batches: int = 1) -> list[ProcessRecord]:
    """Return the records of two ranks whose optimizer had these gradients."""
    models = [
        ModelRecord("M", [parameter(own=own, used=held)], wrappers=(wrapper,))
        for own, held in zip(OWNS, used, strict=True)
    ]
    return [process(rank, model, micro_batches=micro_batches) for rank, model in enumerate(models)]


def columns(storage: str, compute: str, master: str) -> list[ProcessRecord]:
    one = parameter()
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
    "the mean": (records([MEAN] * 2), []),
    "a part of the mean": (records([[value / 65536 for value in MEAN]] * 2), []),
    "the sum": (records([[2 * value for value in MEAN]] * 2), ["not-averaged"]),
    "the own gradient": (records([*OWNS]), ["not-averaged"]),
    "the own one, and nothing on the other rank": (records([OWNS[0], NOTHING]), ["not-averaged"]),
    "the mean, and nothing on the other rank": (records([MEAN, NOTHING]), []),
    "the last of four": (records(LAST, "DeepSpeedEngine", micro_batches=4), ["not-accumulated"]),
    "neither, of one": (records(LAST, "DeepSpeedEngine"), []),
    "models of one name": (models_of_one_name(), []),
    "nothing is updated": ([process(0, LEFT_OUT)], ["never-updated"]),
    "another is updated": ([process(0, LEFT_OUT, ModelRecord("N", [parameter()]))], []),
    "a cast of what updates round": (columns("bfloat16", "float32", "same"),
        ["no-master", "upcast-without-effect"]),
    "bf16 without a master": (columns("bfloat16", "bfloat16", "same"), ["no-master"]),
    "bf16 with a master": (columns("bfloat16", "float32", "float32"), []),
    "fp32": (columns("float32", "float32", "same"), []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_found_in_what_ranks_saw(case: str) -> None:
    processes, kinds = CASES[case]
    findings = run_findings(processes)
    assert [finding.kind for finding in findings] == kinds
    assert all(finding.names == ("w",) for finding in findings)


@pytest.mark.parametrize("ties", [True, None, False])
def test_an_embedding_and_its_like_are_a_fault_where_a_config_ties_them(ties: bool | None) -> None:
    shape, kinds = (4, 2), {"embed.weight": "torch.nn.Embedding", "head.weight": "torch.nn.Linear"}
    pair = [ParameterRecord(name, shape, kind, True, facts={"began": 7}) for name, kind in kinds.items()]
    findings = run_findings([process(0, ModelRecord("M", pair, ties=ties))])
    assert [finding.kind for finding in findings] == ([] if ties is False else ["untied"])
    if findings:
        assert ("config ties them" in findings[0].what) is bool(ties)
        assert ("meant to be" in findings[0].do) is not ties


def test_models_of_one_name_are_completed_apart() -> None:
    first, second = models_of_one_name()
    second.models[1].parameters[0].cells["gather"] = [Sighting("float32", "all_gather")]
    completed([first, second])
    assert [model.parameters[0].dtypes("gather") for model in first.models] == [(), ("float32",)]
