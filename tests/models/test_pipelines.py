"""Real architectures under every pipeline schedule: gradients against fp64, no parameter left out."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.runs import config, diff, gradients, make
from tests.numerics.test_pipelines import pipeline
from tests.ranks.harness import on_ranks, run_ranks

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

import transformers

from tests.models.architectures import (
    ARCHITECTURES,
    deep,
    exact_gradients,
    labelled,
    of_type,
    rules,
    tokens,
)
from tests.ranks.ways import WAYS
from zerodrift.config.loader import load
from zerodrift.engine.engine import Engine
from zerodrift.errors import UnsupportedError
from zerodrift.mesh import MeshShape
from zerodrift.model.sources import describe
from zerodrift.pipeline.cut import CAUSAL, OLDER, TESTED_SINCE, Causal, prune
from zerodrift.plan.builder import build
from zerodrift.plan.stages import names_of
from zerodrift.policy.resolver import resolve
from zerodrift.versions import numbers

COUNT = 4


def engine_of(name: str, mode: str, schedule: str, weights: str | None = None) -> Engine:
    written = config(0, mode, COUNT, precision={"rules": rules(name)})
    return pipeline(written, schedule, weights, deep(name), None)


def micro_batches(rank: int) -> list[dict[str, torch.Tensor]]:
    return [labelled(micro, rank) for micro in range(COUNT)]


def in_ways(name: str, mode: str, ways: list[tuple[str, str | None]]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the gradients of each way."""
    found = {}
    for schedule, weights in ways:
        engine = engine_of(name, mode, schedule, weights)
        engine.accumulate(micro_batches(engine.mesh.rank("data")))
        found[f"{schedule} {weights}"] = gradients(engine)
    return found


def alone(name: str, mode: str) -> dict[str, torch.Tensor]:
    """Return the gradients without a pipeline, all computed at once."""
    engine = make(config(0, mode, COUNT, precision={"rules": rules(name)}), deep(name))
    for batch in micro_batches(0):
        engine.backward(engine(**batch).loss)
    return gradients(engine)


