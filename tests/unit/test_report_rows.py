"""Groups of rows: every row once, in exact patterns; numbers of three digits, never zero for something."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import handmade
from zerodrift.plan.table import Plan
from zerodrift.policy.decisions import Columns
from zerodrift.report import figures
from zerodrift.report.rows import Line, group_rows, template

BF16, FP32 = handmade.columns(), handmade.pinned()


def numbers_at(plan: Plan, prefix: str) -> set[int]:
    """Return all numbers of the plan after a template, at its next component."""
    found = set()
    for row in plan.rows:
        for name in row.names:
            parts = name.split(".")
            for place, part in enumerate(parts):
                if part.isdecimal() and template(".".join(parts[:place])) == prefix:
                    found.add(int(part))
    return found


def spelled_out(text: str) -> list[int]:
    """Invert `ranges`."""
    found: list[int] = []
    for part in text.split(","):
        span, _, step = part.partition(":")
        low, _, high = span.partition("-")
        found += range(int(low), int(high or low) + 1, int(step or 1))
    return found


def expanded(plan: Plan, line: Line) -> list[str]:
    """Return the names that a line's pattern stands for, from its text alone."""
    first = plan.rows[line.rows[0]].name
    choices = []
    for place, (part, original) in enumerate(zip(line.pattern.split("."), first.split("."), strict=True)):
        if not original.isdecimal():
            choices.append([part])
        elif part == "*":
            prefix = template(".".join(first.split(".")[:place]))
            choices.append([str(number) for number in sorted(numbers_at(plan, prefix))])
        else:
            choices.append([str(number) for number in spelled_out(part)])
    return [".".join(parts) for parts in product(*choices)]


# --- laws -------------------------------------------------------------------------------------------

layer, expert = st.integers(0, 5), st.integers(0, 3)
names = st.one_of(
    st.sampled_from(["embed.weight", "norm.weight"]),
    st.builds("layers.{}.norm.weight".format, layer),
    st.builds("layers.{}.mlp.experts.{}.up.weight".format, layer, expert),
    st.builds("{}.{}".format, layer, expert),
)
kinds = st.tuples(st.sampled_from([(4,), (2, 3)]), st.sampled_from([BF16, FP32]))


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(names, kinds, min_size=1, max_size=40))
def test_patterns_expand_to_every_row_once(model: dict[str, tuple[tuple[int, ...], Columns]]) -> None:
    plan = handmade.plan([handmade.param(name, shape, of) for name, (shape, of) in model.items()])
    table = group_rows(plan)
    for line in table.lines:
        assert sorted(expanded(plan, line)) == sorted(plan.rows[index].name for index in line.rows)
        assert {plan.rows[index].shape for index in line.rows} == {line.shape}
        assert {plan.rows[index].columns for index in line.rows} == {table.sets[line.set].columns}
        assert line.numel == sum(plan.rows[index].numel for index in line.rows)
    covered = [index for line in table.lines for index in line.rows]
    assert sorted(covered) == list(range(len(plan.rows)))
    assert [line.rows[0] for line in table.lines] == sorted(line.rows[0] for line in table.lines)
    assert sum(item.tensors for item in table.sets) == len(plan.rows)
    assert sum(item.numel for item in table.sets) == sum(row.numel for row in plan.rows)


# --- examples ---------------------------------------------------------------------------------------


def test_a_mixture_of_experts_is_a_dozen_lines() -> None:
    lines = {line.pattern: line for line in group_rows(handmade.moe(layers=32, experts=8)).lines}
    assert len(lines) == 12
    assert lines["model.layers.*.self_attn.q_proj.weight"].count == 32
    assert lines["model.layers.*.block_sparse_moe.experts.*.w1.weight"].count == 256
    assert lines["model.embed_tokens.weight"].also == ("lm_head.weight",)


# --- numbers ----------------------------------------------------------------------------------------------


SHOWN: list[tuple[Callable[..., str], dict[Any, str]]] = [
    (figures.elements, {0: "0", 10_000: "10.0K", 999_499: "999K", 999_500: "1.00M", 46_702_792_704: "46.7B"}),
    (figures.size, {0: "0 B", 999: "999 B", 1000: "0.977 KiB", 1 << 30: "1.00 GiB", 1 << 60: "1024 PiB"}),
    (figures.percent, {0.0: "0%", 1.0: "100%", 0.000123: "0.0123%", 0.5: "50.0%", 0.9999998: "99.99998%"}),
    (figures.significant, {9.996: "10.0", 0.0123: "0.0123", 123456.0: "123456", 0.0: "0", -1.5: "-1.50"}),
]


@pytest.mark.parametrize(("show", "texts"), SHOWN)
def test_a_number_is_shown(show: Callable[..., str], texts: dict[Any, str]) -> None:
    assert {number: show(number) for number in texts} == texts
