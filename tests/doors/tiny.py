"""Make the model and data of the examples: two small layers, a tokenizer, and data sets.

python tests/doors/tiny.py FOLDER
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)
PROMPTS = ["hello there", "how are you", "what is this", "tell me more"] * 16
GOOD = ["fine thanks", "very well", "a small test", "no more now"] * 16
BAD = ["zzz", "qqq", "xxx", "www"] * 16


def save_model(folder: Path) -> Any:
    """Save the model and its tokenizer into a folder."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz .,?!:\n"]
    letters = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, **special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    numbers = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**numbers, **heads, **ids))
    model.save_pretrained(folder)
    return model


def main() -> None:
    folder = Path(sys.argv[1])
    model = save_model(folder / "model")
    save_reward_model(folder / "reward", folder / "model")
    with contextlib.suppress(ImportError):  # where a tool has adapters
        from peft import LoraConfig, get_peft_model

        for name, more in {"adapter": {}, "dora": {"use_dora": True}}.items():
            settings = LoraConfig(
                r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more
            )
            get_peft_model(copy.deepcopy(model), settings).save_pretrained(folder / name)

    triples = list(zip(PROMPTS, GOOD, BAD, strict=True))
    write(folder, "text", ({"text": f"{p} {g}"} for p, g, _ in triples))
    write(folder, "chats", ({"messages": chat(p, g)} for p, g, _ in triples))
    write(folder, "pairs", ({"prompt": p, "chosen": g, "rejected": b} for p, g, b in triples))
    write(folder, "whole", ({"chosen": f"{p} {g}", "rejected": f"{p} {b}"} for p, g, b in triples))
    dialogues = ({"messages": chat(p, g), "rejected_response": b} for p, g, b in triples)
    write(folder, "dialogues", dialogues)
    rated = ({"messages": chat(p, c), "label": mark} for p, c, mark in ratings(triples))
    write(folder, "rated", rated)
    turns = ({"system": "", "input": p, "chosen": g, "rejected": b} for p, g, b in triples)
    write(folder, "whole_turns", turns)
    argilla = ({"prompt": p, "chosen": chat(p, g), "rejected": chat(p, b)} for p, g, b in triples)
    write(folder, "argilla", argilla)
    write(folder, "prompts", ({"prompt": p} for p, _, _ in triples))
    marked = ({"prompt": p, "completion": c, "label": mark} for p, c, mark in ratings(triples))
    write(folder, "marked", marked)
    write(folder, "alpaca", ({"instruction": p, "input": "", "output": g} for p, g, _ in triples))
    rated = ({"instruction": p, "input": "", "output": c, "good": m} for p, c, m in ratings(triples))
    write(folder, "alpaca_marked", rated)
    answers = ({"instruction": p, "input": "", "chosen": g, "rejected": b} for p, g, b in triples)
    write(folder, "alpaca_pairs", answers)
    columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    rated_columns = {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "good"}
    known = {
        "alpaca": {"file_name": "alpaca/train.jsonl"},
        "text": {"file_name": "text/train.jsonl", "columns": {"prompt": "text"}},
        "pairs": {"file_name": "alpaca_pairs/train.jsonl", "ranking": True, "columns": columns},
        "marked": {"file_name": "alpaca_marked/train.jsonl", "columns": rated_columns},
    }
    (folder / "dataset_info.json").write_text(json.dumps(known))
    for stage in (2, 3):
        (folder / f"zero{stage}.json").write_text(json.dumps(config(stage)))
        any_optimizer = config(stage) | {"zero_allow_untested_optimizer": True}
        (folder / f"any{stage}.json").write_text(json.dumps(any_optimizer))


def ratings(triples: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, bool]]:
    """Return a prompt, an answer and whether it is the good one, by turns."""
    return [(p, (b, g)[i % 2], bool(i % 2)) for i, (p, g, b) in enumerate(triples)]


def save_reward_model(folder: Path, model: Any) -> None:
    """Save a copy of the model with LLaMA-Factory's value head."""
    shutil.copytree(model, folder)
    torch.manual_seed(1)
    head = {"v_head.summary.weight": torch.randn(1, 32) / 8, "v_head.summary.bias": torch.zeros(1)}
    save_file(head, folder / "value_head.safetensors")


def chat(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def write(folder: Path, name: str, rows: Any) -> None:
    """Write a data set of one file into a folder of its own."""
    (folder / name).mkdir()
    (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(stage: int) -> dict[str, Any]:
    """Return a config in the form of accelerate's documentation."""
    automatic = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    return {
        "zero_optimization": {
            "stage": stage,
            **dict.fromkeys(automatic, "auto"),
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


if __name__ == "__main__":
    main()