def errors(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative error of each parameter's gradient, by norm."""
    assert seen.keys() == expected.keys()
    found = {name: (seen[name].double() - value.double()).norm() for name, value in expected.items()}
    return {
        name: float((error / expected[name].double().norm().clamp(min=1e-300)).nan_to_num(nan=float("inf")))
        for name, error in found.items()
    }


FEW: list[tuple[str, str | None]] = [("1f1b", None), ("zbv", "queue"), ("zbv", "autograd")]


@pytest.mark.parametrize(
    ("name", "mode", "ways"),
    [
        ("llama", "fp32", FEW),  # embeddings tied across the pipeline
        ("gpt-oss", "bf16", FEW),  # expert biases beside deferred expert weights
        pytest.param("qwen3-moe", "bf16", WAYS, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "fp32", WAYS, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process_and_of_fp64(
    name: str, mode: str, ways: list[tuple[str, str | None]]
) -> None:
    exact = exact_gradients(deep(name), 1, COUNT)
    (single,) = run_ranks(alone, 1, name, mode)
    own = errors(single, exact)
    first, _ = run_ranks(in_ways, 2, name, mode, ways, timeout=180.0)
    for way, seen in first.items():
        beside, against = errors(seen, single), errors(seen, exact)
        # A queue does not round its products to bf16: half an ulp of bf16, 2e-3, is all that it may differ
        # by.
        assert max(beside.values()) < (3e-3 if mode == "bf16" else 1e-6), (way, beside)
        # What is far from fp64 is so without a pipeline: bf16 sends tokens to other experts than fp64 does,
        # and some sums of fp32 cancel.
        allowed = {key: max(1e-6, 1.02 * each + 1e-3 * (mode == "bf16")) for key, each in own.items()}
        assert {key for key, error in against.items() if error > allowed[key]} == set(), way


ONE_PIECE = [{"match": f"model.{part}.*", "pin": "fp32"} for part in ("layers.1", "norm")]
"""Rules that pin everything that the second piece has of the base model."""


@on_ranks(2)
def test_a_piece_that_is_pinned_as_a_whole_computes_what_the_whole_model_computes() -> None:
    written, batches = config(0, "bf16", 2, precision={"rules": ONE_PIECE}), [labelled(n) for n in range(2)]
    engine = pipeline(written, "1f1b", None, ARCHITECTURES["llama"].model(), None, micro_batches=2)
    assert [each.path for each in engine.plan.boundaries] == ["model.layers.1", "model.norm"]
    losses = list(map(float, engine.train_batch(batches).losses))
    engine.destroy()
    engine = make(written, ARCHITECTURES["llama"].model())
    assert losses == [engine(**batch).loss.item() for batch in batches]


def in_pieces(made: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the loss, one piece after the other."""
    mesh = MeshShape(pipeline=4)
    config = load({"pipeline": {"stages": 4}, "optimizer": {"type": "AdamW"}})
    plan = build(resolve(config, mesh), describe(made), mesh)
    cut = Causal.of(made)
    assert cut.problem(batch) is None
    pieces = [prune(made, names_of(plan, piece), cut) for piece in range(4)]
    hidden = cut.first(pieces[0], batch)
    for piece in pieces[1:-1]:
        hidden = cut.middle(piece, hidden, batch)
    return cut.last(pieces[-1], hidden, batch)


def batch_of(ids: torch.Tensor) -> dict[str, Any]:
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def wrong_in_pieces(made: nn.Module, batch: dict[str, Any]) -> list[str]:
    """Return the names of the loss and gradients whose bits differ from the model's own."""
    losses = made(**batch, use_cache=False).loss, in_pieces(made, batch)
    names, parameters = zip(*made.named_parameters(), strict=True)
    found = []
    for loss in losses:
        grads = zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True)
        found.append({"loss": loss, **{name: grad for name, grad in grads if grad is not None}})
    return diff(*found)


def is_cut(kind: str) -> bool:
    """Return whether this version of `transformers` has models of a type that can be cut."""
    is_new = numbers(transformers.__version__, TESTED_SINCE) >= numbers(TESTED_SINCE)
    return is_new or kind in OLDER


@pytest.mark.parametrize("kind", sorted(set(CAUSAL) - {"deepseek_v3", "gpt_oss"}))
def test_causal_models_compute_the_same_in_pieces(kind: str) -> None:
    """The pieces of an accepted type, one after the other, have the model's bits."""
    made = of_type(kind).eval()
    if not is_cut(kind):
        with pytest.raises(UnsupportedError, match=rf"transformers {TESTED_SINCE} or later .* type {kind};"):
            Causal.of(made)
        return
    assert wrong_in_pieces(made, batch_of(tokens(0))) == []


@pytest.mark.parametrize("kind", ["granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_the_loss_that_balances_experts_is_that_of_all_layers(kind: str) -> None:
    """The batch or the config turns it on; the batch overrides the config."""
    if not is_cut(kind):
        pytest.skip("refused for this transformers")
    made = of_type(kind).eval()
    batch = batch_of(tokens(0))
    plain = made(**batch).loss
    asked = {**batch, "output_router_logits": True}
    assert wrong_in_pieces(made, asked) == [] and not torch.equal(made(**asked).loss, plain)
    made.config.output_router_logits = True
    assert wrong_in_pieces(made, batch) == [] and not torch.equal(made(**batch).loss, plain)
    off = {**batch, "output_router_logits": False}
    assert wrong_in_pieces(made, off) == [] and torch.equal(in_pieces(made, off), plain)


def test_other_keyword_arguments_are_the_models_own() -> None:
    ids = tokens(0)
    llama = of_type("llama").eval()
    positions = torch.arange(ids.shape[1]).flip(0).expand_as(ids)
    if is_cut("gpt2"):
        gpt = of_type("gpt2").eval()
        assert wrong_in_pieces(gpt, {**batch_of(ids), "token_type_ids": torch.ones_like(ids)}) == []
        assert wrong_in_pieces(gpt, {**batch_of(ids), "position_ids": positions}) == []
    assert wrong_in_pieces(llama, {**batch_of(ids), "position_ids": positions, "num_items_in_batch": 3}) == []
    embedded = llama.model.embed_tokens(ids).detach()
    assert wrong_in_pieces(llama, {"inputs_embeds": embedded, "labels": ids}) == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"output_hidden_states": True}, "`output_hidden_states`: must be off in a pipeline"),
        ({"use_cache": True}, "`use_cache`: must be left out"),
        ({"labels": None}, "`labels`: must be in every micro-batch"),
        ({"input_ids": None}, "`input_ids`: must be in every micro-batch"),
        ({"output_hidden_states": False, "use_cache": False}, ""),
    ],
)
def test_what_no_piece_can_do_is_said(more: dict[str, Any], told: str) -> None:
    problem = Causal().problem({**batch_of(tokens(0)), **more})
    assert str(problem or "").startswith(told) and (problem is None) == (not told)


def test_a_model_that_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"`model`: must be a causal language model .* got Linear\."):
        Causal.of(nn.Linear(2, 2))
    made = of_type("llama", 1)
    assert Causal.of(made) == Causal()
    made.config.output_hidden_states = True
    with pytest.raises(UnsupportedError, match=r"`config\.output_hidden_states`: must be off"):
        Causal.of(made)
    made.config.output_hidden_states = False
    made.forward = types.MethodType(lambda self, **batch: None, made)
    with pytest.raises(UnsupportedError, match=r"`model`: must have the forward of transformers"):
        Causal.of(made)
