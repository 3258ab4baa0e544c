"""A script like accelerate's `complete_nlp_example.py`: accumulation, states, resuming, a saved model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from transformers import get_linear_schedule_with_warmup

sys.path.insert(0, str(Path(__file__).parent))
from nlp_example import loaders, model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    project = ProjectConfiguration(project_dir=str(given.out), automatic_checkpoint_naming=False)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project)
    set_seed(42)
    train, evaluation = loaders(accelerator, given.model, 4)
    net = model(given.model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, len(train))
    net, optimizer, train, evaluation, schedule = accelerator.prepare(
        net, optimizer, train, evaluation, schedule
    )
    accelerator.register_for_checkpointing(schedule)

    def steps(batches: object) -> list[float]:
        net.train()
        losses = []
        for batch in batches:  # type: ignore[attr-defined]
            with accelerator.accumulate(net):
                loss = net(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return losses

    first = steps(train)
    accelerator.save_state(str(given.out / "epoch_0"))
    straight = steps(train)
    accelerator.load_state(str(given.out / "epoch_0"))
    resumed = steps(accelerator.skip_first_batches(train, 2))
    whole = accelerator.get_state_dict(net)
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(net)
    unwrapped.save_pretrained(
        given.out / "model", is_main_process=accelerator.is_main_process, state_dict=whole
    )
    if accelerator.is_main_process:
        told = {"losses": [*first, *straight, *resumed]}
        (given.out / "told.json").write_text(json.dumps(told))
    accelerator.end_training()


if __name__ == "__main__":
    main()
