"""Cuts of a model along a pipeline, one rank's part of a plan, and the duration of a schedule."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT, batch
from tests.numerics.test_pipelines import PARTS
from tests.unit.models import moe, parameter, plan
from tests.unit.test_plan import at
from zerodrift.api import make_plan
from zerodrift.errors import ConfigError, ModelError
from zerodrift.mesh import MeshShape
from zerodrift.model.sources import describe
from zerodrift.model.spec import ModelSpec, OwningModule
from zerodrift.pipeline.cut import AbsentModule, Parts, PassThrough, prune
from zerodrift.pipeline.schedules import timeline
from zerodrift.plan.bill import cost, stage_cost
from zerodrift.plan.check import find_violations
from zerodrift.plan.stages import (
    Action,
    Timeline,
    activation_width,
    crossings,
    even_by_cost,
    names_of,
    part,
    pieces_of,
    products,
    rank_of,
)
from zerodrift.plan.table import Plan
from zerodrift.policy import pipelining
from zerodrift.policy.decisions import Pipelining
from zerodrift.policy.pipelining import V_SHAPED
from zerodrift.report.summary import pipeline_facts as facts
from zerodrift.report.summary import pipeline_legend as legend
from zerodrift.report.summary import pipeline_order as order

SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev")


def tied(layers: int = 4, names: tuple[str, ...] = ("embed.weight", "head.weight")) -> ModelSpec:
    """Return blocks between an embedding and a head that are one parameter."""
    blocks = [
        parameter(f"layers.{number}.{name}.weight", shape)
        for number in range(layers)
        for name, shape in (("mlp.up", (8, 8)), ("norm", (8,)))
    ]
    first = parameter(names[0], (32, 8))
    shared = replace(first, names=names, owners=first.owners * len(names))
    return ModelSpec("tied", (shared, *blocks, parameter("norm.weight", (8,))))


def cut(schedule: str, model: ModelSpec | None = None, stages: int = 2, **block: Any) -> Plan:
    written = at(2, pipeline={"stages": stages, "schedule": schedule, "micro_batches": 2 * stages, **block})
    return plan(written, tied(4 * stages) if model is None else model, world=2 * stages)


# --- pieces ------------------------------------------------------------------------------------------------


def test_pieces_go_round_the_ranks_or_forth_and_back() -> None:
    for schedule, ranks in (("interleaved", [0, 1, 2, 0, 1, 2]), ("zbv", [0, 1, 2, 2, 1, 0])):
        pipelining = Pipelining(schedule, 2, "layers", "queue")
        assert [rank_of(pipelining, MeshShape(pipeline=3), piece) for piece in range(6)] == ranks


def test_blocks_are_dealt_evenly_by_count_or_by_cost() -> None:
    by_layers = cut("1f1b", tied(8))
    assert [unit.stage for unit in by_layers.units if unit.name] == [0] * 4 + [1] * 4
    # The head, tied to an embedding of 32 x 8, costs as much as four blocks.
    by_cost = cut("1f1b", tied(8), split="cost")
    assert [unit.stage for unit in by_cost.units if unit.name] == [0] * 6 + [1] * 2


@pytest.mark.parametrize(
    ("costs", "count", "after"),
    [([5, 1, 1, 1, 1, 9], 3, 0), ([3, 1, 4, 1, 5], 2, 6), ([2], 1, 9)],
)
def test_no_way_to_deal_by_cost_has_a_cheaper_dearest_piece(costs: list[int], count: int, after: int) -> None:
    def dearest(sizes: list[int]) -> int:
        ends = list(itertools.accumulate(sizes))
        sums = [sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        return max([*sums[:-1], sums[-1] + after])

    found = even_by_cost(costs, count, after)
    ways = [
        [b - a for a, b in itertools.pairwise((0, *inner, len(costs)))]
        for inner in itertools.combinations(range(1, len(costs)), count - 1)
    ]
    assert found in ways and dearest(found) == min(map(dearest, ways))


# --- parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts_are_sound_and_together_the_plan(schedule: str) -> None:
    whole = cut(schedule)
    assert find_violations(whole) == []
    back = Plan.from_json(json.loads(json.dumps(whole.to_json())))
    assert back == whole and back.digest == whole.digest
    parts = [part(whole, rank) for rank in range(2)]
    leads = [row.name for each in parts for row in each.rows if each.segments[row.segment].lead]
    assert sorted(leads) == sorted(row.name for row in whole.rows)
    for rank, each in enumerate(parts):
        assert find_violations(each) == []
        known = {name for row in each.rows for name in row.names}
        assert known == set().union(*(names_of(whole, piece) for piece in pieces_of(whole, rank)))
        assert each.units[0].name == "" and sum(not unit.name for unit in each.units) == 1
        for row in each.rows:
            before = whole.row(row.name)
            assert before is not None and (before.shape, before.offset) == (row.shape, row.offset)


def test_a_tied_embedding_is_on_both_ends_alike_and_leads_on_one() -> None:
    parts = [part(cut("1f1b"), rank) for rank in range(2)]
    held = [next(s for s in each.segments if s.copies) for each in parts]
    assert [segment.lead for segment in held] == [True, False]
    assert [parts[n].rows[held[n].rows[0]].names for n in range(2)] == [("embed.weight",), ("head.weight",)]
    assert (held[0].padded, held[0].columns) == (held[1].padded, held[1].columns)
    # In a V the two are one parameter on one rank.
    (both,) = (s for s in part(cut("zbv"), 0).segments if s.copies)
    assert both.lead and not any(s.copies for s in part(cut("zbv"), 1).segments)


def test_a_parameter_that_is_tied_elsewhere_is_refused_by_name() -> None:
    model = tied(8, ("layers.0.mlp.up.weight_", "layers.3.mlp.up.weight_"))
    assert cut("gpipe", model, stages=2)
    with pytest.raises(ModelError, match=r"`layers\.0\.mlp\.up\.weight_`: must be tied between the first"):
        cut("gpipe", model, stages=4)


def test_the_bill_is_that_of_the_dearest_stage() -> None:
    made = cut("1f1b", tied(8), split="layers")
    bills = [stage_cost(made, rank, 4) for rank in range(2)]
    assert cost(made) == max(bills, key=lambda bill: bill.peak.total)
    assert sum(bill.parameters for bill in bills) == sum(row.numel for row in made.rows) + 32 * 8  # its copy
    assert {line.axis for line in bills[0].traffic} == {"shard", "ends", "pipeline"}


KLASS = "transformers.models.llama.modeling_llama.LlamaRMSNorm"


@pytest.mark.parametrize(
    ("schedule", "stages", "count"),
    [("1f1b", 4, 3), ("interleaved", 2, 3), ("zbv", 2, 2), ("dualpipev", 4, 6)],
)
def test_what_a_token_costs_between_ranks(schedule: str, stages: int, count: int) -> None:
    """The cost is known for models of `transformers`, and reported as unknown for others."""
    model = tied(4 * stages, ("model.embed_tokens.weight", "lm_head.weight"))
    embedding, *others = model.parameters
    owned = [replace(each, owners=(OwningModule(each.owners[0].path, KLASS),)) for each in others]
    made = cut(schedule, replace(model, parameters=(embedding, *owned)), stages)
    assert (crossings(made), activation_width(made)) == (count, 8)
    assert activation_width(cut(schedule, model, stages)) is None
    said = dict(facts(made, None))["travels"]
    assert said.startswith(f"16 B per token over each of {count} boundaries") and "8 values in bf16" in said


# --- time -------------------------------------------------------------------------------------------


def steps(made: Plan) -> Timeline:
    found = timeline(made)
    assert found is not None
    return found


def mixture(dense: tuple[int, ...] = ()) -> ModelSpec:
    """Return eight blocks, some without experts."""
    stacks = [
        parameter(f"layers.{number}.mlp.{'up' if number in dense else 'experts.up'}", (4, 8, 16))
        for number in range(8)
    ]
    return ModelSpec("mixture", (parameter("embed.weight", (32, 8)), *stacks))


@pytest.mark.parametrize(
    ("dense", "more", "pieces"),
    [
        ((), {}, {(0, 3), (1, 2), (2, 1), (3, 0)}),
        ((0,), {}, {(0, 3), (1, 2), (2, 1), (3, 0)}),
        ((0, 1), {}, {(1, 2), (2, 1)}),
        ((), {"experts": {"ranks": 1}}, set()),
        ((), {"zero_optimization": {"stage": 3}, "sharding": {"keep_gathered": "micro-batch"}}, set()),
    ],
)
def test_pairs_go_on_in_turns_where_both_pieces_exchange(
    dense: tuple[int, ...], more: dict[str, Any], pieces: set[tuple[int, int]]
) -> None:
    block = {"stages": 2, "schedule": "dualpipev", "micro_batches": 6}
    written = at(2, **{"pipeline": block, "experts": {"ranks": 2}, **more})
    made = steps(plan(written, mixture(dense), world=4))
    found = {
        (action.piece, after.piece)
        for rank in made.ranks
        for action, after in itertools.pairwise(rank)
        if action in made.paired and (action.kind, after.kind) == ("F", "B")
    }
    assert found == pieces
    assert len(made.paired) == sum(line.count("+") for _, line in order(made))
    assert ("+" in legend(made)) == bool(pieces)


def test_known_bubbles() -> None:
    """A bubble is (p - 1) / (m + p - 1) if a backward takes twice a forward; less if weights fill it."""
    for stages, count in ((4, 8),):
        found = {each: steps(cut(each, tied(8 * stages), stages, micro_batches=count)) for each in SCHEDULES}
        bubbles = {schedule: made.bubble for schedule, made in found.items()}
        expected = (stages - 1) / (count + stages - 1)
        assert bubbles["gpipe"] == pytest.approx(expected) and bubbles["1f1b"] == pytest.approx(expected)
        assert bubbles["zbv"] < bubbles["interleaved"] < bubbles["1f1b"]
        assert found["1f1b"].most_alive == tuple(range(stages, 0, -1))
        for made in found.values():
            for rank, begun in zip(made.ranks, made.starts, strict=True):
                assert list(begun) == sorted(begun)
                assert len(set(rank)) == len(rank)


def test_micro_batches_end_in_their_order_and_few_have_begun() -> None:
    """The bill of sums by the tree counts begun ones, of a piece and of the root at both ends of a V."""
    for schedule, stages, count in itertools.product(SCHEDULES, (2, 4), (8,)):
        made = cut(schedule, tied(8 * stages), stages, micro_batches=count)
        used = [(rank, {piece}) for rank in range(stages) for piece in pieces_of(made, rank)]
        used += [(0, set(pieces_of(made, 0)))] if schedule in V_SHAPED else []
        most = max(most_begun(steps(made).ranks[rank], pieces) for rank, pieces in used)
        assert most == pipelining.most_unfinished(made.policy.pipeline, stages, count)


def most_begun(actions: Sequence[Action], pieces: set[int]) -> int:
    """Return the most micro-batches with begun backwards in these pieces of which one has not ended."""
    now: set[int] = set()
    ended: list[int] = []
    most = 0
    for action in actions:
        if action.piece in pieces and action.kind != "F":
            now.add(action.micro_batch)
            most = max(most, len(now))
            ended += [] if action.kind == "I" else [action.micro_batch]
            if ended.count(action.micro_batch) == len(pieces):
                now.remove(action.micro_batch)
    assert len(pieces) > 1 or ended == sorted(ended)
    return most


# --- the block --------------------------------------------------------------------------------------


MICRO, COUNT = "`pipeline.micro_batches`: must be", "gradient_accumulation_steps"
KEPT = {"sharding": {"keep_gathered": "micro-batch"}}
BLOCKS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"schedule": "1f1b", "micro_batches": 1}, {}, f"{MICRO} at least 2 with"),
    ({"schedule": "interleaved", "micro_batches": 5}, {}, f"{MICRO} a multiple .* 2, .* Use 4 or 6"),
    ({"schedule": "zbv", "chunks": 3}, {}, "`pipeline.chunks`: must be 2 with schedule zbv; got 3"),
    ({"weight_grads": "queue"}, {}, "`pipeline.weight_grads`: must be left out with schedule gpipe"),
    ({"schedule": "zbv", "weight_grads": "autograd"}, KEPT, "must be `queue` with"),
    ({"schedule": "zbv"}, {"sharding": {"keep_gathered": "never"}}, "keep_gathered`: must be `step`"),
    ({"micro_batches": 3}, {COUNT: 4}, f"must agree with `{COUNT}`, which says 4; got 3"),
    ({"schedule": "gpipe", "micro_batches": 3}, {COUNT: 3}, ""),
    ({"schedule": "zbv", "weight_grads": "autograd"}, {}, ""),
    ({"schedule": "interleaved", "chunks": 3, "micro_batches": 6}, {}, ""),
    ({"schedule": "zbv"}, KEPT, ""),
]


@pytest.mark.parametrize(("block", "rest", "told"), BLOCKS)
def test_the_block_is_checked(block: dict[str, Any], rest: dict[str, Any], told: str) -> None:
    written = {"zero_optimization": {"stage": 3}, "pipeline": {"stages": 2, **block}, **rest}
    if not told:
        assert make_plan(written, tied(8), 4).policy.pipeline is not None
        return
    with pytest.raises(ConfigError, match=told):
        make_plan(written, tied(8), 4)


def test_a_config_without_a_pipeline_keeps_its_digest_and_says_nothing_of_one() -> None:
    one = plan({"pipeline": {"stages": 1, "schedule": "zbv"}}, moe(layers=2))
    assert one.policy.pipeline is None and "pipeline" not in one.to_json()["policy"]
    assert [segment for segment in one.to_json()["segments"] if len(segment) > 5] == []
    assert part(one, 0) is one


def test_of_experts_those_count_that_a_token_uses() -> None:
    """The module, its router, or the model's config gives the number of stacked or listed experts."""

    def block_of(experts: nn.Module, **said: int) -> nn.Module:
        block = nn.Module()
        block.gate, block.experts = nn.Linear(4, 8), experts
        for key, value in said.items():
            setattr(block, key, value)
        return block

    stacked = nn.Module()
    stacked.up = nn.Parameter(torch.zeros(8, 6, 4))
    listed = nn.ModuleList(nn.Linear(4, 6) for _ in range(8))
    routed = block_of(stacked)
    routed.gate.top_k = 2
    for made in (block_of(stacked, top_k=2), block_of(listed, num_experts_per_tok=2), routed):
        used = {each.name: each.used for each in describe(made).parameters}
        assert used.pop("gate.weight") == used.pop("gate.bias") == (1, 1)
        assert set(used.values()) == {(2, 8)}
        costs = [products(each) for each in describe(made).parameters if "experts" in each.name]
        assert sum(costs) == 2 * 6 * 4
    assert {each.used for each in describe(block_of(stacked)).parameters} == {(1, 1)}, "nobody says"


# --- pieces of a module -----------------------------------------------------------------------------------


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


def test_what_another_piece_has_and_a_wrong_path_of_layers_are_refused() -> None:
    model = GPT(6, tied=False)
    first = prune(model, names(model)[0], PARTS)
    with pytest.raises(ModelError, match=r"`norm`: must be used in the piece of the pipeline that it is in"):
        PARTS.last(first, PARTS.first(first, batch(0)), batch(0))
    wrong = Parts("blocks", before=PARTS.before, after=PARTS.after)
    said = r"`layers`: must be the path .*; got 'blocks', which GPT does not have\."
    with pytest.raises(ModelError, match=said):
        prune(model, names(model)[0], wrong)
