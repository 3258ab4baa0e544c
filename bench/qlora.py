"""Measure memory and losses of adapters over a quantised base, beside peft with bitsandbytes.

    python bench/qlora.py                          # all, one after the other, each in a process of its own
    python bench/qlora.py --peer-python PYTHON     # the interpreter that has peft and bitsandbytes
    python bench/qlora.py --only "zerodrift nf4"

A small Llama learns the sources of Python's standard library for a while; then LoRA adapters learn on, over
the same base with the same first values and the same batches, in bf16 but for `peft fp32`. `final` is the
mean loss of the last 20 steps, `held out` that of files that were not trained on.

Peaks are those of a larger base, read from the same files: `rest` are the bytes of its parameters, `loaded`
the resident memory that loading took at its peak, and `step` at the end of the first step, both above what a
process had before. Without bitsandbytes, or where it does not run on this CPU, its lines say so. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from convergence import corpus
from result import Result, flags

VARIANTS = (
    *("peft fp32", "peft bf16", "peft + bitsandbytes nf4"),
    *("zerodrift bf16", "zerodrift nf4", "zerodrift int8", "zerodrift fp8", "zerodrift nf4, 2 ranks"),
)
LENGTH, BATCH, LAST = 64, 8, 20
LARGE = "large"


def config_of(width: int, layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=width,
        intermediate_size=round(8 / 3 * width / 128) * 128,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 64),
        vocab_size=256,
        use_cache=False,
    )


def lora(rank: int = 8) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def sample(text: torch.Tensor, seed: int, length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """Write a briefly trained base, adapters for it, and a large base of random values."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    text, _ = corpus()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(options.width, options.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.pretrain):
        tokens = sample(text, 10**7 + step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.bfloat16().save_pretrained(folder / "base")
    get_peft_model(model, lora()).save_pretrained(folder / "adapters")
    large = AutoModelForCausalLM.from_config(config_of(options.large_width, options.large_layers))
    large.bfloat16().save_pretrained(folder / LARGE)


# --- the two sides ----------------------------------------------------------------------------------------


def by_peft(folder: Path, base: str, variant: str) -> tuple[Callable[[torch.Tensor], float], nn.Module, int]:
    """Return a step, the model, and the bytes of its parameters with their scales."""
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    more: dict[str, Any] = {"dtype": torch.float32 if variant == "peft fp32" else torch.bfloat16}
    if "bitsandbytes" in variant:
        from transformers import BitsAndBytesConfig

        four = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        more |= {"quantization_config": four, "device_map": "cpu"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder / base, **more)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if base == LARGE:
        model = get_peft_model(model, lora())
    else:
        model = PeftModel.from_pretrained(model, folder / "adapters", is_trainable=True)
    size = 0
    for parameter in model.parameters():
        size += parameter.nbytes
        state = getattr(parameter, "quant_state", None)
        size += state.absmax.nbytes if state is not None else 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0)

    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, model, size


def by_zerodrift(
    folder: Path, base: str, variant: str
) -> tuple[Callable[[torch.Tensor], float], nn.Module, int]:
    from peft import get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    import zerodrift

    word = variant.split(",")[0].removeprefix("zerodrift ")
    with zerodrift.empty():
        model = AutoModelForCausalLM.from_config(config_from(folder / base))
        model = get_peft_model(model, lora())
    config = {
        "precision": {"mode": "bf16", "frozen": None if word == "bf16" else word},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.0}},
    }
    engine = zerodrift.initialize(model, config=config, weights=folder / base, device="cpu", quiet=True)
    if base != LARGE:
        for name, value in load_file(folder / "adapters" / "adapter_model.safetensors").items():
            parts = name.rpartition(".weight")
            engine.parameter(f"{parts[0]}.default.weight").master = value.float()

    def step(tokens: torch.Tensor) -> float:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step, engine, zerodrift.cost(engine.plan).rest.storage


def config_from(folder: Path) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    config.use_cache = False
    return config


# --- one process ------------------------------------------------------------------------------------------


def resident(line: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{line}:")[2].split()[0])


def measure(folder: Path, base: str, variant: str, steps: int) -> dict[str, Any]:
    make = by_zerodrift if variant.startswith("zerodrift") else by_peft
    import peft  # noqa: F401  (what is imported is no part of a peak)
    import transformers  # noqa: F401

    if make is by_zerodrift:
        import zerodrift.engine.engine
        import zerodrift.weights.load  # noqa: F401
    text, other = corpus()
    torch.manual_seed(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step, model, size = make(folder, base, variant)
    loaded = resident("VmHWM") - before
    if base == LARGE:
        Path("/proc/self/clear_refs").write_text("5")
        step(sample(text, 0, 32, 1))
        return {"rest": size, "loaded": loaded, "step": resident("VmHWM") - before}
    begin = time.perf_counter()
    losses = [step(sample(text, number)) for number in range(steps)]
    seconds = (time.perf_counter() - begin) / max(1, steps)
    with torch.no_grad():
        batches = [sample(other, 10**6 + number) for number in range(10)]
        held = [float(model(input_ids=tokens, labels=tokens).loss) for tokens in batches]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    return {"final": mean(losses[-LAST:]), "held out": mean(held), "s/step": seconds}


def run(python: str, folder: Path, base: str, variant: str, steps: int) -> dict[str, Any] | str:
    """Measure in a process of its own, or on two ranks; return an error as a text."""
    words = [
        python,
        __file__,
        "--one",
        variant,
        "--base",
        base,
        "--folder",
        str(folder),
        "--steps",
        str(steps),
    ]
    ranks = 2 if variant.endswith("2 ranks") else 1
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_PORT": "29571"}
        environment = {**os.environ, "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
        environment |= place if ranks > 1 else {}
        processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment))
    answers = [process.communicate()[0] for process in processes]
    lines = [line for answer in answers for line in answer.splitlines() if line.startswith("{")]
    if any(process.returncode for process in processes) or len(lines) != ranks:
        return "did not run here"
    found = [json.loads(line) for line in lines]
    return {key: max(each[key] for each in found) for key in found[0]}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--only", default=";".join(VARIANTS), help="variants, with semicolons between them")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--large-width", type=int, default=1024)
    parser.add_argument("--large-layers", type=int, default=8)
    parser.add_argument("--pretrain", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--base", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            found = measure(Path(options.folder), options.base, options.one, options.steps)
        print(json.dumps(found), flush=True)
        return
    size = f"width {options.large_width}, {options.large_layers} layers"
    result = Result.begin(
        f"adapters over a quantised base: rank 8, all linear layers, peaks at {size}", options
    )
    columns = {"variant": "<26", "final": ".4f", "held out": ".4f", "s/step": ".2f"}
    columns |= {"rest MB": ".0f", "loaded MB": ".0f", "step MB": ".0f"}
    with tempfile.TemporaryDirectory(prefix="zerodrift-qlora-") as text:
        folder = Path(text)
        prepare(folder, options)
        table = result.table(columns, "")
        for variant in options.only.split(";"):
            python = sys.executable if variant.startswith("zerodrift") else options.peer_python
            learned = run(python, folder, "base", variant, options.steps)
            held = run(python, folder, LARGE, variant, 1)
            if isinstance(learned, str) or isinstance(held, str):
                table.row(variant, "did not run", "here", None, None, None, None)
                continue
            sizes = [held[key] / 1e6 for key in ("rest", "loaded", "step")]
            table.row(variant, *(learned[key] for key in ("final", "held out", "s/step")), *sizes)
    result.save(options.save)


if __name__ == "__main__":
    main()
