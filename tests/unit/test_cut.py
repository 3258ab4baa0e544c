"""A model's tree cut into pieces has the same modules under the same names, and other pieces are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.numerics.networks import GPT, batch
from tests.numerics.test_pipelines import PARTS
from zerodrift.api import make_plan
from zerodrift.errors import ModelError
from zerodrift.pipeline.cut import AbsentModule, Parts, PassThrough, prune
from zerodrift.plan.stages import names_of


def names(model: nn.Module) -> list[frozenset[str]]:
    plan = make_plan({"pipeline": {"stages": 3, "schedule": "gpipe"}}, model, 3)
    return [names_of(plan, piece) for piece in range(3)]


def test_a_piece_has_the_models_own_modules_and_changes_nothing_of_it() -> None:
    model = GPT(6)
    before = {name: id(module) for name, module in model.named_modules()}
    first, middle, last = (prune(model, each, PARTS) for each in names(model))
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert middle.get_submodule("layers.2") is model.layers[2]
    assert isinstance(middle.get_submodule("layers.0"), PassThrough)
    assert isinstance(first.get_submodule("norm"), AbsentModule)
    assert last.get_submodule("head").weight is first.get_submodule("embed").weight  # tied, by both names
    called: list[str] = []
    first.register_forward_pre_hook(lambda module, args: called.append("first"))
    assert not model._forward_pre_hooks and not last._forward_pre_hooks


def test_layers_without_parameters_go_with_the_layer_before_them() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) if n % 2 == 0 else nn.ReLU() for n in range(6)))
    cut: Any = Parts("", before=lambda model, x: x, after=lambda model, hidden, x: hidden.sum())
    for each, expected in zip(names(model), ("01", "23", "45"), strict=True):
        children = prune(model, each, cut).named_children()
        assert [n for n, child in children if not isinstance(child, PassThrough)] == [*expected]


def test_what_another_piece_has_and_a_wrong_path_of_layers_are_refused() -> None:
    model = GPT(6, tied=False)
    first = prune(model, names(model)[0], PARTS)
    with pytest.raises(ModelError, match=r"`norm`: must be used in the piece of the pipeline that it is in"):
        PARTS.last(first, PARTS.first(first, batch(0)), batch(0))
    wrong = Parts("blocks", before=PARTS.before, after=PARTS.after)
    said = r"`layers`: must be the path .*; got 'blocks', which GPT does not have\."
    with pytest.raises(ModelError, match=said):
        prune(model, names(model)[0], wrong)
