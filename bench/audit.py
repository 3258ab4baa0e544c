"""Compare an audit's estimates with replays, and its recommended pins with rules of thumb.

    python bench/audit.py                               # every architecture, some 10M parameters
    python bench/audit.py --size 100m --models llama --trained 0

Each model is audited in mode bf16 with random weights, and after `--trained` steps of plain AdamW in fp32 on
the sources of Python's standard library, pairs of bytes as tokens. Two things are printed:

- `estimate`: Spearman's rank correlation between what three passes estimate of a cell and what a replay of
  that cell alone measures, over all cells, or `--cells` of them, taken evenly from the order of the
  estimates; how many seconds the passes took, beside those of one replay.
- a table of pins: the share of the squared drift that pinning everything removes, that each set of pins
  removes, and what it costs in bytes at rest, at peak, on the wire, and of weights as a forward reads them.
"""

from __future__ import annotations

import argparse
import functools
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from result import Result, flags

from zerodrift.api import make_plan
from zerodrift.errors import ZerodriftError
from zerodrift.inspect.audit.advice import Candidate, PinSearch
from zerodrift.inspect.audit.entry import REPLAYED, audit
from zerodrift.inspect.audit.estimates import AuditSetup, run_three_passes
from zerodrift.inspect.audit.results import Point
from zerodrift.inspect.audit.runs import Subject, drift
from zerodrift.inspect.audit.variants import for_micro_batches, isolated_policy, without_update
from zerodrift.model.empty_model import empty
from zerodrift.plan.table import Plan
from zerodrift.policy.decisions import Mode

SIZES = {
    "tiny": {"hidden": 64, "layers": 2, "inner": 192, "vocabulary": 512},
    "10m": {"hidden": 256, "layers": 6, "inner": 768, "vocabulary": 8192},
    "100m": {"hidden": 768, "layers": 10, "inner": 2048, "vocabulary": 16384},
    "500m": {"hidden": 1536, "layers": 14, "inner": 4096, "vocabulary": 32768},
}
EXPERTS = 8

Made = nn.Module | Callable[[], nn.Module]


def transformer(name: str, size: str) -> nn.Module:
    """Build a model of `transformers` with random weights."""
    import transformers as t

    s = SIZES[size]
    heads = s["hidden"] // 32
    shared: dict[str, Any] = {
        "vocab_size": s["vocabulary"],
        "hidden_size": s["hidden"],
        "intermediate_size": s["inner"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    inner = s["inner"] // 4
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**shared))
    if name == "gpt-oss":
        moe = {**shared, "intermediate_size": inner, "head_dim": 32, "sliding_window": 32}
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        config = t.GptOssConfig(**moe, num_local_experts=EXPERTS, num_experts_per_tok=2, rope_parameters=rope)
        return t.GptOssForCausalLM(config)
    if name == "qwen3-moe":
        config = t.Qwen3MoeConfig(
            **shared, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=inner,
            norm_topk_prob=True,
        )  # fmt: skip
        return t.Qwen3MoeForCausalLM(config)
    config = t.DeepseekV3Config(
        **shared, moe_intermediate_size=inner, n_shared_experts=1, n_routed_experts=EXPERTS,
        num_experts_per_tok=2, n_group=2, topk_group=1, q_lora_rank=64, kv_lora_rank=64,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, first_k_dense_replace=1,
    )  # fmt: skip
    return t.DeepseekV3ForCausalLM(config)


MODELS = ("llama", "gpt-oss", "qwen3-moe", "deepseek-v3")


