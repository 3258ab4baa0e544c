"""Configs, models and worlds at random: known-good ones with keys changed, and everything asked of the plan.

    python -m tests.unit.at_random 100000 [first]

makes so many cases, and prints how many plans there were, how many refusals, the slowest, and every case
that ended with an exception that is not ours, took more than a second, or printed what a terminal would
obey. A case is a number: the same number is the same case.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import random
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import yaml
from rich.cells import cell_len

from tests.unit.models import EMBEDDING, NORM, moe, parameter, tied
from zerodrift import ZerodriftError, cost, describe, make_plan
from zerodrift.config import deepspeed, fields
from zerodrift.config.schema import Config
from zerodrift.dtypes import NARROW, DType
from zerodrift.model.spec import BufferSpec, ModelSpec, OwningModule, ParameterSpec
from zerodrift.pipeline.schedules import timeline
from zerodrift.plan.table import Plan
from zerodrift.policy.arguments import OPTIMIZERS, REQUIRED, SCHEDULES
from zerodrift.report import as_json, rows, terminal
from zerodrift.report import plan_html as page
from zerodrift.report.explanation import explain, explain_row, matching

PLAIN = [dtype for dtype in DType if dtype not in NARROW]
"""Dtypes of a model before a plan."""

SECONDS = 1.0
"""Limit of the processor time of one case."""

ODD_NAMES = (
    *("a.\x1b[31mred\x1b[0m.weight", "[red]a[/red].[bold].weight", "<script>alert(1)</script>.weight"),
    *("layers.0.\u202eweight", "\u5c42.0.\u6ce8\u610f.weight", "\U0001f600." * 60 + "weight", "x" * 5000),
    *("a b c." + "long " * 900 + "weight", "..", "0.0.0.0", "layers.00.mlp.w", "a\nb.weight"),
    *("a\x00b.weight", "a\x9b31mb", "e\u0301" * 40, "half\ud800.weight", "*.?.[!a].weight", "`tick`.weight"),
)

_GOOD = """
{bf16: {enabled: true}, zero_optimization: {stage: 3}}
{fp16: {enabled: true, initial_scale_power: 12}, zero_optimization: {stage: 2}}
{torch_autocast: {enabled: true, dtype: bfloat16}, zero_optimization: {stage: 1}}
{precision: {mode: bf16, rules: [{match: "*norm*", pin: fp32, output: input}]}, \
 zero_optimization: {stage: 3}, gradient_accumulation_steps: 8, train_micro_batch_size_per_gpu: 2}
{bf16: {enabled: true}, optimizer: {type: AdamW, params: {lr: 0.0001, betas: [0.9, 0.95], eps: 0.00000001}}, \
 gradient_clipping: 1.0, scheduler: {type: WarmupDecayLR, params: {total_num_steps: 100}}}
{bf16: {enabled: true}, optimizer: {type: Muon, params: {lr: 0.001, momentum: 0.95}}, \
 zero_optimization: {stage: 2}}
{bf16: {enabled: true}, pipeline: {stages: 2}, gradient_accumulation_steps: 4}
{pipeline: {stages: 2, schedule: zbv}, gradient_accumulation_steps: 8}
{experts: {ranks: 2}, bf16: {enabled: true}, zero_optimization: {stage: 3}}
{precision: {mode: bf16, compute: fp8, rules: [{match: "*", compute: {grad_weight: bf16, pad: true}}]}}
{sharding: {replicate: 2, keep_gathered: step, units: [layers.*]}, zero_optimization: {stage: 3}}
{backend: fsdp2, bf16: {enabled: true}, zero_optimization: {stage: 2}}
{scheduler: {type: WarmupLR, params: {warmup_max_lr: auto, warmup_num_steps: auto}}, \
 optimizer: {type: Adam, params: {lr: auto, betas: auto}}, train_batch_size: auto, \
 train_micro_batch_size_per_gpu: auto, gradient_accumulation_steps: auto, gradient_clipping: auto}
