"""transformers.Trainer with a DeepSpeed config, and a loop over `accelerate` with its plugin, on zerodrift.

    python tests/e2e/hf_trainer.py FOLDER STAGE [STAGE]

Two ranks are forked after the imports, which take most of the time, with the variables of torchrun.
The Trainer begins with pretrained weights, checkpoints, evaluates and resumes in a new Trainer, at one stage
after the other; then the loop trains, clips, saves its state and goes back to it. The results are in
FOLDER/STAGE/told.json and FOLDER/loop-RANK.json.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zerodrift.deepspeed

zerodrift.deepspeed.activate()

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 (which the first step imports: once, for both ranks)
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs  # noqa: E402
from launching import free_port  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed  # noqa: E402

# --- the Trainer ------------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def pretrained(folder: Path) -> Path:
    """Save a tiny model in the layout of transformers, on the first rank to arrive, and return its path."""
    place = folder.parent / "pretrained"
    if not place.exists():
        numbers = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        torch.manual_seed(0)
        draft = folder.parent / f"pretrained-{os.getpid()}"
        LlamaForCausalLM(LlamaConfig(**numbers, num_attention_heads=2)).save_pretrained(draft)
        with contextlib.suppress(OSError):  # another rank was first
            draft.rename(place)
    return place


def trainer(folder: Path, stage: int) -> Trainer:
    set_seed(0)
    pretrained(folder)  # before transformers knows of stage 3
    arguments = TrainingArguments(
        output_dir=str(folder), deepspeed=config(stage), use_cpu=True, bf16=True, seed=0,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, save_steps=2,
        logging_steps=1, learning_rate=1e-2, warmup_steps=1, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    # At stage 3 transformers builds and loads it under `zero.Init`, a module at a time.
    model = LlamaForCausalLM.from_pretrained(pretrained(folder), dtype=torch.float32)
    whole = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    assert (whole < 1000) is (stage == 3), whole
    return Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def config(stage: int) -> dict[str, Any]:
    """Return a config in the form of transformers' documentation."""
    adamw = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": stage, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True}
    batches = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    return {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": adamw},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {**zero, **dict.fromkeys(sizes, "auto")},
        **dict.fromkeys((*batches, "gradient_clipping"), "auto"),
        "wall_clock_breakdown": False,
    }


def logged(run: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def run_trainer(folder: Path, stage: int) -> None:
    folder.mkdir(exist_ok=True)
    first = trainer(folder, stage)
    first.train()
    told = {
        "losses": logged(first, "loss"),
        "norms": logged(first, "grad_norm"),
        "evaluated": first.evaluate()["eval_loss"],
        "engine": type(first.model_wrapped).__module__,
    }
    first.save_model(str(folder / "final"))
    second = trainer(folder, stage)
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    told |= {"resumed": logged(second, "loss"), "again": second.evaluate()["eval_loss"]}
    if first.args.process_index == 0:
        told["saved"] = sorted(path.name for path in (folder / "final").glob("*[nts]"))
        told["checkpoints"] = sorted(path.name for path in folder.glob("checkpoint-*"))
        (folder / "told.json").write_text(json.dumps(told))


# --- the loop ---------------------------------------------------------------------------------------------


def epoch(accelerator: Any, model: Any, optimizer: Any, schedule: Any, loader: Any) -> list[list[float]]:
    """Train one epoch in the form of accelerate's examples; return losses, rates and norms."""
    losses, rates, norms = [], [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
        rates.append(optimizer.param_groups[0]["lr"])
    return [losses, rates, norms]


def run_loop(folder: Path) -> None:
    set_seed(0)
    # Without a GPU accelerate looks for other ranks only where it is told how they talk.
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=0.5),
        gradient_accumulation_steps=2,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    loader: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    parts = (accelerator, model, optimizer, schedule, loader)
    told: dict[str, Any] = {"engine": type(model).__module__, "first": epoch(*parts)}
    accelerator.save_state(str(folder / "state"))
    told["second"] = epoch(*parts)
    accelerator.load_state(str(folder / "state"))
    told["again"] = epoch(*parts)
    whole = accelerator.get_state_dict(model) or {}
    told["shapes"] = {name: list(value.shape) for name, value in whole.items()}
    (folder / f"loop-{accelerator.process_index}.json").write_text(json.dumps(told))
    accelerator.end_training()


def as_rank(rank: int, port: int, run: Callable[[], None]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    run()


def main() -> None:
    folder, stages = Path(sys.argv[1]), sys.argv[2:]
    fork = multiprocessing.get_context("fork")
    for run in (
        lambda: [run_trainer(folder / stage, int(stage)) for stage in stages],
        lambda: run_loop(folder),
    ):
        port = free_port()
        ranks = [fork.Process(target=as_rank, args=(rank, port, run), daemon=True) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            sys.exit(f"ranks ended with {[rank.exitcode for rank in ranks]}")


if __name__ == "__main__":
    main()