class Text:
    """Pairs of bytes of Python's standard library, folded into a vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))[:120]
        raw = b"".join(path.read_bytes() for path in files)
        pairs = torch.frombuffer(bytearray(raw[: len(raw) // 2 * 2]), dtype=torch.uint8).view(-1, 2).long()
        self.tokens = (pairs[:, 0] * 181 + pairs[:, 1] * 7919) % vocabulary

    def batch(self, seed: int, rows: int, length: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, len(self.tokens) - length, (rows,), generator=generator)
        ids = torch.stack([self.tokens[start : start + length] for start in starts.tolist()])
        return {"input_ids": ids, "labels": ids}


def train(model: nn.Module, text: Text, steps: int) -> float:
    """Train in fp32 and return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    loss = torch.zeros(())
    for step in range(steps):
        loss = model(**text.batch(step, 8, 64)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


# --- estimates -----------------------------------------------------------------------------------------


def ranks(values: Sequence[float]) -> torch.Tensor:
    order = torch.tensor(values, dtype=torch.float64).argsort()
    placed = torch.empty(len(values), dtype=torch.float64)
    placed[order] = torch.arange(len(values), dtype=torch.float64)
    return placed


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    return float(torch.corrcoef(torch.stack([ranks(one), ranks(other)]))[0, 1])


@dataclass(frozen=True)
class Agreement:
    cells: int
    spearman: float
    found: int
    """How many of the ten cells with the largest replay are among the ten with the largest estimate."""
    flips: int
    """Router choices that differ under the plan."""
    seconds: float
    replay: float
    """Seconds of one replay."""


def agreement(bench: AuditSetup, most: int) -> Agreement:
    passes, plan = run_three_passes(bench)
    cells = [estimate for estimate in passes.estimates if estimate.square > 0]
    if len(cells) > most:
        cells = [cells[number * len(cells) // most] for number in range(most)]
    estimated, measured = [], []
    began = time.perf_counter()
    for estimate in cells:
        for output in (None, "input"):
            try:
                alone = bench.signals(
                    isolated_policy(plan, estimate.choice, output),  # type: ignore[arg-type]
                    passes.narrowed,
                )
            except ZerodriftError:
                continue
            estimated.append(estimate.square)
            measured.append(drift(alone, passes.reference).square)
            break
    replay = (time.perf_counter() - began) / max(1, len(measured))
    first = set(sorted(range(len(measured)), key=lambda at: -measured[at])[:10])
    guessed = set(sorted(range(len(estimated)), key=lambda at: -estimated[at])[:10])
    return Agreement(
        len(measured), spearman(estimated, measured), len(first & guessed), passes.total.flips,
        passes.seconds, replay,
    )  # fmt: skip


# --- pins ------------------------------------------------------------------------------------------------


def _router(name: str) -> bool:
    return ".router." in name or ".mlp.gate." in name


RULES: dict[str, Callable[[str], bool]] = {
    "head": lambda name: name.startswith("lm_head"),
    "router and head": lambda name: name.startswith("lm_head") or _router(name),
    "norms": lambda name: "norm" in name,
    "norms, router, head": lambda name: "norm" in name or name.startswith("lm_head") or _router(name),
}


def points(bench: AuditSetup, plan: Plan, model: Made, budget: float, confirm: int) -> dict[str, Point]:
    """Return every set of pins to compare, by its name."""
    began = time.perf_counter()

    def told(what: str, done: int, count: int) -> None:
        print(f"{time.perf_counter() - began:6.0f} s  {what} {done}/{count}", file=sys.stderr, flush=True)

    found = audit(plan, model, list(bench.batches), budget=budget, confirm=confirm, told=told)
    advice = found.recommendation
    if advice is None:
        raise SystemExit("nothing is narrow in this plan")
    passes, ran = run_three_passes(bench)
    whole = for_micro_batches(plan.policy, len(bench.batches), plan.mesh.data)
    search = PinSearch(bench, ran, whole, passes.reference, budget, "rest", told)
    kept = {"nothing": advice.points[0]}
    for rule, chosen in RULES.items():
        names = tuple(row.name for row in ran.rows if chosen(row.name))
        for output in (None, "input"):
            candidate = Candidate(rule, names, 1, 0.0, output)  # type: ignore[arg-type]
            point = search.point(Mode.BF16, [candidate]) if names else None
            if point is not None:
                kept[rule] = point
                break
    taken = advice.points[advice.taken]
    kept[f"audit: {taken.mode}, {len(taken.pins)} pins"] = taken
    kept["everything"] = advice.widest
    return kept


def show(result: Result, title: str, kept: dict[str, Point]) -> None:
    first, last = kept["nothing"], kept["everything"]
    kinds = ("rest", "peak", "wire", "compute")
    columns = {"pins": "<30", "removed": ".1%", "flips": "", **dict.fromkeys(kinds, "+.2%")}
    table = result.table(columns, title)
    gap = first.drift.square - last.drift.square
    for name, point in kept.items():
        removed = (first.drift.square - point.drift.square) / gap if gap > 0 else 0.0
        before, after = ([getattr(each.bytes, kind) for kind in kinds] for each in (first, point))
        more = (b / a - 1 if a else None for a, b in zip(before, after, strict=True))
        table.row(name, removed, point.drift.flips, *more)


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--size", default="10m", choices=SIZES)
    parser.add_argument("--trained", type=int, nargs="+", default=[0, 150], metavar="STEPS")
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--budget", type=float, default=0.01)
    parser.add_argument("--confirm", type=int, default=REPLAYED, help="cells that the audit replays")
    parser.add_argument(
        "--batches", type=int, nargs=3, default=(4, 4, 64), metavar=("COUNT", "ROWS", "LENGTH")
    )
    args = parser.parse_args()
    text = Text(SIZES[args.size]["vocabulary"])
    count, rows, length = args.batches
    title = f"Audits, bf16, {count} micro-batches of {rows} x {length}, one rank, budget {args.budget:.0%}"
    result = Result.begin(title, args, "transformers")
    batches = [text.batch(10_000 + number, rows, length) for number in range(count)]
    for name in args.models:
        if 0 in args.trained:
            one(name, functools.partial(seeded, name, args.size), "random weights", batches, args, result)
        model, done = None, 0
        for steps in sorted(filter(None, args.trained)):
            model = model or seeded(name, args.size)
            loss = train(model, text, steps - done)
            done = steps
            one(name, model, f"after {steps} steps, loss {loss:.2f}", batches, args, result)
    result.save(args.save)


def seeded(name: str, size: str) -> nn.Module:
    torch.manual_seed(0)
    return transformer(name, size)


def one(
    name: str, model: Made, weights: str, batches: list[Any], args: argparse.Namespace, result: Result
) -> None:
    """Audit one model with some weights. A function builds it without holding its values."""
    config = {"precision": {"mode": "bf16"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with empty():
        shape = model if isinstance(model, nn.Module) else model()
    plan = make_plan(config, shape)
    count = sum(parameter.numel() for parameter in shape.parameters())
    whole = for_micro_batches(plan.policy, len(batches), plan.mesh.data)
    bench = AuditSetup(Subject.of(model, None), without_update(whole), plan.mesh, batches)
    title = f"{name}, {count / 1e6:.1f}M parameters, {weights}"
    if args.cells:
        seen = agreement(bench, args.cells)
        columns = {"": "", "cells": "", "Spearman": ".2f", "of the first ten": "", "flips": ""}
        table = result.table({**columns, "3 passes, s": ".1f", "a replay, s": ".1f"}, title)
        counts = (seen.cells, seen.spearman, seen.found, seen.flips)
        table.row("estimate", *counts, seen.seconds, seen.replay)
    began = time.perf_counter()
    kept = points(bench, plan, model, args.budget, args.confirm)
    show(result, title, kept)
    print(
        "pins of the audit:", ", ".join(pattern for pattern, _, _ in list(kept.values())[-2].pins) or "none"
    )
    print(f"audit and rules in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
