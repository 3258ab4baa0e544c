"""Reading, folding and printing of traces that are written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from rich.cells import cell_len
from torch import nn

from zerodrift.api import make_plan
from zerodrift.inspect.check.compare import hidden, nondeterministic
from zerodrift.plan.table import Plan
from zerodrift.plan.trace import Refusal, Trace, TracedOperation, TracedTensor
from zerodrift.report.trace import hidden_lines, operation_runs, trace_text, traced_modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(12))


def plan(mode: str = "bf16", **keys: Any) -> Plan:
    precision = {"mode": mode, "rules": [{"match": "router.weight", "pin": "fp32"}], **keys}
    return make_plan({"precision": precision, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, Net())


def tensors(told: str) -> tuple[TracedTensor, ...]:
    """Parse `7 bf16, 8 fp32 0`: memory, dtype, dimensions."""
    parts = [word.split() for word in told.split(",") if word.strip()]
    return tuple(TracedTensor(int(memory), dtype, *map(int, dims)) for memory, dtype, *dims in parts)


def op(name: str, given: str, made: str, module: str = "", **rest: Any) -> TracedOperation:
    rest = {"module": module, "call": 0, "name": name, "line": "net.py:1", **rest}
    return TracedOperation(inputs=tensors(given), outputs=tensors(made), **rest)


def cast(given: str, made: str = "6 bf16", by: str = "the model", **rest: Any) -> TracedOperation:
    return op("_to_copy", given, made, cast_by=by, **rest)


def traced(operations: Iterable[TracedOperation], **rest: Any) -> Trace:
    """Return a trace in which memory 0 is the router's weight, 100 and up those of the layers."""
    parameters = {0: "router.weight", **{100 + n: f"layers.{n}.weight" for n in range(12)}}
    words = ("cpu", "x 2 x 4 float32", "a sum")
    return Trace(*words, tuple(operations), {}, parameters, rest.pop("kept", {}), **rest)


def used() -> list[TracedOperation]:
    """Return operations that use every parameter as planned."""
    layers = [op("mm", f"200 bf16, {100 + n} bf16", "201 bf16", f"layers.{n}") for n in range(12)]
    return [op("mm", "210 fp32, 0 fp32", "211 fp32", "router"), *layers]


def hidden_in(
    operations: Iterable[TracedOperation], mode: str = "bf16", **rest: Any
) -> list[tuple[str, str, str]]:
    told = hidden(plan(mode), traced([*used(), *operations], **rest))
    return [(each.kind, each.name, each.what) for each in told]


# --- not deterministic on CUDA ---------------------------------------------------------------------------

WHOLE = [cast("3 int64", "4 fp32", line="moe.py:1"), op("histc", "4 fp32", "5 fp32")]


@pytest.mark.parametrize(
    ("operations", "says"),
    [
        ([op("grid_sampler_2d_backward", "1 fp32, 2 fp32", "3 fp32, 4 fp32", backward=True)], "`gather`"),
        ([op("_adaptive_avg_pool2d_backward", "1 fp32", "3 fp32")], "refused by torch under"),
        ([op("adaptive_max_pool3d_backward", "1 fp32", "3 fp32")], "which torch does not notice"),
        ([op("histc", "1 fp32", "3 fp32")], "whole numbers"),
        ([op("bincount", "1 int64, 2 fp32", "3 fp32")], "`index_add`"),
        ([op("median", "1 fp32", "3 fp32, 4 int64")], "`kthvalue`"),
        ([op("nll_loss2d_forward", "1 fp32, 2 int64", "3 fp32 0, 4 fp32 0")], "flat"),
        ([op("put_", "1 fp32, 2 int64, 3 fp32", "1 fp32")] * 3, "`index_put`"),
        (WHOLE, ""),
        ([op("bincount", "1 int64", "3 int64")], ""),
        ([op("median", "1 fp32", "3 fp32 0")], ""),
        ([op("nll_loss2d_forward", "1 fp32, 2 int64", "3 fp32 3, 4 fp32 0")], ""),
        ([op("cumsum", "1 fp32", "3 fp32"), op("index_add_", "1 fp32", "1 fp32")], ""),
        ([op("_scaled_dot_product_flash_attention_for_cpu_backward", "1 bf16", "3 bf16")], ""),
    ],
)
def test_operations_without_the_same_bits_are_named_for_cuda_alone(
    operations: list[TracedOperation], says: str
) -> None:
    trace, rank, tree = traced([*used(), *operations]), plan(), plan(reduce={"order": "tree"})
    assert not list(nondeterministic(tree, trace, "cpu"))
    assert not list(nondeterministic(rank, trace, "cuda"))
    named = list(nondeterministic(tree, trace, "cuda"))
    assert len(list(nondeterministic(rank, trace, "cuda", digest_every=5))) == len(named)
    assert len(named) == bool(says)
    assert not says or says in f"{named[0].what} {named[0].do}"


