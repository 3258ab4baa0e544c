"""A script like transformers' `run_clm.py`: text in blocks, `HfArgumentParser`, `Trainer`, evaluation."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class DataArguments:
    model_name_or_path: str
    train_file: str
    block_size: int = 16


def main() -> None:
    given, training = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(given.model_name_or_path)
    raw = load_dataset("json", data_files=given.train_file, split="train")

    def blocks(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = list(chain.from_iterable(tokenizer(rows["text"])["input_ids"]))
        size = given.block_size
        cut = [ids[at : at + size] for at in range(0, len(ids) // size * size, size)]
        return {"input_ids": cut, "labels": [list(block) for block in cut]}

    data = raw.map(blocks, batched=True, remove_columns=raw.column_names)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data,
        eval_dataset=data.select(range(16)),
        data_collator=default_data_collator,
    )
    trainer.train()
    trainer.save_model()
    found = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        told = {"losses": [*losses, found], "perplexity": math.exp(found)}
        (Path(training.output_dir) / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
