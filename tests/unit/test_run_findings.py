"""What is found in what ranks saw: whose gradient an optimizer was given, and models of one name."""

from __future__ import annotations

from typing import Any

import pytest

from zerodrift.inspect.check.findings import run_findings
from zerodrift.inspect.check.table import completed
from zerodrift.inspect.trace.records import ModelRecord, ParameterRecord, ProcessRecord, Sighting

OWNS = ([1.0, -2.0, 0.5, 4.0], [3.0, 2.0, -1.5, 1.0])
"""Of two ranks."""

MEAN = [2.0, 0.0, -0.5, 2.5]


def parameter(name: str = "w", **facts: Any) -> ParameterRecord:
    seen = ParameterRecord(name, (4,), "torch.nn.Linear", True)
    seen.facts |= {"optimized": True, "gradients": 2, "changed": True, **facts}
    return seen


def process(rank: int, *models: ModelRecord, micro_batches: int = 1) -> ProcessRecord:
    return ProcessRecord(rank, 2, 2, list(models), micro_batches)


def found(used: list[list[float | None]], wrapper: str = "", micro_batches: int = 1) -> list[str]:
    """Kinds, of two ranks that were given this."""
    processes = []
    for rank in range(2):
        model = ModelRecord("M", [parameter(own=OWNS[rank], used=used[rank])], wrappers=(wrapper,))
        processes.append(process(rank, model, micro_batches=micro_batches))
    return [finding.kind for finding in run_findings(processes)]


NOTHING: list[float | None] = [None] * 4
LAST = [[0.3, 5.0, -0.1, -1.0]] * 2


@pytest.mark.parametrize(
    ("used", "kinds"),
    [
        pytest.param([MEAN] * 2, [], id="the mean"),
        pytest.param([[value / 65536 for value in MEAN]] * 2, [], id="a part of the mean"),
        pytest.param([[2 * value for value in MEAN]] * 2, ["not-averaged"], id="the sum"),
        pytest.param([*OWNS], ["not-averaged"], id="the own gradient"),
        pytest.param([OWNS[0], NOTHING], ["not-averaged"], id="the own one, and nothing on the other rank"),
        pytest.param([MEAN, NOTHING], [], id="the mean, and nothing on the other rank"),
    ],
)
def test_a_gradient_of_an_optimizer_is_the_mean_over_ranks(
    used: list[list[float | None]], kinds: list[str]
) -> None:
    assert found(used) == kinds


@pytest.mark.parametrize("ties", [True, None, False])
def test_an_embedding_and_its_like_are_a_fault_where_a_config_ties_them(ties: bool | None) -> None:
    shape, kinds = (4, 2), {"embed.weight": "torch.nn.Embedding", "head.weight": "torch.nn.Linear"}
    pair = [ParameterRecord(name, shape, kind, True, facts={"began": 7}) for name, kind in kinds.items()]
    findings = run_findings([process(0, ModelRecord("M", pair, ties=ties))])
    assert [finding.kind for finding in findings] == ([] if ties is False else ["untied"])
    if findings:
        assert ("config ties them" in findings[0].what) is bool(ties)
        assert ("meant to be" in findings[0].do) is not ties


def test_gradients_that_are_neither_were_dropped() -> None:
    assert found(LAST, "DeepSpeedEngine", micro_batches=4) == ["not-accumulated"]
    assert found(LAST, "DeepSpeedEngine", micro_batches=1) == []


def test_models_of_one_name_are_told_apart() -> None:
    def models() -> tuple[ModelRecord, ...]:
        return tuple(ModelRecord("Sequential", [parameter(digest=digest)]) for digest in (1, 2))

    assert run_findings([process(0, *models()), process(1, *models())]) == []
    first, second = process(0, *models()), process(1, *models())
    second.models[1].parameters[0].cells["gather"] = [Sighting("float32", "all_gather")]
    completed([first, second])
    assert [model.parameters[0].dtypes("gather") for model in first.models] == [(), ("float32",)]


def test_nothing_that_is_trained_is_updated() -> None:
    left_out = ModelRecord("M", [parameter(optimized=False)], trained=False)
    assert [finding.kind for finding in run_findings([process(0, left_out)])] == ["never-updated"]
    updated = ModelRecord("N", [parameter()])
    assert run_findings([process(0, left_out, updated)]) == []


@pytest.mark.parametrize(
    ("cells", "kinds"),
    [
        (("bfloat16", "float32", "same"), ["no-master", "upcast-without-effect"]),
        (("bfloat16", "bfloat16", "same"), ["no-master"]),
        (("bfloat16", "float32", "float32"), []),
        (("float32", "float32", "same"), []),
    ],
)
def test_a_cast_adds_nothing_to_what_updates_round(cells: tuple[str, str, str], kinds: list[str]) -> None:
    """Storage, compute, master."""
    one = parameter()
    for column, what in zip(("storage", "compute", "master"), cells, strict=True):
        one.add(column, what, "")  # type: ignore[arg-type]
    findings = run_findings([process(0, ModelRecord("M", [one]))])
    assert [finding.kind for finding in findings] == kinds
    assert all(finding.names == ("w",) for finding in findings)