# --- promotions ---------------------------------------------------------------------------------------

ADD = op("add", "3 bf16, 4 fp32", "5 fp32")


def rounded(by: str) -> list[tuple[str, str, str]]:
    return [("promotion", "", f"`add` of bf16 and fp32 {by}")]


PROMOTIONS: dict[str, tuple[list[TracedOperation], list[tuple[str, str, str]]]] = {
    "a step as planned": ([], []),
    "where it was widened": (
        [op("mul", "3 bf16, 4 fp32", "5 fp32", "layers.0", line="net.py:7"),
         cast("5 fp32", "6 bf16", module="layers.0", line="net.py:9")],
        [("promotion", "layers.0",
          "`mul` of bf16 and fp32 makes fp32, rounded to bf16 by the model at net.py:9")],
    ),
    "through its results": (
        [ADD, op("exp", "5 fp32", "7 fp32"), op("sum", "7 fp32", "8 fp32"),
         cast("8 fp32", "9 bf16", "autocast")],
        rounded("makes fp32, rounded to bf16 by autocast"),
    ),
    "three times, once told": (
        [ADD, *[cast("5 fp32", f"{n} bf16", "autocast") for n in (6, 7, 8)]],
        rounded("makes fp32, rounded to bf16 by autocast"),
    ),
    "in place": ([op("add_", "3 bf16, 4 fp32", "3 bf16")], rounded("is rounded to bf16 in place")),
    "a write": (
        [ADD, op("copy_", "9 bf16, 5 fp32", "9 bf16", cast_by="the model")],
        rounded("makes fp32, rounded to bf16 by the model"),
    ),
    "written over": (
        [ADD, op("mm", "3 bf16, 3 bf16", "5 bf16"), cast("5 bf16", "6 fp16")], [],
    ),
    "never rounded": ([ADD], []),
    "asked for": ([cast("3 bf16", "5 fp32"), cast("5 fp32")], []),
    "a number": (
        [op("mul", "3 bf16, 4 fp32 0", "5 bf16"), cast("5 bf16", "6 fp32")], [],
    ),
    "a number in where": ([op("where", "2 bool, 3 fp32, 4 bf16 0", "5 fp32"), cast("5 fp32")], []),
    "inside torch": ([ADD, cast("5 fp32", "6 bf16", "torch")], []),
    "backward": ([ADD, op("zero_", "5 fp32", "5 fp32", backward=True)], []),
    "whole": ([op("add", "3 int64, 4 fp32", "5 fp32"), cast("5 fp32")], []),
}  # fmt: skip


@pytest.mark.parametrize("case", PROMOTIONS)
def test_a_value_that_is_widened_and_rounded_is_found(case: str) -> None:
    operations, told = PROMOTIONS[case]
    assert hidden_in(operations) == told


# --- pins and columns ---------------------------------------------------------------------------------


