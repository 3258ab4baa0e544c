"""Text reports: as wide as the terminal, complete, and every row once, in an exact pattern."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import handmade
from zerodrift.dtypes import DType
from zerodrift.errors import ModelError
from zerodrift.mesh import MeshShape
from zerodrift.plan.bill import cost
from zerodrift.plan.table import BufferRow, Plan
from zerodrift.policy.decisions import (
    COLUMNS,
    Columns,
    ComponentSpec,
    Decision,
    Master,
    Placed,
    Reduction,
    State,
)
from zerodrift.report import terminal
from zerodrift.report.explanation import explain, matching
from zerodrift.report.rows import Line, group_rows, list_rows, template
from zerodrift.report.terminal import brief_text

LONG = ".".join(["a_rather_long_module_name"] * 9) + ".weight"
BF16, FP32 = handmade.columns(), handmade.pinned()
NARROW = handmade.columns(
    DType.FP16,
    why="mode fp16",
    reduce=Reduction(DType.FP16, DType.FP32, "last"),
    master=Master.FP32,
    state=State.BF16_STOCHASTIC,
)
ODD = replace(
    handmade.frozen(DType.COMPLEX64), storage=Placed(DType.FP8_E4M3, "shard"), gather=DType.FP8_E5M2
)


def plan_text(plan: Plan, color: bool = False, width: int = 100) -> str:
    return terminal.plan_text(plan, cost(plan), group_rows(plan), color=color, width=width)


def check(text: str, width: int = 100) -> None:
    """Check the width and the characters of a plain report."""
    assert "\x1b" not in text
    for line in text.splitlines():
        assert len(line) <= width, line
        assert line == line.rstrip(), repr(line)


PLANS = {
    "mixture of experts": handmade.moe(layers=4),
    "an empty parameter": handmade.plan([handmade.param("nothing", (0, 4), BF16)], MeshShape()),
    "long name": handmade.plan([handmade.param(LONG, (4, 4), BF16), handmade.param("b", (4,), BF16)]),
    "long tied names": handmade.plan([handmade.param(LONG, (4, 4), BF16, "b" + LONG, "c" + LONG)]),
    "widest of everything": handmade.plan(
        [handmade.param("a", (4, 4), NARROW), handmade.param("b", (4,), ODD)]
    ),
    "frozen": handmade.plan(
        [handmade.param("a", (4, 4), handmade.frozen()), handmade.param("b", (4, 4), BF16)]
    ),
    "many sets": handmade.plan(
        [handmade.param(f"layer_{n}.weight", (4, 4), handmade.columns(why=f"rule {n}")) for n in range(60)]
    ),
    "long decisions": handmade.plan(
        [handmade.param("a", (4,), BF16)],
        decisions=(Decision("k" * 60, "v" * 90, "w" * 200), Decision("key", "value " * 30, "why " * 60)),
        ignored=(("deep.key." * 12, "because " * 40),),
        optimizer=ComponentSpec(
            "AdamW", '{"lr": 0.001, "betas": [0.9, 0.95], "weight_decay": 0.1, "eps": 1e-08}'
        ),
    ),
    "buffers and notes": handmade.plan(
        [handmade.param("a", (4,), BF16)],
        buffers=[BufferRow(f"b{n}", (4,), DType.FP32, DType.BF16, "precision.buffers") for n in range(3)],
        notes=["note " * 50, "x" * 150],
    ),
    "markup": handmade.plan([handmade.param("[red]a[/red].[bold].weight", (4, 4), BF16)]),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_fits_any_terminal_and_shows_every_cell_and_note_in_full(name: str) -> None:
    plan = PLANS[name]
    table = group_rows(plan)
    for width in (50, 100):
        text = plan_text(plan, width=width)
        check(text, width)
        assert all(cell in text for item in table.shown() for cell in item.columns.cells().values())
        brief = brief_text(plan, cost(plan), table, color=False, width=width)
        check(brief, width)
        assert all(word in "".join(brief.split()) for note in plan.notes for word in note.split()[:3])
    lines = plan_text(plan).splitlines()
    for item in table.sets:
        cells = list(item.columns.cells().values())
        assert any(line.split()[-len(COLUMNS) :] == cells for line in lines), item.letter
    assert next(line for line in lines if line.startswith("set")).split()[1:] == list(COLUMNS)
    letters = [*string.ascii_uppercase, *(f"A{each}" for each in string.ascii_uppercase), *["BA", "BB", "BC"]]
    assert [item.letter for item in table.sets][:55] == letters[: len(table.sets)]
    check(terminal.rows_text(plan, list_rows(plan, range(len(plan.rows))), color=False))
    check(terminal.explanation_text(explain(plan, plan.rows[0].name), plan.digest, color=False))


def test_the_whole_story_is_there() -> None:
    plan = handmade.moe(layers=4)
    text = plan_text(plan)
    for words in (
        *(plan.digest[:12], "mixtral-8x7b", "14336 x 4096", "model.embed_tokens.weight = lm_head.weight"),
        *("model.layers.*.block_sparse_moe.experts.*.w1.weight x32", "precision.rules[0]: '*.gate.weight'"),
        *("  pinned  ", "1 buffer kept as fp32"),
    ):
        assert words in text
    for decision in plan.policy.decisions:
        assert decision.key in text
        words = f"{decision.value} {decision.why}".split()
        assert all(word in text for word in words), "long ones are wrapped"
    assert all(key in text for key, _ in plan.policy.ignored)
    (line,) = (line for line in text.splitlines() if "gate.weight x4" in line)
    assert line.startswith(" * "), "pins are marked without colour"
    assert "[red]a[/red].[bold].weight" in plan_text(PLANS["markup"]), "brackets are no markup"
    colored = plan_text(plan, color=True)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert bare != colored and [line.rstrip() for line in bare.splitlines()] == text.splitlines()


# --- one parameter ----------------------------------------------------------------------------------


def test_explain_says_every_column_and_why() -> None:
    plan = handmade.moe(layers=2)
    found = explain(plan, "model.layers.1.block_sparse_moe.gate.weight")
    assert [cell.column for cell in found.cells] == list(COLUMNS)
    whys = {cell.column: cell.why for cell in found.cells}
    assert whys.pop("grad") == "autograd leaves it in the compute dtype"
    assert all("precision.rules[0]: '*.gate.weight'" in why for why in whys.values())
    assert found.kind == "pinned"
    text = terminal.explanation_text(found, plan.digest, color=False)
    words = {cell.column: cell.words for cell in found.cells}
    assert words["reduce"] == "fp32 on the wire, summed in fp32, after every micro-batch"
    assert "model.layers.1, pipeline stage 0" in text
    tied = ("model.embed_tokens.weight", "lm_head.weight")
    assert [explain(plan, name).names for name in tied] == [tied, tied]
    words = {cell.column: cell.words for cell in explain(PLANS["frozen"], "a").cells}
    assert words["grad"] == words["state"] == "none, frozen"


# --- names that are not there -----------------------------------------------------------------------


def test_a_glob_matches_by_every_name_or_offers_another() -> None:
    plan = handmade.moe(layers=2)
    (tied,) = matching(plan, "*head*", "--rows")
    assert plan.rows[tied].name == "model.embed_tokens.weight"
    assert len(matching(plan, "*.gate.*", "--rows")) == 2
    with pytest.raises(ModelError, match=r"--rows.*\*\.gate\.\*"):
        matching(plan, "*.gaet.*", "--rows")
    for query in ("model.layers.99.self_attn.q_proj.weight", "q_proj"):
        with pytest.raises(ModelError, match=r"`model\.layers\.0\.self_attn\.q_proj\.weight`"):
            explain(plan, query)


# --- groups of rows ---------------------------------------------------------------------------------


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
