"""Boundaries: modules that compute in a dtype of their own, and what they return."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.models import at, moe, parameter, plan
from tests.unit.test_checkpoint_folder import manifest
from zerodrift.checkpoint.differences import CheckpointDifference, CurrentRun, differences
from zerodrift.dtypes import DType
from zerodrift.model.spec import ModelSpec, OwningModule
from zerodrift.plan.boundaries import boundaries_of_piece
from zerodrift.plan.table import Plan


def pinned(model: ModelSpec, *patterns: str | dict[str, Any], mode: str = "bf16", **rest: Any) -> Plan:
    """Return a plan with these patterns pinned; a dict is a whole rule."""
    rules = [{"match": each, "pin": "fp32"} if isinstance(each, str) else each for each in patterns]
    return plan(at(3, mode, rules=rules) | rest, model)


def boundaries(model: ModelSpec, *patterns: Any, mode: str = "bf16") -> dict[str, tuple[str, str, str]]:
    """Return path -> (dtype, output, lookup) of a plan with these patterns pinned."""
    made = pinned(model, *patterns, mode=mode)
    return {each.path: (str(each.dtype), each.output, str(each.lookup or "-")) for each in made.boundaries}


def of(*names: str, klass: str = "models.Layer", **known: Any) -> ModelSpec:
    """Return a model of these parameters: vectors have `norm` or `bias` in their name, stacks `conv`."""
    shapes = [(8,) if re.search("norm|bias", n) else (8, 8, 3) if "conv" in n else (8, 8) for n in names]
    made = [parameter(n, shape, klass) for n, shape in zip(names, shapes, strict=True)]
    return ModelSpec("m", tuple(made), **known)


# --- where ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp16", "autocast-bf16"])
def test_pinned_routers_norms_and_heads(mode: str) -> None:
    found = boundaries(moe(layers=2), "*.gate.weight", "*norm.weight", "lm_head.*", mode=mode)
    lookup = "-" if "autocast" in mode else mode
    assert found == {
        **{f"model.layers.{layer}.mlp.gate": ("fp32", "keep", lookup) for layer in (0, 1)},
        **{f"model.layers.{layer}.input_layernorm": ("fp32", "input", lookup) for layer in (0, 1)},
        "model.norm": ("fp32", "input", lookup),
        "lm_head": ("fp32", "keep", lookup),
    }
    assert boundaries(moe(), mode=mode) == boundaries(moe(), "*.gate.weight", mode="fp32") == {}, "all alike"


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
    found = boundaries(model, "mlp.gate.*", bf16, mode="fp16")
    assert found == {"mlp.gate": ("fp32", "keep", "fp16"), "mlp.up": ("bf16", "input", "fp16")}


def test_what_is_one_too_but_not_under_autocast() -> None:
    """A compute dtype without a pin makes one; an integer parameter decides nothing."""
    rule, two = {"match": "gate.*", "compute": "fp32"}, of("gate.weight", "head.weight")
    assert boundaries(two, rule) == {"gate": ("fp32", "keep", "bf16")}
    assert boundaries(two, {**rule, "compute": "bf16"}, mode="fp32") == {"gate": ("bf16", "input", "fp32")}
    assert boundaries(two, rule, mode="autocast-bf16") == {}
    unused = {"match": "gate.*", "output": "keep"}
    assert "precision.rules[0]: 'gate.*': `output: keep` has no effect" in str(pinned(two, unused).notes)
    assert "no effect" not in str(pinned(two, unused | rule).notes)
    table = parameter("gate.table", (4, 4), dtype=DType.INT64, trained=False)
    model = ModelSpec("m", (*two.parameters, table))
    assert boundaries(model, "gate.weight") == {"gate": ("fp32", "input", "bf16")}  # two matrices
    assert boundaries(model, "gate.weight", mode="autocast-bf16") == {}


# --- what they return -------------------------------------------------------------------------------------


KEEP, INPUT = ({"match": "m.up.*", "output": told} for told in ("keep", "input"))
DOWN = {"match": "m.down.*", "output": "input"}


@pytest.mark.parametrize(
    ("names", "rules", "path", "output", "why"),
    [
        (("m.weight",), (), "m", "keep", "one matrix"),
        (("m.conv_weight",), (), "m", "input", "a stack of matrices"),
        (("m.norm_scale", "m.bias"), (), "m", "input", "no matrix"),
        (("m.up.weight", "m.down.weight"), (), "m", "input", "several matrices"),
        (("m.up.weight",), (KEEP,), "m", "keep", "precision.rules[1]: 'm.up.*'"),
        (("m.up.weight",), (INPUT,), "m", "input", "precision.rules[1]: 'm.up.*'"),
        (("m.up.weight", "m.down.weight"), (KEEP, DOWN), "m", "keep", "precision.rules[1]: 'm.up.*'"),
    ],
)
def test_what_is_returned_unless_told(
    names: tuple[str, ...], rules: tuple[dict[str, str], ...], path: str, output: str, why: str
) -> None:
    """Keep wins where rules say both."""
    (found,) = pinned(of(*names, "head.weight"), "m.*", *rules).boundaries
    assert (found.path, found.output) == (path, output)
    assert found.lookup is (None if rules and output == "keep" else DType.BF16)
    assert why in dict(found.why)["output"] and dict(found.why)["dtype"] == "precision.rules[0]: 'm.*'"


# --- names alone ------------------------------------------------------------------------------------------


def test_from_names_a_model_of_lists_is_as_from_classes() -> None:
    patterns = ("*.gate.*", "*norm*", "model.layers.1.*")
    containers = frozenset({"model.layers", *(f"model.layers.{n}.mlp.experts" for n in range(3))})
    owners = [tuple(OwningModule(owner.path, "") for owner in each.owners) for each in moe().parameters]
    nameless = [replace(each, owners=mine) for each, mine in zip(moe().parameters, owners, strict=True)]
    known = pinned(replace(moe(), containers=containers), *patterns)
    bare = pinned(ModelSpec("m", tuple(nameless)), *patterns)
    assert known.boundaries == bare.boundaries != ()
    assert not any("boundaries" in note for note in known.notes)
    numbered = pinned(of("layers.0.weight", "layers.1.weight", "head.weight", klass=""), "layers.*")
    assert [each.path for each in numbered.boundaries] == ["layers.0", "layers.1"]
    assert any("this source has no module classes: boundaries" in note for note in numbered.notes)


# --- in the plan ------------------------------------------------------------------------------------------


GATES, EMBED = "*.gate.weight", "*embed*"


def of_pieces(made: Plan) -> list[list[str]]:
    return [[each.path for each in boundaries_of_piece(made, piece)] for piece in (0, 1)]


def test_a_piece_of_a_pipeline_has_those_of_its_modules_and_a_module_that_is_cut_in_each() -> None:
    cut = {"pipeline": {"stages": 2, "micro_batches": 2}}
    made = pinned(moe(layers=4), "*.gate.*", "*norm*", **cut)
    first, last = map(set, of_pieces(made))
    assert first & last == set() and first | last == {each.path for each in made.boundaries}
    assert "model.layers.1.mlp.gate" in first and {"model.layers.2.mlp.gate", "model.norm"} <= last
    assert of_pieces(pinned(moe(layers=4), "model.*", **cut)) == [["model"], ["model"]]


# --- in a checkpoint --------------------------------------------------------------------------------------


def test_a_checkpoint_tells_of_boundaries_that_changed() -> None:
    now, before = pinned(moe(layers=2), GATES, EMBED), pinned(moe(layers=2), EMBED)
    running = CurrentRun(now, "", {}, (), "", ())
    head = replace(manifest("t", 1), digest="ab" * 32, mesh=now.mesh, versions=())

    def told(written: Plan) -> dict[str, CheckpointDifference]:
        return {each.what: each for each in differences(head, (), Plan.from_json(written.to_json()), running)}

    found = told(before)["boundary"]
    assert (found.saved, found.now) == ("none", "fp32, returns keep")
    assert found.effect == "2 modules, first model.layers.0.mlp.gate"
    assert "boundary" not in told(now)