CAST = ("pin cast", "router.weight", "cast from fp32 to bf16 by the model")
NARROW = ("compute", "router.weight", "used in bf16 by `mm`, for fp32 in the plan")
KEPT = "what it returns unrounded, as the plan says, is cast from fp32 to bf16 by autocast"
WIDE = ("compute", "layers.0.weight", "used in fp32 by `add`, for bf16 in the plan")
MULTIPLIED = op("mm", "7 bf16", "8 bf16")
CHOSEN = [op("mm", "0 fp32", "211 fp32"), *(op("mm", f"{100 + n} fp32", "201 fp32") for n in range(12))]
"""Operations of autocast, which computes all in fp32."""
COLUMNS: dict[str, tuple[list[TracedOperation], dict[str, Any], list[tuple[str, str, str]]]] = {
    "a cast of a pinned parameter, and what it computes in": (
        [*used(), cast("0 fp32", "7 bf16"), op("mm", "3 bf16, 7 bf16", "8 bf16")], {}, [CAST, NARROW]),
    "a cast of its copy": ([*used(), op("clone", "0 fp32", "7 fp32"), cast("7 fp32", "8 bf16")], {}, [CAST]),
    "what a pinned module keeps": (
        [*used(), cast("211 fp32", "7 bf16", "autocast")], {"kept": {211: "router"}},
        [("pin cast", "router", KEPT)]),
    "what it keeps, cast after its use": (
        [*used(), op("softmax", "211 fp32", "7 fp32"), cast("7 fp32", "8 bf16")],
        {"kept": {211: "router"}}, []),
    "a parameter that is used wider": (
        [*used(), cast("100 bf16", "7 fp32"), op("add", "7 fp32", "8 fp32")], {}, [WIDE]),
    "autocast chooses between its dtypes": (
        [*CHOSEN, cast("100 fp32", "7 bf16", "autocast"), MULTIPLIED], {"mode": "autocast-bf16"}, []),
    "and a pin does not": (
        [*CHOSEN, cast("0 fp32", "7 bf16", "autocast"), MULTIPLIED], {"mode": "autocast-bf16"},
        [(*CAST[:2], "cast from fp32 to bf16 by autocast"), NARROW]),
    "a parameter that nothing is computed with": (
        used()[:-1], {}, [("unused", "layers.11.weight", "enters no operation of the forward")]),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS)
def test_a_column_that_is_not_as_planned_is_found(case: str) -> None:
    operations, how, told = COLUMNS[case]
    seen = hidden(plan(how.get("mode", "bf16")), traced(operations, kept=how.get("kept", {})))
    assert [(each.kind, each.name, each.what) for each in seen] == told
    if told == [WIDE]:
        assert seen[0].do.endswith("nothing is lost.")


def test_a_refusal_is_the_first_finding_and_nothing_is_called_unused() -> None:
    refused = Refusal("layers.3", "linear", ("bf16", "fp32"), "its operands must have one dtype", "net.py:4")
    (told,) = hidden(plan(), traced([], refused=refused))
    assert told.what == "torch refuses `linear` of bf16 and fp32: its operands must have one dtype"
    assert (told.name, told.line) == ("layers.3", "net.py:4") and "The step ends there" in told.do


# --- folding ------------------------------------------------------------------------------------------


EXTRA = cast("201 bf16", "7 fp32", module="layers.5")
BACK = [op("mm", "1 bf16", "2 bf16", f"layers.{n}", backward=True) for n in range(12)]
ADDED = op("add", "2 bf16, 3 bf16", "4 bf16", "layers.11", backward=True)