"""
GOOD: tuple[dict[str, Any], ...] = tuple(map(yaml.safe_load, _GOOD.strip().splitlines()))

TABLES = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULES}
PATHS = sorted(
    {
        *(k.path.replace("[]", ".0") for k in fields.every_key(Config) if fields.block_of(k.kind) is None),
        *(key.replace("*", "anything") for key in deepspeed.ENTRIES),
        *(
            f"{block}.params.{name}"
            for block, of in TABLES.items()
            for table in of.values()
            for name in table
        ),
    }
)
NUMBERS = ("optimizer.params", "scheduler.params", "train_", "gradient_", "fp16.")
AUTOS = tuple(path for path in PATHS if path.startswith(NUMBERS))
WORLDS = (1, 1, 2, 2, 3, 4, 4, 5, 7, 8, 8, 12, 16, 64, 97, 1000, 1024, 4099, 65536, 999983, 10**6)
ODD_WORLDS = (0, -1, 2**31, 2**63, 2**200, True, 2.0, "4", None, float("nan"))
MANY = (0, 1, 2, 3, 4, 7, 8, 100, 255, 256, 1000, 65535, 10**6, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63)
FLOATS = (0.0, -0.0, 0.5, 0.999, 1.0, 1.5, 1e-8, 1e-320, 1e30, 1e308, math.inf, -math.inf, math.nan, -1.0)
TEXTS = (
    *("auto", "", " ", "fp32", "bf16", "torch.float16", "fp64", "int8", "true", "1e-4", "1_000", "0x10"),
    *("nan", "AdamW", "Lion", "Muon", "OneCycle", "WarmupLR", "linear", "never", "zbv", "*", "**", "[", "[!"),
    *("*.weight", "layers.*", "layers.[0-9].*", "(a+)+$", "\u2028", "cpu", "../../x", "*" * 200),
    *(*ODD_NAMES[:8], "\ud800", "\x00"),
)


@dataclass(frozen=True)
class Case:
    """The input of one plan."""

    written: Any
    model: ModelSpec
    world: Any
    auto: dict[str, Any]
    overrides: list[str]
    micro_batches: Any


def case(number: int) -> Case:
    """Return the case of a number."""
    draw = random.Random(number)
    written: Any = copy.deepcopy(draw.choice(GOOD))
    for _ in range(draw.choice((0, 0, 1, 1, 1, 1, 2, 2, 4))):
        _mutate(written, draw)
    if draw.random() < 0.9:
        _complete(written, draw)
    auto = {draw.choice(AUTOS): _value(draw) for _ in range(draw.choice((0, 0, 0, 0, 1, 2)))}
    if draw.random() < 0.5:
        auto = {path: draw.choice((1, 2, 0.01, [0.9, 0.99])) for path in _autos(written)} | auto
    overrides = [
        f"{draw.choice(PATHS)}={draw.choice((_text_of(_value(draw)), draw.choice(TEXTS)))}"
        for _ in range(draw.choice((0, 0, 0, 0, 1, 2)))
    ]
    world = draw.choice(ODD_WORLDS) if draw.random() < 0.03 else draw.choice(WORLDS)
    micro = draw.choice(MANY) if draw.random() < 0.2 else None
    return Case(written, model(draw), world, auto, overrides, micro)


def _complete(tree: Any, draw: random.Random) -> None:
    """Add the required keys of blocks, so that plans fail for other reasons too."""
    for block, kinds in TABLES.items():
        if isinstance(tree.get(block), dict) and "type" not in tree[block]:
            tree[block]["type"] = draw.choice(list(kinds))
            params = tree[block].setdefault("params", {})
            for name in REQUIRED.get(tree[block]["type"], ()) if isinstance(params, dict) else ():
                params.setdefault(name, 8)
    for block, key in (("pipeline", "stages"), ("experts", "ranks")):
        if isinstance(tree.get(block), dict):
            tree[block].setdefault(key, draw.choice((1, 2)))
    rules = tree["precision"].get("rules") if isinstance(tree.get("precision"), dict) else None
    for rule in rules if isinstance(rules, list) else ():
        if isinstance(rule, dict) and not {"match", "class"} & rule.keys():
            rule["match"] = "*"


def _autos(tree: Any, path: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [path] if isinstance(tree, str) and tree == "auto" else []
    return [found for key, value in tree.items() for found in _autos(value, f"{path}.{key}".strip("."))]


def _text_of(value: Any) -> str:
    try:
        return json.dumps(value, default=str)
    except ValueError:
        return "[]"


def _mutate(tree: dict[str, Any], draw: random.Random) -> None:
    path = draw.choice(PATHS).split(".")
    kind = draw.random()
    if kind < 0.1 and tree:
        tree.pop(draw.choice(list(tree)))
        return
    if kind < 0.2:
        path[-1] = draw.choice((path[-1][:-1], path[-1] + "s", path[-1].upper(), *TEXTS))
    place: Any = tree
    for step in path[:-1]:
        if isinstance(place, list):
            if not place:
                return
            place = place[0]
        elif isinstance(place, dict):
            following = path[path.index(step) + 1]
            place = place.setdefault(step, [{}] if following == "0" else {})
    if isinstance(place, dict):
        place[path[-1]] = _fitting(".".join(path), draw) if draw.random() < 0.75 else _value(draw)


def _fitting(path: str, draw: random.Random) -> Any:
    """Draw a value that the key may well admit."""
    kind = fields.kind_at([int(part) if part == "0" else part for part in path.split(".")], Config)
    words = fields.choices(kind) if kind is not None else []
    entry = deepspeed.find(path)
    if entry is not None and entry.fate == "refused":
        return draw.choice((None, "auto", *entry.harmless))
    admitted = fields.admits(kind) if kind is not None and not fields.is_free(kind) else ""
    if words and draw.random() < 0.8:
        return draw.choice(words)
    if "true" in admitted:
        return draw.random() < 0.5
    if "fp32" in admitted:
        return draw.choice(("fp32", "bf16", "fp16"))
    if "strings" in admitted:
        patterns = ("*", "*.weight", "layers.*", "*mlp*", *ODD_NAMES)
        return [draw.choice(patterns) for _ in range(draw.randint(0, 3))]
    if "number" in admitted or admitted[:1].isdigit():
        return draw.choice((1, 1, 1, 2, 2, 3, 4, 8, 0, 0.5, draw.choice(MANY)))
    return draw.choice((0, 1, 2, 10, 0.1, 0.9, 1e-3, True, False, [0.9, 0.99], "auto"))


def _value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(9 if depth < 4 else 6)
    odd = (10**400, {1, 2}, b"bytes", (1, 2), object, 1j, range(3))
    whole = (*MANY, *MANY, *(-number for number in MANY))
    if kind < 6:
        return draw.choice(((None, True, False), whole, FLOATS, TEXTS, TEXTS, odd)[kind])
    if kind == 6:
        keys = [draw.choice((*TEXTS, 1, None, True)) for _ in range(draw.randrange(4))]
        return {key: _value(draw, depth + 1) for key in keys}
    return [_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 2, 2, 3, 4)))]


def model(draw: random.Random) -> ModelSpec:
    """Draw a model: mixtures of experts, ties, scalars, nothing, many layers, odd names."""
    kind = draw.randrange(7)
    if kind == 0:
        return moe(draw.choice((1, 2, 5)), draw.choice((1, 2, 4)), tie=draw.random() < 0.5)
    if kind == 1:
        stacks = [parameter(f"model.layers.{i}.mlp.experts.up", (n, 8, 16)) for i, n in enumerate((1, 4, 6))]
        return ModelSpec("stacked", (parameter("model.embed.weight", (32, 8), EMBEDDING), *stacks))
    if kind == 2:
        both = tied(("embed.weight", "head.weight"), (16, 8), (EMBEDDING, NORM))
        inside = tied(("layers.0.mlp.w", "layers.2.mlp.w"), (8, 8), (NORM, NORM))
        return ModelSpec("tied", (both, *(parameter(f"layers.{i}.mlp.v", (8,)) for i in range(3)), inside))
    if kind == 3:
        shapes = ((), (0,), (1,), (3, 0, 2), (257,), (2, 2, 2, 2))[: draw.choice((0, 6, 6))]
        return ModelSpec("shapes", tuple(parameter(f"p{n}.0.a.w", s) for n, s in enumerate(shapes)))
    if kind == 4:
        count, shape = draw.choice(((300, (16, 16)), (8, (2**20, 2**11))))
        return ModelSpec("deep", tuple(parameter(f"layers.{i}.mlp.weight", shape) for i in range(count)))
    made = []
    for name in draw.sample(ODD_NAMES, draw.randint(1, 8)):
        klass = draw.choice((NORM, "", "evil.\x1b[5m" + "K" * 400, "[blink]Linear[/blink]"))
        dtype = draw.choice(PLAIN)
        owner = (OwningModule(name.rpartition(".")[0], klass),)
        shape = tuple(draw.choice((0, 1, 3, 256, 300)) for _ in range(draw.randrange(4)))
        made.append(ParameterSpec((name,), shape, dtype, owner, dtype.is_floating and draw.random() < 0.8))
    buffers = (BufferSpec(draw.choice(ODD_NAMES), (4,), draw.choice(PLAIN)),)
    return replace(ModelSpec("odd [red]names\x9b" + "m" * 3000, tuple(made)), buffers=buffers)


def run(one: Case, reports: bool = True) -> str:
    """Plan a case, price it, and with `reports` write all of them; return `planned` or the class of our
    own error. Other errors are raised."""
    try:
        made = make_plan(one.written, describe(one.model), one.world, auto=one.auto, overrides=one.overrides)
        bill = cost(made, one.micro_batches)
        assert bill.peak.total >= bill.rest.total >= 0 and made.digest
        if reports:
            write_reports(made)
    except ZerodriftError as error:
        check(str(error), 0)
        return type(error).__name__
    return "planned"


def write_reports(made: Plan) -> None:
    """Write every report of a plan."""
    bill, table, order = cost(made), rows.group_rows(made), timeline(made)
    for color in (False, True):
        check(terminal.plan_text(made, bill, table, order, color=color), 100 if not color else 0, color)
    check(page.plan_page(made, bill, table, order), 0)
    assert Plan.from_json(json.loads(as_json.plan_json(made, bill, order))) == made
    smallest = min(range(len(made.rows)), key=lambda index: made.rows[index].numel)
    if made.rows[smallest].numel < 10**6:  # a million ranks own half a million slices of more
        row = explain_row(made, smallest)
        check(terminal.explanation_text(row, made.digest, color=False), 100)
        json.loads(as_json.explanation_json(row, made))
    chosen = matching(made, "*", "--rows")
    check(terminal.rows_text(made, rows.list_rows(made, chosen[:50]), color=False), 100)
    try:
        explain(made, "no such name")
    except ZerodriftError as error:
        check(str(error), 0)


def check(text: str, width: int, color: bool = False) -> None:
    """Check that a text is printable, has no control characters and keeps its width."""
    text.encode()
    kept = text
    if color:
        kept = "".join(part.partition("m")[2] if n else part for n, part in enumerate(text.split("\x1b[")))
    bad = {char for char in kept if not char.isprintable() and char not in "\n\u00a0"}
    assert not bad, f"control characters: {sorted(map(ascii, bad))}"
    lines = kept.split("\n")
    assert max(map(len, lines)) <= 200_000
    if width:
        wide = [line for line in lines if cell_len(line) > width]
        assert not wide, f"{cell_len(wide[0])} cells: {wide[0]!r}"


def main(count: int, first: int = 0) -> int:
    """Run many cases and return the number of failures."""
    ends: Counter[str] = Counter()
    slowest = (0.0, first)
    failed: dict[str, list[int]] = {}
    importlib.import_module("torch.distributed.pipelining")  # seconds, once in a process
    signal.signal(signal.SIGVTALRM, signal.default_int_handler)  # ends a case that does not end
    for number in range(first, first + count):
        one = case(number)
        before = time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, 5 * SECONDS)
        try:
            ends[run(one, reports=number % 16 < 2)] += 1
        except (Exception, KeyboardInterrupt):
            failed.setdefault(traceback.format_exc(limit=-4)[-1500:], []).append(number)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        took = time.process_time() - before
        slowest = max(slowest, (took, number))
        if took > SECONDS:
            failed.setdefault(f"took more than {SECONDS} s", []).append(number)
    print(f"{count:,} cases: {dict(ends.most_common())}; slowest: {slowest[0]:.3f} s (case {slowest[1]})")
    for text, numbers in failed.items():
        print(f"--- {len(numbers)} cases, first {numbers[:5]}\n{text}")
    return sum(map(len, failed.values()))


if __name__ == "__main__":
    sys.exit(1 if main(*map(int, sys.argv[1:])) else 0)
