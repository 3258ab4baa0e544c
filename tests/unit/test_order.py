"""The order of sums: its default, the tree, the dealing of micro-batches and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch

from tests.unit.models import at, moe
from tests.unit.refusals import error_of
from tests.unit.test_squares import one_by_one
from zerodrift.api import make_plan
from zerodrift.comm.fold import halving_exchanges
from zerodrift.engine.habits.determinism import seed_of
from zerodrift.errors import ConfigError
from zerodrift.mesh import MeshShape
from zerodrift.plan.table import Plan
from zerodrift.policy import order
from zerodrift.policy.order import WHENS, When, micro_batches_of_rank
from zerodrift.report.summary import facts


def level_by_level(leaves: list[Any]) -> Any:
    """Sum by definition: node j of a level is left + right of the one below, or left alone."""
    while len(leaves) > 1:
        pairs = (leaves[start : start + 2] for start in range(0, len(leaves), 2))
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


class _Name(str):
    """A symbolic sum that records the order of its additions."""

    def __add__(self, other: str) -> _Name:
        return _Name(f"({self} {other})")


def tree_text(numbers: Iterable[int]) -> Any:
    return level_by_level([_Name(number) for number in numbers])


def by_halves(of_ranks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the final values of all ranks, which run in this process."""
    ranks = len(of_ranks)
    rooms = torch.empty(ranks, of_ranks[0].numel())
    all_ranks = [halving_exchanges(full, rank, ranks, rooms[rank]) for rank, full in enumerate(of_ranks)]
    for _ in range(ranks.bit_length() - 1):
        turn = [next(one) for one in all_ranks]
        for rank, exchange in enumerate(turn):
            assert turn[exchange.partner].partner == rank
            exchange.incoming.copy_(turn[exchange.partner].outgoing)
    assert [next(one, None) for one in all_ranks] == [None] * ranks
    return [exchange.incoming + exchange.kept for exchange in turn]


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 7), (8, 256), (64, 7)])
def test_halving_adds_by_the_tree(ranks: int, count: int) -> None:
    seeded, numel = torch.Generator().manual_seed(ranks + count), ranks * count
    scales = torch.randint(-6, 7, (ranks, numel), generator=seeded)
    full = list(torch.ldexp(torch.randn(ranks, numel, generator=seeded), scales))
    before = torch.stack(full)
    found = torch.cat(by_halves(full))
    assert torch.equal(found, level_by_level(full))
    assert torch.equal(torch.stack(full), before), "only read"
    if numel > 100:
        assert not torch.equal(found, one_by_one(torch.stack(full), torch.float32, "rank"))


@pytest.mark.parametrize("when", WHENS)
def test_the_dealing_makes_the_tree_or_says_no(when: When) -> None:
    """Sums are added in the turns of the engine; `is_tree` is true exactly if these make the tree."""
    for micro_batches, shard, replicate in itertools.product(range(1, 7), range(1, 5), range(1, 5)):
        mesh = MeshShape(shard, replicate)
        dealt = [micro_batches_of_rank(when, micro_batches, mesh, rank) for rank in range(mesh.data)]
        total = micro_batches * mesh.data
        assert sorted(itertools.chain(*dealt)) == list(range(total))
        assert all(list(numbers) == sorted(numbers) for numbers in dealt)
        names = [[_Name(number) for number in numbers] for numbers in dealt]
        of_replicas = []
        for replica in range(replicate):
            ranks = names[replica * shard : (replica + 1) * shard]
            if when == "every":
                sums = [level_by_level(list(column)) for column in zip(*ranks, strict=True)]
            else:
                sums = [level_by_level(numbers) for numbers in ranks]
            of_replicas.append(level_by_level(sums))
        same = level_by_level(of_replicas) == tree_text(range(total))
        assert same is order.is_tree(when, micro_batches, shard, replicate), (micro_batches, shard, replicate)


def plan(ranks: int, accumulation: int, precision: dict[str, Any], **rest: Any) -> Plan:
    config = at(rest.pop("stage", 1), **precision) | {"gradient_accumulation_steps": accumulation, **rest}
    return make_plan(config, moe(layers=4), ranks)


TREE = {"reduce": {"order": "tree"}}
ZBV = {"stages": 2, "schedule": "zbv"}
refusal = partial(error_of, ConfigError, plan)


