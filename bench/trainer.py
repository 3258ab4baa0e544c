"""Measure the cost of the trainer's loop over the bare engine: data, weights, metrics, display.

    python bench/trainer.py                  # a model of 11M parameters, fp32, one process
    python bench/trainer.py --steps 5 --width 64 --layers 2 --length 64

Both take turns on one engine, a few steps each, so that a machine whose speed drifts drifts for both; what
is printed is the median of the ratios of neighbouring turns. The bare loop feeds one batch over and over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from result import Result, flags

from zerodrift.engine.executor import loss_in
from zerodrift.train.job_file import read_job
from zerodrift.train.loop.launcher import Stop
from zerodrift.train.loop.session import Session, assemble
from zerodrift.train.loop.training import Loop
from zerodrift.train.report.display import Display
from zerodrift.train.report.metrics import Metrics


def job(folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the job of a Llama of the requested size on random tokens."""
    width = arguments.width
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": max(1, width // 64),
        "num_key_value_heads": max(1, width // 64),
        "max_position_embeddings": arguments.length,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "text.txt").write_bytes(bytes(torch.randint(32, 127, (1 << 20,)).tolist()))
    return {
        "model": {"source": str(folder / "config.json"), "activation_checkpointing": False},
        "data": {"train": str(folder / "text.txt"), "block": arguments.length},
        "run": {"folder": str(folder / "run"), "steps": 10_000, "check_precision": False},
        "config": {
            "precision": {"mode": "fp32"},
            "zero_optimization": {"stage": 2},
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    }


def time_engine(session: Session, steps: int) -> float:
    """Return the seconds per step of the engine alone."""
    engine, batch = session.engine, next(session.feed.step(0))
    start = time.perf_counter()
    for _ in range(steps):
        loss = loss_in(engine(input_ids=batch.tokens, labels=batch.labels))
        engine.backward(loss)
        engine.step()
        loss.item()
    return (time.perf_counter() - start) / steps


def time_loop(loop: Loop, first: int, steps: int) -> float:
    """Return the seconds per step of the trainer's loop."""
    start = time.perf_counter()
    for step in range(first, first + steps):
        loop._step(step)
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="per turn")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    title = f"A Llama of width {arguments.width}, {arguments.layers} layers, 4 x {arguments.length}, fp32"
    result = Result.begin(title, arguments, "transformers")
    with tempfile.TemporaryDirectory() as name:
        written, config = read_job(job(Path(name), arguments))
        show = Display()
        session = assemble(written, config, show)
        loop = Loop(session, show, Stop())
        loop._metrics = Metrics(session.outline.folder, written, 0)
        time_engine(session, 2)
        time_loop(loop, 0, 2)
        ratios, alone, step = [], [], 2
        for _ in range(arguments.rounds):
            before = time_engine(session, arguments.steps)
            between = time_loop(loop, step, arguments.steps)
            after = time_engine(session, arguments.steps)
            step += arguments.steps
            ratios.append(2 * between / (before + after))
            alone += [before, after]
        low, middle, high = statistics.quantiles(ratios, n=4)
        columns = {"": "<14", "engine alone, ms/step": ".1f", "loop to engine": ".3f", "quartiles": ""}
        alone_ms = 1000 * statistics.median(alone)
        result.table(columns).row("trainer's loop", alone_ms, middle, f"{low:.3f} to {high:.3f}")
        session.engine.destroy()
    result.save(arguments.save)


if __name__ == "__main__":
    main()
