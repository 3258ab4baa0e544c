"""Make the models and data that tests of accelerate and TRL download: small, and with random weights.

    python tests/doors/hub_folders.py CHECKOUT

Transformers and datasets take a name for a path where there is such a folder, so tests find them in the
checkout that they are run from. A model's class and the kinds of a data set are those of the original.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import transformers

from tiny import BAD, GOOD, PROMPTS, save_model, write

WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GPT2 = {"vocab_size": 1024, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "sshleifer/tiny-gpt2": ("GPT2LMHeadModel", GPT2),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", GPT2),
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": ("Qwen2MoeForCausalLM", {**WIDE, **EXPERTS}),
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", WIDE),
    "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5": (
        "Qwen2ForSequenceClassification",
        {**WIDE, "num_labels": 1},
    ),
}
"""Name of a model -> its class and its config."""


def main() -> None:
    checkout = Path(sys.argv[1])
    for name, (kind, numbers) in MODELS.items():
        folder = checkout / name
        if name.startswith("trl"):
            save_model(folder)  # for its tokenizer; the model is replaced
        made = getattr(transformers, kind)
        torch.manual_seed(0)
        made(made.config_class(**numbers)).save_pretrained(folder)
    config = transformers.MobileViTConfig(hidden_sizes=[16, 24, 32])
    config.save_pretrained(checkout / "apple/mobilevit-xx-small")
    save_data(checkout / "trl-internal-testing" / "zen")


def save_data(folder: Path) -> None:
    """Save the kinds of TRL's data set that its tests on several ranks need."""
    triples = list(zip(PROMPTS, GOOD, BAD, strict=True))[:17]
    kinds: dict[str, Iterable[dict[str, Any]]] = {
        "standard_language_modeling": ({"text": f"{p} {g}"} for p, g, _ in triples),
        "standard_preference": ({"prompt": p, "chosen": g, "rejected": b} for p, g, b in triples),
        "conversational_implicit_prompt_preference": (
            {"chosen": turns(p, g), "rejected": turns(p, b)} for p, g, b in triples
        ),
        "conversational_prompt_only": ({"prompt": turns(p)} for p, _, _ in triples),
    }
    folder.mkdir(parents=True)
    head = ["---", "configs:"]
    for kind, rows in kinds.items():
        write(folder, kind, rows)
        train = folder / kind / "train.jsonl"
        (folder / kind / "test.jsonl").write_text("".join(train.read_text().splitlines(keepends=True)[:2]))
        files = [f"  - {{split: {split}, path: {kind}/{split}.jsonl}}" for split in ("train", "test")]
        head += [f"- config_name: {kind}", "  data_files:", *files]
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))


def turns(prompt: str, answer: str = "") -> list[dict[str, str]]:
    said = [{"role": "user", "content": prompt}]
    return [*said, {"role": "assistant", "content": answer}] if answer else said


if __name__ == "__main__":
    main()
