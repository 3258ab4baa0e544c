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
from dataclasses import replace
from itertools import pairwise
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
from zerodrift.report.explanation import explain_row

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

KINDS = {key.path.replace("[]", ".0"): key.kind for key in fields.every_key(Config)}
PATHS = sorted(
    {path for path, kind in KINDS.items() if fields.block_of(kind) is None}
    | {key.replace("*", "anything") for key in deepspeed.ENTRIES}
    | {f"optimizer.params.{name}" for table in OPTIMIZERS.values() for name in table}
    | {f"scheduler.params.{name}" for table in SCHEDULES.values() for name in table}
)
WORLDS = (1, 1, 2, 2, 3, 4, 4, 7, 8, 8, 12, 16, 64, 97, 1024, 4099, 65536, 999983, 10**6)
NUMBERS = (0, 1, 2, 3, 4, 8, 255, 10**6, 2**31, 2**63, 10**400, -1, 0.5, 1e-8, 1e-320, 1e308, -math.inf)
TEXTS = (
    *("auto", "", "fp32", "bf16", "torch.float16", "true", "1e-4", "nan", "AdamW", "Lion", "OneCycle", "zbv"),
    *("*", "[!", "*.weight", "layers.*", "(a+)+$", "\u2028", "cpu", "../../x", "*" * 200, *ODD_NAMES, "\x00"),
)
SINGLE = (*NUMBERS, *TEXTS, math.nan, None, True, False, {1, 2}, b"bytes", (1, 2), object, 1j)


def case(number: int) -> dict[str, Any]:
    """Return the arguments of `make_plan` that a number stands for."""
    draw = random.Random(number)
    written: Any = copy.deepcopy(draw.choice(GOOD))
    for _ in range(draw.choice((0, 0, 1, 1, 1, 1, 2, 2, 4))):
        _mutate(written, draw)
    if draw.random() < 0.9:
        _complete(written, draw)
    known = {path: draw.choice((1, 2, 0.01, [0.9, 0.99])) for path in _autos(written)}
    return {
        "config": written,
        "model": describe(model(draw)),
        "world_size": draw.choice(SINGLE) if draw.random() < 0.03 else draw.choice(WORLDS),
        "auto": known if draw.random() < 0.9 else {draw.choice(PATHS): _value(draw)},
        "overrides": [f"{draw.choice(PATHS)}={draw.choice(TEXTS)}"] * draw.choice((0, 0, 0, 1)),
    }


def _complete(tree: Any, draw: random.Random) -> None:
    """Add the required keys of blocks, so that plans fail for other reasons too."""
    for block, kinds in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULES)):
        if isinstance(tree.get(block), dict):
            kind = tree[block].setdefault("type", draw.choice(list(kinds)))
            params = tree[block].setdefault("params", {})
            if isinstance(params, dict) and isinstance(kind, str):
                params |= {name: 8 for name in REQUIRED.get(kind, ()) if name not in params}
    for block, key in (("pipeline", "stages"), ("experts", "ranks")):
        if isinstance(tree.get(block), dict):
            tree[block].setdefault(key, draw.choice((1, 2)))


def _autos(tree: Any, path: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [path] if isinstance(tree, str) and tree == "auto" else []
    return [found for key, value in tree.items() for found in _autos(value, f"{path}.{key}".strip("."))]


def _mutate(tree: dict[str, Any], draw: random.Random) -> None:
    path = draw.choice(PATHS).split(".")
    kind = draw.random()
    if kind < 0.1 and tree:
        tree.pop(draw.choice(list(tree)))
        return
    if kind < 0.2:
        path[-1] = draw.choice((path[-1][:-1], path[-1].upper(), *TEXTS))
    place: Any = tree
    for step, following in pairwise(path):
        if isinstance(place, dict):
            place = place.setdefault(step, [{}] if following == "0" else {})
        elif isinstance(place, list) and place:
            place = place[0]
    if isinstance(place, dict):
        place[path[-1]] = _fitting(path, draw) if draw.random() < 0.75 else _value(draw)


def _fitting(path: list[str], draw: random.Random) -> Any:
    """Draw a value that the key may well admit."""
    kind = KINDS.get(".".join(path))
    words = fields.choices(kind) if kind is not None else []
    entry = deepspeed.find(".".join(path))
    if entry is not None and entry.fate == "refused":
        return draw.choice((None, "auto", *entry.harmless))
    if words and draw.random() < 0.8:
        return draw.choice(words)
    if kind is not None and not fields.is_free(kind) and "strings" in fields.admits(kind):
        return [draw.choice(("*", "*.weight", "layers.*", "*mlp*", *ODD_NAMES))]
    return draw.choice((0, 1, 2, 8, 0.1, 0.9, 1e-3, True, False, [0.9, 0.99], "auto", "fp32", "bf16"))


def _value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(4 if depth < 4 else 2)
    if kind < 2:
        return draw.choice(SINGLE)
    if kind == 2:
        keys = [draw.choice((*TEXTS, 1, None, True)) for _ in range(draw.randrange(4))]
        return {key: _value(draw, depth + 1) for key in keys}
    return [_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 2, 2, 3)))]


