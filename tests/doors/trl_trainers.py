"""TRL's trainers over a tiny model, with a DeepSpeed config, by the name of DeepSpeed; started by
`zerodrift run -- torchrun`, or by torchrun alone on DeepSpeed itself.

    zerodrift run -- torchrun --nproc-per-node=2 tests/doors/trl_trainers.py FOLDER TRAINER/STAGE...

The losses are in FOLDER/told.json. Nothing is downloaded: model, tokenizer and data are those of
`tiny.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, set_seed

import tiny

PROMPTS, GOOD, BAD = (texts[:32] for texts in (tiny.PROMPTS, tiny.GOOD, tiny.BAD))


def saved(folder: Path) -> str:
    """Save the model and its tokenizer, on the first rank to arrive, and return the path."""
    place = folder / "model"
    if not place.exists():
        draft = folder / f"model-{os.getpid()}"
        tiny.save_model(draft)
        with contextlib.suppress(OSError):
            draft.rename(place)
    return str(place)


def lengths(completions: list[str], **_: Any) -> list[float]:
    """Return the lengths of completions as rewards."""
    return [float(len(set(text))) for text in completions]


def trainer(kind: str, model: str, common: dict[str, Any]) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    texts = Dataset.from_dict({"text": [f"{p} {g}" for p, g in zip(PROMPTS, GOOD, strict=True)]})
    pairs = Dataset.from_dict({"prompt": PROMPTS, "chosen": GOOD, "rejected": BAD})
    both = {"processing_class": tokenizer}
    if kind in ("sft", "lora"):
        peft = None
        if kind == "lora":
            from peft import LoraConfig

            peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        given = trl.SFTConfig(**common, max_length=32)
        return trl.SFTTrainer(model, given, train_dataset=texts, peft_config=peft, **both)
    if kind == "dpo":
        return trl.DPOTrainer(model, None, trl.DPOConfig(**common), train_dataset=pairs, **both)
    if kind == "kto":
        said = [g if i % 2 else b for i, (g, b) in enumerate(zip(GOOD, BAD, strict=True))]
        labels = [bool(i % 2) for i in range(len(said))]
        marked = Dataset.from_dict({"prompt": PROMPTS, "completion": said, "label": labels})
        return trl.KTOTrainer(model, None, trl.KTOConfig(**common), train_dataset=marked, **both)
    if kind == "reward":
        whole = {"chosen": [p + g for p, g in zip(PROMPTS, GOOD, strict=True)]}
        whole["rejected"] = [p + b for p, b in zip(PROMPTS, BAD, strict=True)]
        data = Dataset.from_dict(whole)
        return trl.RewardTrainer(model, trl.RewardConfig(**common), train_dataset=data, **both)
    if kind in ("grpo", "rloo"):
        asked = Dataset.from_dict({"prompt": PROMPTS})
        common = {**common, "num_generations": 2, "max_completion_length": 8, "beta": 0.1}
        if kind == "grpo":
            return trl.GRPOTrainer(model, lengths, trl.GRPOConfig(**common), train_dataset=asked, **both)
        return trl.RLOOTrainer(model, lengths, trl.RLOOConfig(**common), train_dataset=asked, **both)
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    chats = [
        [{"role": "user", "content": p}, {"role": "assistant", "content": g}]
        for p, g in zip(PROMPTS, GOOD, strict=True)
    ]
    given = GKDConfig(**common, max_length=48, max_new_tokens=8, lmbda=1.0)
    return GKDTrainer(model, model, given, train_dataset=Dataset.from_dict({"messages": chats}), **both)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    model = saved(folder)
    told = {}
    for case in sys.argv[2:]:
        kind, _, stage = case.partition("/")
        set_seed(0)
        common = {
            "output_dir": str(folder / f"{kind}-{stage}"),
            "deepspeed": tiny.config(int(stage)),
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 2,
            "max_steps": 3,
            "logging_steps": 1,
            "save_steps": 3,
            "learning_rate": 1e-3,
            "gradient_checkpointing": False,
            "report_to": [],
            "disable_tqdm": True,
            "seed": 0,
        }
        made = trainer(kind, model, common)
        made.train()
        made.save_model(str(folder / f"{kind}-{stage}" / "final"))
        if made.args.process_index:
            continue  # only the first rank knows when the files are there
        history = made.state.log_history
        told[case] = {
            "engine": type(made.model_wrapped).__module__,
            "losses": [entry["loss"] for entry in history if "loss" in entry],
            "norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
            "files": sorted(path.name for path in (folder / f"{kind}-{stage}" / "final").iterdir()),
        }
        (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