@pytest.mark.parametrize(
    ("more", "patterns"),
    [
        pytest.param([], {"router": 1, "layers.*": 12}, id="all the same"),
        pytest.param([EXTRA], {"router": 1, "layers.0-4,6-11": 11, "layers.5": 1}, id="one that differs"),
        pytest.param([*BACK, ADDED], {"router": 1, "layers.*": 12}, id="a gradient that is added elsewhere"),
    ],
)
def test_modules_that_run_the_same_are_one_line(
    more: list[TracedOperation], patterns: dict[str, int]
) -> None:
    operations = [*used(), *more]
    modules = traced_modules(traced(operations))
    assert [(module.pattern, len(module.paths)) for module in modules] == list(patterns.items())
    paths = {path for module in modules for path in module.paths}
    assert paths == {operation.module for operation in operations}


def test_operations_that_follow_each_other_in_one_dtype_are_one_run() -> None:
    operations = [
        op("arange", "", "1 int64", "n"),
        op("_to_copy", "2 bf16", "3 fp32", "n", cast_by="a boundary"),
        *[op(name, "3 fp32", "3 fp32", "n") for name in ("pow", "mean", "mean")],
        op("add", "3 fp32, 1 int64, 4 bf16", "3 fp32", "n"),
        cast("3 fp32", "4 bf16", module="n"),
        op("gt", "1 int64", "5 bool", "n"),
        op("mul_backward", "4 bf16", "5 bf16", "n", backward=True),
    ]
    (module,) = traced_modules(traced(operations))
    assert [(run.dtypes, run.names, run.backward) for run in operation_runs(module)] == [
        ("bf16 -> fp32", ("cast by a boundary",), False),
        ("fp32", ("pow", "mean", "mean"), False),
        ("bf16 fp32 -> fp32", ("add",), False),
        ("fp32 -> bf16", ("cast",), False),
        ("bf16", ("mul",), True),
    ]


# --- the page -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120])
def test_the_text_fits_the_terminal_whatever_the_names(width: int) -> None:
    long = ".".join(["a_very_long_name_of_a_module_indeed"] * 6)
    made = traced([
        op("mm", "1 bf16, 2 fp32", "3 fp32", long, line=f"{'x' * 70}.py:1"),
        op("a_very_long_name_of_an_operation_that_somebody_registered", "1 bf16", "2 bf16", "日本語" * 20),
        op("mm", "1 bf16", "2 bf16", "evil\x1b[31m"),
        cast("3 fp32", "4 bf16", module=long),
    ])  # fmt: skip
    found = hidden(plan(), made)
    text = trace_text(plan(), made, found, color=False, width=width)
    assert "\x1b" not in text and "\x1b[" in trace_text(plan(), made, found, color=True)
    assert width - 8 <= max(map(cell_len, text.splitlines())) <= width


def test_the_tree_says_each_count_once_and_joins_neighbours() -> None:
    parts = [(f"model.layers.{n}{part}", dtype, name) for n in range(4) for part, dtype, name in (
        (".q", "bf16", "mm"), (".k", "bf16", "mm"), (".gate", "fp32", "_softmax"), ("", "bf16", "add"),
    )]  # fmt: skip
    made = traced([op(name, f"1 {dtype}", f"2 {dtype}", module) for module, dtype, name in parts])
    pairs = [pair for n in range(12) for pair in (
        op("mul", "3 bf16, 4 fp32", f"{300 + n} fp32", f"layers.{n}"),
        cast(f"{300 + n} fp32", f"{400 + n} bf16", module=f"layers.{n}"),
    )]  # fmt: skip
    (line,) = hidden_lines(hidden(plan(), traced([*used(), *pairs])))
    assert line[:2] == ("layers.*", 12), "findings that differ in numbers are one line"
    shown = [line.split() for line in trace_text(plan(), made, [], color=False).splitlines()]
    start = next(n for n, line in enumerate(shown) if line[:1] == ["operations"])
    assert shown[start + 1 : start + 4] == [
        ["model.layers.*", "x4", "bf16", "add"],
        ["q,", "k", "bf16", "mm"],
        ["gate", "fp32", "softmax"],
    ]
    assert ["findings", "none"] in shown
