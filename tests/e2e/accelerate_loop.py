"""A user's loop over `accelerate` with a DeepSpeed plugin, on zerodrift, under torchrun.

    torchrun --nproc-per-node=2 tests/e2e/accelerate_loop.py FOLDER

Trains, clips, saves the state, goes on, loads it and goes on again; the results are in FOLDER/told-RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import zerodrift.deepspeed

zerodrift.deepspeed.activate()

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 (which the first step imports: once, for both ranks)
import transformers.integrations.deepspeed  # noqa: E402, F401 (so does accelerate)
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, set_seed  # noqa: E402

STEPS = 2
"""Micro-batches per step."""


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=made)
        return x, x.sum().view(1)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def epoch(accelerator: Any, model: Any, optimizer: Any, schedule: Any, loader: Any) -> dict[str, list[float]]:
    """Train one epoch in the form of accelerate's examples."""
    found: dict[str, list[float]] = {"losses": [], "norms": [], "rates": []}
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                found["norms"].append(float(norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found["losses"].append(float(accelerator.gather(loss.detach()).mean()))
        found["rates"].append(optimizer.param_groups[0]["lr"])
    return found


def main() -> None:
    folder = sys.argv[1]
    torch.set_num_threads(1)
    set_seed(0)
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=STEPS, gradient_clipping=0.5)
    # Without a GPU accelerate looks for other ranks only where it is told how they talk.
    talk = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=STEPS, kwargs_handlers=[talk]
    )
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    told: dict[str, Any] = {"engine": type(model).__module__}
    parts = (accelerator, model, optimizer, schedule, loader)
    told["first"] = epoch(*parts)
    accelerator.save_state(f"{folder}/state")
    told["second"] = epoch(*parts)
    accelerator.load_state(f"{folder}/state")
    told["again"] = epoch(*parts)
    whole = accelerator.get_state_dict(model)
    told["shapes"] = {name: list(value.shape) for name, value in (whole or {}).items()}
    x, _ = next(iter(loader))
    model.eval()
    with torch.no_grad():
        gathered = accelerator.gather_for_metrics(model(x).float())
    told["gathered"] = list(gathered.shape)
    plain = accelerator.unwrap_model(model)
    told["unwrapped"] = type(plain).__name__
    (Path(folder) / f"told-{accelerator.process_index}.json").write_text(json.dumps(told))
    accelerator.end_training()


if __name__ == "__main__":
    main()