def test_numbers_of_ranks_that_make_no_tree_are_refused_with_those_that_do() -> None:
    told = refusal(2, 3, TREE)
    assert "precision.reduce.order" in told and "3 micro-batches on each of 2 ranks" in told
    assert "Use 1, 3 or 6 ranks for these 6 micro-batches; or set `reduce.when: every` for all" in told
    for ranks in (1, 3, 6):
        plan(ranks, 6 // ranks, TREE)
    told = refusal(3, 2, TREE, stage=3)
    assert "Use 1, 2 or 6 ranks" in told and "when: last` for all" in told
    plan(2, 3, TREE, stage=3)
    assert "power of two" in refusal(4, 3, TREE, sharding={"replicate": 2}, stage=3)
    # Two times of reduction, where no dealing serves both.
    rules = {"rules": [{"match": "*norm*", "reduce": {"when": "every"}}], **TREE}
    assert "two `reduce.when`" in refusal(2, 2, rules)
    plan(2, 1, rules)
    plan(1, 2, rules)


@pytest.mark.parametrize(
    ("precision", "rest", "word"),
    [
        ({"reduce": {"order": "tree", "wire": "bf16"}}, {}, "another dtype than the sum"),
        (TREE, {"prescale_gradients": True}, "before the reduction"),
        (TREE, {"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        (TREE, {"backend": "fsdp2"}, "backend fsdp2"),
        (TREE, {"pipeline": {**ZBV, "weight_grads": "queue"}}, "from a queue"),
        (TREE, {"experts": {"ranks": 2}}, "expert parallelism"),
        ({"rules": [{"match": "*norm*", **TREE}]}, {}, "precision.rules[0].reduce.order"),
        ({"reduce": {"order": "native", "wire": "bf16"}}, {}, "NCCL adds in the dtype that it sends"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_had_with_the_tree_is_refused_by_name(
    precision: dict[str, Any], rest: dict[str, Any], word: str
) -> None:
    told = refusal(4, 4, precision, **rest)
    assert word in told and "reduce.order" in told


def test_weights_tied_across_a_pipeline_are_refused_by_name() -> None:
    config = at(0, **TREE) | {"gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}
    told = r"(?s)reduce\.order.*model\.embed_tokens\.weight tied to lm_head\.weight"
    with pytest.raises(ConfigError, match=told):
        make_plan(config, moe(tie=True), 2)
    make_plan(config, moe(), 2)
    make_plan({**config, "pipeline": ZBV}, moe(layers=4, tie=True), 2)


@pytest.mark.parametrize(
    ("ranks", "count", "config", "why"),
    [
        (4, 1, {"mode": "fp16"}, ""),
        (4, 2, {"stage": 3}, ""),
        (8, 1, {"stage": 2, "sharding": {"replicate": 2}}, ""),
        (128, 8, {"stage": 2, "pipeline": {"stages": 2}}, ""),
        (64, 4, {"stage": 1}, "2 sums of whole gradients"),
        (64, 4, {"stage": 3, "sharding": {"replicate": 2}}, "2 sums of slices of gradients"),
        (2, 3, {}, "3 micro-batches on each of 2 ranks make no whole nodes of the tree; 1, 3 or 6 ranks do"),
        (4, 2, {"pipeline": {"stages": 2}}, "2 sums of whole gradients"),
        (2, 1, {"mode": "autocast-bf16"}, "autocast"),
        (2, 1, {"reduce": "bf16"}, "another dtype than the sum"),
        (4, 1, {"backend": "fsdp2"}, "backend fsdp2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_default_is_the_tree_where_sums_make_one(
    ranks: int, count: int, config: dict[str, Any], why: str
) -> None:
    """Otherwise it is the order of ranks. Decision, cell and the first lines give the reason."""
    precision = {key: config[key] for key in ("mode", "reduce") if key in config}
    rest = {key: value for key, value in config.items() if key not in precision}
    for auto in ({}, {"reduce": {"order": "auto"}}) if "reduce" not in precision else ({},):
        made = plan(ranks, count, {**precision, **auto}, **rest)
        assert Plan.from_json(made.to_json()) == made
        assert made.policy.tree is (why == "") and not made.policy.requires_tree
        order = "rank" if why else "tree"
        (decision,) = [each for each in made.policy.decisions if each.key == "order of sums"]
        assert why in decision.why and decision.why.startswith("default")
        assert why in dict(facts(made))["order"]
        for row in made.rows:
            if row.columns.update is not None:
                assert row.columns.update.reduce.order == order
                assert f"order {order}: {decision.why}" in row.columns.reasons()["reduce"]


def test_seeds_never_change() -> None:
    """A resumed run depends on these known answers."""
    known = [18089622622667645874, 8384462955522581546, 7127797555942930033]
    assert [seed_of(0, 0, 0), seed_of(1, 2, 3), seed_of(3, 2, 1)] == known
    assert len({seed_of(*numbers) for numbers in itertools.product(range(8), repeat=3)}) == 512


def test_each_order_has_its_columns() -> None:
    usual, tree, rank, native = (
        plan(2, 2, {"reduce": {"order": name}}) for name in ("auto", "tree", "rank", "native")
    )
    updates = [[row.columns.update for row in made.rows] for made in (usual, tree, rank)]
    assert updates[0] == updates[1] != updates[2]
    assert len({made.digest for made in (usual, tree, rank)}) == 3, "a tree that is asked for refuses more"
    assert {row.columns.update.reduce.order for row in native.rows} == {"native"}  # type: ignore[union-attr]
    (decision,) = (item for item in native.policy.decisions if item.key == "order of sums")
    assert not native.policy.tree and decision.value == "NCCL's own" and "given up" in decision.why
    # A safe module travels unrounded: autocast's default would round a sum before it is added to others'.
    for row in plan(2, 2, {"mode": "autocast-bf16", **TREE}).rows:
        update = row.columns.update
        assert update is not None
        assert update.reduce.wire is update.reduce.sum is update.accumulate.dtype
