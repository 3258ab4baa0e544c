"""transformers.Trainer with a DeepSpeed config, on zerodrift; started by torchrun.

    torchrun --nproc-per-node=2 tests/e2e/hf_trainer.py FOLDER STAGE [STAGE]

Trains a tiny Llama from pretrained weights, checkpoints, evaluates and resumes in a new Trainer, at one
stage after the other. The results are in FOLDER/STAGE/told.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import zerodrift.deepspeed

zerodrift.deepspeed.activate()

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME  # noqa: E402


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def pretrained(folder: str) -> str:
    """Save a tiny model in the layout of transformers, on the first rank to arrive, and return its path."""
    place = Path(folder).parent / "pretrained"
    if not place.exists():
        numbers = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        torch.manual_seed(0)
        draft = Path(folder).parent / f"pretrained-{os.getpid()}"
        LlamaForCausalLM(LlamaConfig(**numbers, **heads)).save_pretrained(draft)
        with contextlib.suppress(OSError):  # another rank was first
            draft.rename(place)
    return str(place)


def trainer(folder: str, stage: int, steps: int) -> Trainer:
    set_seed(0)
    pretrained(folder)  # before transformers knows of stage 3
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config(stage),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        warmup_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
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
        **dict.fromkeys(batches, "auto"),
        "gradient_clipping": "auto",
        "wall_clock_breakdown": False,
    }


def main() -> None:
    torch.set_num_threads(1)
    for stage in sys.argv[2:]:
        folder = Path(sys.argv[1]) / stage
        folder.mkdir(exist_ok=True)
        see(str(folder), int(stage))


def see(folder: str, stage: int) -> None:
    first = trainer(folder, stage, 4)
    first.train()
    evaluated = first.evaluate()["eval_loss"]
    first.save_model(str(Path(folder) / "final"))
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in first.state.log_history if "grad_norm" in entry]
    engine = type(first.model_wrapped).__module__

    second = trainer(folder, stage, 4)
    second.train(resume_from_checkpoint=str(Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-2"))
    resumed = [entry["loss"] for entry in second.state.log_history if "loss" in entry]
    again = second.evaluate()["eval_loss"]
    if first.args.process_index == 0:
        told = {
            "losses": losses,
            "resumed": resumed,
            "evaluated": evaluated,
            "again": again,
            "norms": norms,
            "engine": engine,
            "missing": sorted({CONFIG_NAME, SAFE_WEIGHTS_NAME} - set(os.listdir(Path(folder) / "final"))),
            "checkpoints": sorted(
                path.name.removeprefix(PREFIX_CHECKPOINT_DIR)
                for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            ),
        }
        (Path(folder) / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
