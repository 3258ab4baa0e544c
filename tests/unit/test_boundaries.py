"""Boundaries: which modules compute in a dtype of their own, what they return, why, and how it is printed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.models import EMBEDDING, LINEAR, moe, parameter, tied
from tests.unit.test_checkpoint_folder import manifest
from tests.unit.test_policy import at, plan
from zerodrift.checkpoint.differences import CheckpointDifference, CurrentRun, differences
from zerodrift.dtypes import DType
from zerodrift.model.spec import ModelSpec, OwningModule
from zerodrift.plan.boundaries import boundaries_of_piece
from zerodrift.plan.cost import cost
from zerodrift.plan.table import Boundary, Plan
from zerodrift.report import frame, page, terminal
from zerodrift.report.explain import explain
from zerodrift.report.rows import group_rows, list_rows


def boundaries(
    model: ModelSpec, *patterns: str, mode: str = "bf16", rules: tuple[dict[str, Any], ...] = ()
) -> dict[str, tuple[str, str, str]]:
    """path -> (dtype, output, lookup), of a plan in which these patterns are pinned."""
    pins = [{"match": pattern, "pin": "fp32"} for pattern in patterns]
    made = plan(at(3, mode, rules=[*pins, *rules]), model)
    return {each.path: (str(each.dtype), each.output, str(each.lookup or "-")) for each in made.boundaries}


def of(*names: str, klass: str = "models.Layer", **known: Any) -> ModelSpec:
    """A model of parameters: a name with `norm` or `bias` in it is a vector, every other a matrix."""
    made = [parameter(n, (8,) if re.search("norm|bias", n) else (8, 8), klass) for n in names]
    return ModelSpec("m", tuple(made), **known)


# --- where ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bf16", "fp16", "autocast-bf16", "autocast-fp16"])
def test_pinned_routers_norms_and_heads(mode: str) -> None:
    found = boundaries(moe(layers=2), "*.gate.weight", "*norm.weight", "lm_head.*", mode=mode)
    lookup = "-" if "autocast" in mode else mode
    assert found == {
        **{f"model.layers.{layer}.mlp.gate": ("fp32", "keep", lookup) for layer in (0, 1)},
        **{f"model.layers.{layer}.input_layernorm": ("fp32", "input", lookup) for layer in (0, 1)},
        "model.norm": ("fp32", "input", lookup),
        "lm_head": ("fp32", "keep", lookup),
    }


def test_where_all_compute_alike_there_is_none() -> None:
    assert plan(at(3, "bf16"), moe()).boundaries == ()
    assert boundaries(moe(), "*.gate.weight", mode="fp32") == {}


LAYERS = of("layers.0.weight", "layers.1.weight", "head.weight", containers=frozenset({"layers"}))
SCALES = of("scales.0", "scales.1", "head.weight", containers=frozenset({"scales"}))


@pytest.mark.parametrize(
    ("model", "pattern", "paths"),
    [
        (moe(layers=2), "model.layers.1.*", {"model.layers.1"}),
        (moe(layers=2), "model.*", {"model"}),
        (moe(layers=1), "*", {"model", "lm_head"}),
        (of("weight", "other"), "*", set()),
        (LAYERS, "layers.*", {"layers.0", "layers.1"}),
        (replace(LAYERS, containers=frozenset()), "layers.*", {"layers"}),
        (SCALES, "scales.*", set()),
        (of("mix.gate", "mix.experts", "head.weight"), "mix.gate", set()),
        (moe(layers=1, tie=True), "lm_head.weight", {"model.embed_tokens", "lm_head"}),
    ],
    ids=["outermost", "model", "never the root", "bare root", "list", "called", "bare list", "mixed", "tied"],
)
def test_a_boundary_is_at_the_outermost_module_that_is_called(
    model: ModelSpec, pattern: str, paths: set[str]
) -> None:
    assert set(boundaries(model, pattern)) == paths


def test_two_dtypes_are_two_boundaries() -> None:
    model = of("mlp.gate.weight", "mlp.up.weight", "head.weight")
    bf16 = {"match": "mlp.up.*", "storage": "bf16", "compute": "bf16", "master": "fp32"}
    found = boundaries(model, "mlp.gate.*", mode="fp16", rules=(bf16,))
    assert found == {"mlp.gate": ("fp32", "keep", "fp16"), "mlp.up": ("bf16", "input", "fp16")}


def test_what_computes_apart_unpinned_is_one_too_but_not_under_autocast() -> None:
    rule = {"match": "gate.*", "compute": "fp32"}
    assert boundaries(of("gate.weight", "head.weight"), rules=(rule,)) == {"gate": ("fp32", "keep", "bf16")}
    assert boundaries(of("gate.weight", "head.weight"), mode="autocast-bf16", rules=(rule,)) == {}


def test_an_integer_parameter_says_nothing_but_under_autocast() -> None:
    table = parameter("gate.table", (4, 4), dtype=DType.INT64, trained=False)
    model = of("gate.weight", "head.weight")
    model = replace(model, parameters=(*model.parameters, table))
    assert boundaries(model, "gate.weight") == {"gate": ("fp32", "input", "bf16")}  # two matrices
    assert boundaries(model, "gate.weight", mode="autocast-bf16") == {}


def test_a_module_in_two_places_is_one_by_its_first_name() -> None:
    weight = tied(("a.gate.weight", "b.q_proj.weight"), (8, 8), (LINEAR, LINEAR))
    rest = parameter("a.other.weight", (8, 8)), parameter("b.other.weight", (8, 8))
    apart = ModelSpec("m", (weight, *rest))
    outputs = {path: output for path, (_, output, _) in boundaries(apart, "a.gate.weight").items()}
    assert outputs == {"a.gate": "keep", "b.q_proj": "input"}  # two modules whose weights are tied
    one = replace(apart, shared=(("b.q_proj", "a.gate"),))
    outputs = {path: output for path, (_, output, _) in boundaries(one, "a.gate.weight").items()}
    assert outputs == {"a.gate": "keep", "b.q_proj": "keep"}


# --- what they return -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "output", "why"),
    [
        (("m.weight",), "keep", "one matrix"),
        (("m.weight", "m.bias"), "keep", "one matrix"),
        (("m.norm_scale", "m.bias"), "input", "no matrix"),
        (("m.up.weight", "m.down.weight"), "input", "several matrices"),
    ],
)
def test_what_is_returned_unless_told(names: tuple[str, ...], output: str, why: str) -> None:
    made = plan(at(0, "bf16", rules=[{"match": "m.*", "pin": "fp32"}]), of(*names, "head.weight"))
    (found,) = made.boundaries
    assert (found.path, found.output, found.lookup) == ("m", output, DType.BF16)
    assert why in dict(found.why)["output"]
    assert dict(found.why)["dtype"] == "precision.rules[0]: 'm.*'"


@pytest.mark.parametrize("name", ["q_proj", "wq", "fc1", "out_proj", "c_fc", "dense", "w2", "self_attn"])
def test_a_projection_returns_its_inputs_dtype(name: str) -> None:
    assert boundaries(of(f"block.{name}.weight", "head.weight"), "block.*")["block"][1] == "keep"
    model = of(f"block.{name}.weight", "block.other.weight", "head.weight")
    assert boundaries(model, f"block.{name}.*") == {f"block.{name}": ("fp32", "input", "bf16")}


@pytest.mark.parametrize("told", ["keep", "input"])
def test_a_rule_is_obeyed_and_named(told: str) -> None:
    rules = [{"match": "*norm*", "pin": "fp32"}, {"match": "*norm*", "output": told}]
    made = plan(at(0, "bf16", rules=rules), moe(layers=1))
    assert {each.output for each in made.boundaries} == {told}
    assert {each.lookup for each in made.boundaries} == {None if told == "keep" else DType.BF16}
    assert {dict(each.why)["output"] for each in made.boundaries} == {"precision.rules[1]: '*norm*'"}


def test_keep_wins_where_rules_say_both() -> None:
    told = ({"match": "m.up.*", "output": "keep"}, {"match": "m.down.*", "output": "input"})
    model = of("m.up.weight", "m.down.weight", "head.weight")
    made = plan(at(0, "bf16", rules=[{"match": "m.*", "pin": "fp32"}, *told]), model)
    (found,) = made.boundaries
    assert (found.output, dict(found.why)["output"]) == ("keep", "precision.rules[1]: 'm.up.*'")


# --- names alone ------------------------------------------------------------------------------------------


def named(model: ModelSpec) -> ModelSpec:
    """The same model as files know it."""
    bare = tuple(
        replace(p, owners=tuple(OwningModule(owner.path, "") for owner in p.owners)) for p in model.parameters
    )
    return replace(model, parameters=bare, buffers=(), containers=frozenset(), shared=())


def test_from_names_a_numbered_module_is_a_list_and_the_plan_says_so() -> None:
    model = of("layers.0.weight", "layers.1.weight", "head.weight", klass="")
    made = plan(at(3, "bf16", rules=[{"match": "layers.*", "pin": "fp32"}]), model)
    assert [each.path for each in made.boundaries] == ["layers.0", "layers.1"]
    assert any("this source has no module classes: boundaries" in note for note in made.notes)
    assert not any("boundaries" in note for note in plan(at(3, "bf16"), model).notes)


@pytest.mark.parametrize(
    "patterns", [["*.gate.*"], ["*norm*"], ["model.layers.1.*"], ["*embed*", "lm_head*"]]
)
def test_from_names_a_model_of_lists_is_as_from_classes(patterns: list[str]) -> None:
    containers = frozenset({"model.layers", *(f"model.layers.{n}.mlp.experts" for n in range(3))})
    model = replace(moe(), containers=containers)
    rules = [{"match": pattern, "pin": "fp32"} for pattern in patterns]
    known, bare = (plan(at(3, "bf16", rules=rules), each) for each in (model, named(model)))
    assert known.boundaries == bare.boundaries != ()
    assert not any("boundaries" in note for note in known.notes)


# --- in the plan ------------------------------------------------------------------------------------------


def pinned(layers: int = 3) -> Plan:
    rules = [{"match": "*.gate.weight", "pin": "fp32"}, {"match": "*embed*", "pin": "fp32"}]
    return plan(at(3, "bf16", rules=rules), moe(layers=layers))


def test_the_digest_holds_them_and_their_json_is_read() -> None:
    made = pinned()
    assert Plan.from_json(made.to_json()) == made
    for change in ({"path": "x"}, {"dtype": DType.FP16}, {"output": "input"}, {"lookup": None}):
        first = replace(made.boundaries[0], **change)
        assert replace(made, boundaries=(first, *made.boundaries[1:])).digest != made.digest
    assert replace(made, boundaries=()).digest != made.digest
    assert not any(columns.get("output") == "auto" for columns in made.to_json()["columns"])
    assert {each.output for each in made.boundaries} == {"keep"}, "decided in the plan"


def test_a_piece_of_a_pipeline_has_those_of_its_modules() -> None:
    written = at(3, "bf16", rules=[{"match": "*.gate.*", "pin": "fp32"}, {"match": "*norm*", "pin": "fp32"}])
    made = plan({**written, "pipeline": {"stages": 2, "micro_batches": 2}}, moe(layers=4), world=2)
    first, last = ({each.path for each in boundaries_of_piece(made, piece)} for piece in (0, 1))
    assert first & last == set() and first | last == {each.path for each in made.boundaries}
    assert "model.layers.1.mlp.gate" in first and {"model.layers.2.mlp.gate", "model.norm"} <= last


def test_a_module_that_is_cut_has_its_boundary_in_every_piece() -> None:
    written = at(3, "bf16", rules=[{"match": "model.*", "pin": "fp32"}])
    made = plan({**written, "pipeline": {"stages": 2, "micro_batches": 2}}, moe(layers=4), world=2)
    assert [[each.path for each in boundaries_of_piece(made, piece)] for piece in (0, 1)] == [
        ["model"],
        ["model"],
    ]
    # And a piece whose parameters are all pinned has none that the whole model has not.
    written = at(3, "bf16", rules=[{"match": f"model.layers.{n}.*", "pin": "fp32"} for n in (2, 3)])
    made = plan({**written, "pipeline": {"stages": 2, "micro_batches": 2}}, moe(layers=4), world=2)
    found = [[each.path for each in boundaries_of_piece(made, piece)] for piece in (0, 1)]
    assert found == [[], ["model.layers.2", "model.layers.3"]]


# --- printed ----------------------------------------------------------------------------------------------


def text(made: Plan, width: int = frame.WIDTH) -> str:
    return terminal.plan_text(made, cost(made), group_rows(made), color=False, width=width)


def test_the_plan_and_its_page_show_a_line_per_pattern() -> None:
    made = pinned(layers=4)
    section = text(made).partition("\nboundaries")[2].partition("\n\n")[0]
    assert "floating inputs of the model are cast to bf16" in section
    line = next(line for line in section.splitlines() if "mlp.gate" in line)
    assert line.split()[:5] == ["model.layers.*.mlp.gate", "x4", "fp32", "its", "own"]
    assert "precision.rules[0]: '*.gate.weight'" in section
    assert "an embedding" in section and "returns bf16" in section
    html = page.plan_page(made, cost(made), group_rows(made))
    assert "Boundaries</h2>" in html and "mlp.<wbr>gate x4" in html


def test_a_plan_without_any_says_nothing_of_them() -> None:
    made = plan(at(3, "bf16"), moe())
    assert "boundaries" not in text(made)
    assert "Boundaries" not in page.plan_page(made, cost(made), group_rows(made))


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("path", ["gate", "a_router_with_quite_a_long_name_" * 3])
def test_lines_fit_and_say_everything(width: int, path: str) -> None:
    model = of(f"layers.0.{path}.weight", f"layers.1.{path}.weight", "head.weight")
    made = plan(at(3, "bf16", rules=[{"match": "layers.*", "pin": "fp32"}]), model)
    section = text(made, width).partition("\nboundaries")[2].partition("\n\n")[0]
    assert all(len(line) <= width for line in section.splitlines()), section
    squeezed = re.sub(r"\s", "", section)
    assert "computesin" in squeezed and "fp32" in squeezed
    assert "severalmatrices" in squeezed or "onematrix" in squeezed


@pytest.mark.long
def test_ten_thousand_modules_are_a_few_lines() -> None:
    names = [f"layers.{layer}.experts.{expert}.gate.weight" for layer in range(100) for expert in range(100)]
    other = [f"layers.{layer}.attn.q_proj.weight" for layer in range(100)]
    lists = frozenset({"layers", *(f"layers.{layer}.experts" for layer in range(100))})
    model = of(*names, *other, "head.weight", containers=lists)
    made = plan(at(3, "bf16", rules=[{"match": "*.gate.weight", "pin": "fp32"}]), model)
    assert len(made.boundaries) == 10_000
    table = group_rows(made)
    assert [(each.pattern, len(each.boundaries)) for each in table.boundaries] == [
        ("layers.*.experts.*", 10_000)
    ]
    assert len(text(made).splitlines()) < 120


def test_some_of_a_kind_are_told_by_their_numbers() -> None:
    rules = [{"match": f"model.layers.{n}.mlp.gate.weight", "pin": "fp32"} for n in (0, 1)]
    made = plan(at(3, "bf16", rules=[{"match": "*.gate.weight", "pin": "fp32"}, *rules]), moe(layers=4))
    patterns = [each.pattern for each in group_rows(made).boundaries]
    assert patterns == [f"model.layers.{which}.mlp.gate" for which in ("0", "1", "2-3")]


def test_rows_show_the_boundaries_around_them() -> None:
    made = pinned(layers=2)
    chosen = [n for n, row in enumerate(made.rows) if row.name == "model.layers.1.mlp.gate.weight"]
    assert [each.pattern for each in list_rows(made, chosen).boundaries] == ["model.layers.1.mlp.gate"]


def test_explain_prints_them() -> None:
    made = pinned(layers=2)

    def said(name: str) -> str:
        lines = terminal.explanation_text(explain(made, name), made.digest, color=False)
        return " ".join(lines.partition("\ncolumns")[0].split())

    shown = said("model.layers.1.mlp.gate.weight")
    assert "boundary model.layers.1.mlp.gate computes in fp32, returns its own dtype: one matrix" in shown
    assert "boundary model.embed_tokens computes in fp32, returns bf16: one matrix" in said(
        "model.embed_tokens.weight"
    )
    assert "boundary" not in said("lm_head.weight")


def test_explain_says_where_a_pin_has_none() -> None:
    made = plan(at(3, "bf16", rules=[{"match": "m.gate", "pin": "fp32"}]), of("m.gate", "m.up"))
    shown = terminal.explanation_text(explain(made, "m.gate"), made.digest, color=False)
    assert "boundary   none: no module around it casts its inputs" in shown


def test_an_embedding_is_known_by_its_class() -> None:
    model = ModelSpec("m", (parameter("e.weight", (8, 8), EMBEDDING), parameter("h.weight", (8, 8))))
    made = plan(at(3, "bf16", rules=[{"match": "e.*", "pin": "fp32"}]), model)
    assert made.boundaries == (
        Boundary(
            "e",
            DType.FP32,
            "keep",
            DType.BF16,
            (("dtype", "precision.rules[0]: 'e.*'"), ("output", "one matrix, as a router or a head")),
        ),
    )


# --- in a checkpoint --------------------------------------------------------------------------------------


def test_a_checkpoint_tells_of_boundaries_that_changed() -> None:
    now = pinned(layers=2)
    before = plan(at(3, "bf16", rules=[{"match": "*embed*", "pin": "fp32"}]), moe(layers=2))
    running = CurrentRun(now, "", {}, (), "", ())
    head = replace(manifest("t", 1), digest="ab" * 32, mesh=now.mesh, versions=())

    def told(written: dict[str, Any]) -> dict[str, CheckpointDifference]:
        return {each.what: each for each in differences(head, (), written, running)}

    found = told(before.to_json())["boundary"]
    assert (found.saved, found.now) == ("none", "fp32, returns keep")
    assert found.effect == "2 modules, first model.layers.0.mlp.gate"
    assert "boundary" not in told(now.to_json())
