"""A script like accelerate's `nlp_example.py`: whether two texts are paraphrases; metrics over ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    get_linear_schedule_with_warmup,
    set_seed,
)


def loaders(accelerator: Accelerator, path: str, size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    words = ["hello there", "how are you", "what is this", "tell me more"]
    pairs = [(a, b, int(a == b or len(a) == len(b))) for a in words for b in words] * 4

    def collate(rows: list[tuple[str, str, int]]) -> dict[str, torch.Tensor]:
        texts = [f"{first}?{second}" for first, second, _ in rows]
        made = tokenizer(texts, padding="longest", pad_to_multiple_of=8, return_tensors="pt")
        return {**made, "labels": torch.tensor([label for _, _, label in rows])}

    made = {"collate_fn": collate, "batch_size": size}
    return DataLoader(pairs, shuffle=True, drop_last=True, **made), DataLoader(pairs[:16], **made)


def model(path: str) -> Any:
    config = LlamaConfig.from_pretrained(path, num_labels=2, pad_token_id=0)
    return LlamaForSequenceClassification.from_pretrained(path, config=config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mixed_precision", default=None)
    given = parser.parse_args()
    accelerator = Accelerator(mixed_precision=given.mixed_precision)
    set_seed(42)
    train, evaluation = loaders(accelerator, given.model, 4)
    net = model(given.model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, len(train) * 2)
    net, optimizer, train, evaluation, schedule = accelerator.prepare(
        net, optimizer, train, evaluation, schedule
    )
    losses, right = [], []
    for _ in range(2):
        net.train()
        for batch in train:
            batch.to(accelerator.device) if hasattr(batch, "to") else None
            loss = net(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        net.eval()
        found = []
        for batch in evaluation:
            with torch.no_grad():
                outputs = net(**batch)
            predictions = outputs.logits.argmax(-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
            found += (predictions == labels).tolist()
        right.append(sum(found) / len(found))
    if accelerator.is_main_process:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "told.json").write_text(json.dumps({"losses": losses, "right": right}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