def model(draw: random.Random) -> ModelSpec:
    """Draw a model: a mixture of experts, ties, many layers, odd shapes or odd names."""
    kind = draw.randrange(5)
    if kind == 0:
        return moe(draw.choice((1, 2, 5)), draw.choice((1, 2, 4)), tie=draw.random() < 0.5)
    if kind == 1:
        stacks = [parameter(f"model.layers.{i}.mlp.experts.up", (n, 8, 16)) for i, n in enumerate((1, 4, 6))]
        both = tied(("embed.weight", "layers.0.head.weight"), (16, 8), (EMBEDDING, NORM))
        return ModelSpec("stacked", (both, *stacks[draw.randrange(3) :]))
    if kind == 2:
        count, shape = draw.choice(((0, ()), (300, (16, 16)), (8, (2**20, 2**11))))
        return ModelSpec("deep", tuple(parameter(f"layers.{i}.mlp.weight", shape) for i in range(count)))
    dtypes = [dtype for dtype in DType if dtype not in NARROW]
    made = []
    for name in draw.sample(ODD_NAMES, draw.randint(1, 8)):
        owner = (OwningModule(name.rpartition(".")[0], draw.choice((NORM, "", "\x1b[5m" + "K" * 400))),)
        shape = tuple(draw.choice((0, 1, 3, 256, 300)) for _ in range(draw.randrange(4)))
        dtype = draw.choice(dtypes)
        made.append(ParameterSpec((name,), shape, dtype, owner, dtype.is_floating and draw.random() < 0.8))
    buffers = (BufferSpec(draw.choice(ODD_NAMES), (4,), draw.choice(dtypes)),)
    return replace(ModelSpec("odd [red]names\x9b" + "m" * 3000, tuple(made)), buffers=buffers)


def run(arguments: dict[str, Any], reports: bool = True) -> str:
    """Plan a case, price it, and with `reports` write all of them; return `planned` or the class of our
    own error. Other errors are raised."""
    try:
        made = make_plan(**arguments)
    except ZerodriftError as error:
        check(str(error), 0)
        return type(error).__name__
    bill = cost(made)
    assert bill.peak.total >= bill.rest.total >= 0 and made.digest
    if reports:
        table, order = rows.group_rows(made), timeline(made)
        check(terminal.plan_text(made, bill, table, order, color=False), 100)
        check(page.plan_page(made, bill, table, order), 0)
        assert Plan.from_json(json.loads(as_json.plan_json(made, bill, order))) == made
        smallest = min(range(len(made.rows)), key=lambda index: made.rows[index].numel)
        if made.rows[smallest].numel < 10**6:  # a million ranks own half a million slices of more
            check(terminal.explanation_text(explain_row(made, smallest), made.digest, color=False), 100)
    return "planned"


def check(text: str, width: int) -> None:
    """Check that a text is printable, has no control characters and keeps its width."""
    text.encode()
    bad = {char for char in text if not char.isprintable() and char not in "\n\u00a0"}
    assert not bad, f"control characters: {sorted(map(ascii, bad))}"
    assert not width or max(map(cell_len, text.split("\n"))) <= width


def main(count: int, first: int = 0) -> int:
    """Run many cases and return the number of failures."""
    ends: Counter[str] = Counter()
    slowest = (0.0, first)
    failed: dict[str, list[int]] = {}
    importlib.import_module("torch.distributed.pipelining")  # seconds, once in a process
    signal.signal(signal.SIGVTALRM, signal.default_int_handler)  # ends a case that does not end
    for number in range(first, first + count):
        arguments = case(number)
        before = time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, 5 * SECONDS)
        try:
            ends[run(arguments, reports=number % 16 < 2)] += 1
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
