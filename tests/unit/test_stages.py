"""Cuts of a model along a pipeline, one rank's part of a plan, and the duration of a schedule."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from tests.numerics.networks import GPT, batch
from tests.numerics.test_pipelines import PARTS
from tests.unit.models import at, moe, parameter, plan
from zerodrift.api import make_plan
from zerodrift.errors import ConfigError, ModelError
from zerodrift.mesh import MeshShape
from zerodrift.model.spec import ModelSpec
from zerodrift.pipeline.cut import Parts, prune
from zerodrift.pipeline.schedules import timeline
from zerodrift.plan.bill import cost, stage_cost
from zerodrift.plan.check import find_violations
from zerodrift.plan.schedule import Computation, pipeline_events
from zerodrift.plan.stages import (
    Action,
    Timeline,
    names_of,
    part,
    pieces_of,
    rank_of,
)
from zerodrift.plan.table import Plan
from zerodrift.policy import pipelining
from zerodrift.policy.decisions import Pipelining
from zerodrift.policy.pipelining import V_SHAPED

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
    pipeline = {"stages": stages, "schedule": schedule, "micro_batches": 2 * stages, **block}
    return plan({**at(2), "pipeline": pipeline}, model or tied(4 * stages), world=2 * stages)


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
        for number, row in enumerate(each.rows):
            assert number in each.segments[row.segment].rows and number in each.units[row.unit].rows
            assert each.segments[row.segment].unit == row.unit
            before = whole.row(row.name)
            assert before is not None and (before.shape, before.offset) == (row.shape, row.offset)


def test_a_backward_of_a_piece_computes_in_the_reverse_order() -> None:
    whole = cut("interleaved")
    order = timeline(whole)
    assert order is not None
    work: dict[str, list[Any]] = {}
    for action, found in pipeline_events(whole, 0, order.ranks[0]):
        if action.piece == 0:
            work[action.kind] = [(each.work, each.unit) for each in found if isinstance(each, Computation)]
    forward = [("backward" if name == "forward" else name, unit) for name, unit in work["F"]]
    assert [name for name, _ in work["F"]] == ["enter", *["forward"] * (len(forward) - 1)]
    assert work["B"] == forward[::-1]


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


# --- time -------------------------------------------------------------------------------------------


def steps(made: Plan) -> Timeline:
    found = timeline(made)
    assert found is not None
    return found


def test_known_bubbles() -> None:
    """A bubble is (p - 1) / (m + p - 1) if a backward takes twice a forward; less if weights fill it."""
    found = {each: steps(cut(each, tied(32), 4, micro_batches=8)) for each in SCHEDULES}
    bubbles = {schedule: made.bubble for schedule, made in found.items()}
    assert bubbles["gpipe"] == pytest.approx(3 / 11) and bubbles["1f1b"] == pytest.approx(3 / 11)
    assert bubbles["zbv"] < bubbles["interleaved"] < bubbles["1f1b"]
    assert found["1f1b"].most_alive == (4, 3, 2, 1)
    for made in found.values():
        for rank, begun in zip(made.ranks, made.starts, strict=True):
            assert list(begun) == sorted(begun) and len(set(rank)) == len(rank)


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
    ({"schedule": "dualpipev", "micro_batches": 3}, {}, f"{MICRO} at least 4 with"),
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


# --- pieces of a module -----------------------------------------------------------------------------------


def names(model: nn.Module) -> list[frozenset[str]]:
    plan = make_plan({"pipeline": {"stages": 3, "schedule": "gpipe"}}, model, 3)
    return [names_of(plan, piece) for piece in range(3)]


def test_what_another_piece_has_and_a_wrong_path_of_layers_are_refused() -> None:
    model = GPT(6, tied=False)
    first = prune(model, names(model)[0], PARTS)
    with pytest.raises(ModelError, match=r"`norm`: must be used in the piece of the pipeline that it is in"):
        PARTS.last(first, PARTS.first(first, batch(0)), batch(0))
    wrong = Parts("blocks", before=PARTS.before, after=PARTS.after)
    said = r"`layers`: must be the path .*; got 'blocks', which GPT does not have\."
    with pytest.raises(ModelError, match=said):
        prune(model, names(model)[0], wrong)
